package natscli

import (
	"testing"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func TestCommandsCanBePasted(t *testing.T) {
	var got []string
	for _, c := range DeadLetters("nats://127.0.0.1:4222", outbox.Names{Namespace: "eu"}, "eu.dead.ACCOUNT_OPEN.12") {
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
