package natscli

import (
	"testing"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func TestCommandsCanBePasted(t *testing.T) {
	var got []string
	for _, c := range DeadLetters(Server{URL: "nats://127.0.0.1:4222"}, outbox.Names{Namespace: "eu"}, "eu.dead.ACCOUNT_OPEN.12") {
		got = append(got, Line(c))
	}
	want := []string{
		"nats --server nats://127.0.0.1:4222 stream get EU_TASKS_DEAD --last-for eu.dead.ACCOUNT_OPEN.12",
		"nats --server nats://127.0.0.1:4222 stream report",
		"nats --server nats://127.0.0.1:4222 stream subjects EU_TASKS_DEAD",
		"nats --server nats://127.0.0.1:4222 sub --stream EU_TASKS_DEAD 'eu.dead.>' --all -T",
	}
	if len(got) != len(want) {
		t.Fatalf("got %d commands, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("got  %s\nwant %s", got[i], want[i])
		}
	}
}

// A person pastes them in a shell, and reaches what the command itself has reached.
func TestCommandsReachTheSameStreams(t *testing.T) {
	all := Server{URL: "tls://n:4222", Creds: "/etc/op.creds", CA: "/ca.pem", Cert: "/op pem", ClientsKey: "/op.key"}
	for want, c := range map[string][]string{
		"nats --js-api-prefix '$JS.hub.API' stream edit TASKS":                                                                Server{}.Command(outbox.Names{APIPrefix: "$JS.hub.API."}, "stream", "edit", "TASKS"),
		"nats --server tls://n:4222 --creds /etc/op.creds --tlsca /ca.pem --tlscert '/op pem' --tlskey /op.key stream report": all.Command(outbox.Names{}, "stream", "report"),
		"nats --nkey /op.nk stream report":                                                                                    Server{NKey: "/op.nk"}.Command(outbox.Names{}, "stream", "report"),
	} {
		if got := Line(c); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}
