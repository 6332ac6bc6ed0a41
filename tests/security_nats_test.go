package tests

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/deploy"
	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// locked is a nats-server with the shipped configuration: TLS, client certificates, a user for each part.
type locked struct {
	*testenv.NATSServer
	port int

	ca, cert, key string
}

// startLocked writes the shipped files as generate prints them and loads them. What the test puts in their place is where
// the files are, the port, the passwords, and one more user, itself, who may do everything.
func startLocked(t *testing.T, names outbox.Names) *locked {
	t.Helper()
	ca := testenv.NewCA(t)
	cert, key := ca.Issue(t, "nats")
	dir := t.TempDir()
	for _, f := range deploy.Files("nats", names) {
		text := f.Text
		if f.Path == "nats-server.conf" {
			replace := func(old, with string) {
				t.Helper()
				if strings.Count(text, old) != 1 {
					t.Fatalf("%s has %q %d times", f.Path, old, strings.Count(text, old))
				}
				text = strings.Replace(text, old, with, 1)
			}
			replace(`"0.0.0.0:4222"`, `"127.0.0.1:-1"`)
			replace(`http: "127.0.0.1:8222"`, ``)
			replace(`/var/lib/nats`, filepath.Join(dir, "store"))
			replace(`/etc/nats/tls/server.pem`, cert)
			replace(`/etc/nats/tls/server-key.pem`, key)
			replace(`/etc/nats/tls/ca.pem`, ca.File)
			for _, user := range []string{"RELAY", "WORKER", "PRODUCER", "OPERATOR", "VIEWER"} {
				replace("$"+user+"_PASSWORD", password(strings.ToLower(user)))
			}
			replace("users: [", `users: [ { user: test, password: "`+password("test")+`" }`)
		}
		if err := os.WriteFile(filepath.Join(dir, f.Path), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	opts, err := server.ProcessConfigFile(filepath.Join(dir, "nats-server.conf"))
	if err != nil {
		t.Fatal(err)
	}
	opts.NoSigs, opts.NoLog = true, true
	s, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("nats-server does not get ready")
	}
	l := &locked{NATSServer: &testenv.NATSServer{}, port: s.Addr().(*net.TCPAddr).Port, ca: ca.File}
	l.cert, l.key = ca.Issue(t, "client")
	l.URL = l.url("test")
	l.Conn = l.connect(t, "test", "_INBOX_test")
	if l.JS, err = jetstream.New(l.Conn); err != nil {
		t.Fatal(err)
	}
	return l
}

func password(user string) string { return user + "-hunter2" }

func (l *locked) url(user string) string {
	return fmt.Sprintf("tls://%s:%s@127.0.0.1:%d", user, password(user), l.port)
}

// vars are what a binary needs to be that user.
func (l *locked) vars(user string) []string {
	return []string{"TASKRELAY_NATS_URL=" + l.url(user), "TASKRELAY_NATS_CA=" + l.ca, "TASKRELAY_NATS_CERT=" + l.cert, "TASKRELAY_NATS_KEY=" + l.key}
}

func (l *locked) connect(t *testing.T, user, inbox string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(l.url(user), nats.RootCAs(l.ca), nats.ClientCert(l.cert, l.key), nats.CustomInboxPrefix(inbox),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatalf("connect as %s: %v", user, err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// natsCLI runs the nats CLI as a user, and returns its output and whether it went well.
func (l *locked) natsCLI(t *testing.T, user, inbox string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), testenv.NATSCLIPath(t), append([]string{"--server", l.url(user), "--tlsca", l.ca, "--tlscert", l.cert,
		"--tlskey", l.key, "--inbox-prefix", inbox, "--timeout", "2s"}, args...)...)
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Issue 5, item 7: everything runs under the shipped rights, in Postgres, in NATS, and over TLS, and nobody complains.
func TestEverythingRunsUnderTheShippedRights(t *testing.T) {
	t.Parallel()
	names := outbox.Names{Namespace: "eu"}
	l := startLocked(t, names)
	e := testenv.NewEnv(t, testenv.DB(t), l.NATSServer)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422})
	sink.Script("good", testenv.Statuses(200)...)
	sink.Script("slow", testenv.Statuses(500, 200)...)

	// What the retention takes at its first look.
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, status, finished_at) SELECT 'PAY', 'succeeded', now() - interval '1 day' FROM generate_series(1, 3)`)

	// Operator actions over NATS need both roles.
	ops := "ops_" + e.Name
	e.Exec(t, `CREATE ROLE `+ops+` NOLOGIN IN ROLE taskrelay_relay, taskrelay_operator`)
	as := func(user, role string, more ...string) []string {
		return append(append(l.vars(user), "TASKRELAY_NAMESPACE=eu", "TASKRELAY_DATABASE_URL="+withRole(e.URL, role)), more...)
	}
	relay := e.StartRelay(as("relay", ops, "TASKRELAY_RELAY_OPS=true", "TASKRELAY_RELAY_RECONCILE=1s", "TASKRELAY_RETAIN_SUCCEEDED=1h")...)
	worker := e.StartWorker(as("worker", "taskrelay_worker", testenv.HTTPType("PAY", sink.URL)...)...)
	command := func(code int, user, role string, args ...string) string {
		t.Helper()
		p := testenv.Start(t, "taskrelay", args, as(user, role)...)
		if got := p.Wait(t, 60*time.Second); got != code {
			t.Errorf("taskrelay %v as %s: exit code %d, want %d: %s", args, role, got, code, p.Logs())
		}
		return p.Logs()
	}
	operator := func(args ...string) string { t.Helper(); return command(0, "operator", "taskrelay_operator", args...) }

	// A task that succeeds, one that is tried again by way of the table, one that dies and tells of it.
	for _, id := range []string{"good", "slow", "bad"} {
		command(0, "producer", "taskrelay_producer", "enqueue", "PAY", "--biz-id", id)
	}
	bad := e.Int(t, `SELECT id FROM taskrelay.task WHERE biz_id = 'bad'`)
	e.WaitStatus(t, soon, bad, "dead")
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	e.WaitCount(t, soon, 2, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'`) // the old ones are gone by now
	relay.WaitLog(t, soon, "notice: tasks dead")
	if _, err := l.Last(t.Context(), names.DeadStream(), names.DeadSubject("PAY", bad)); err != nil {
		t.Error(err)
	}

	// An operator's night.
	command(0, "viewer", "taskrelay_viewer", "dead", "list")
	command(0, "viewer", "taskrelay_viewer", "dead", "groups")
	operator("doctor")
	operator("stats")
	operator("show", itoa(bad))
	operator("list", "--status", "dead")
	operator("types", "list")
	operator("purge", "--dry-run")
	operator("pause", "PAY", "--reason", "test")
	operator("resume", "PAY", "--reason", "test")
	operator("types", "set", "PAY", "--concurrency", "3", "--reason", "test")
	operator("requeue", itoa(bad), "--reason", "test")
	e.WaitCount(t, soon, 2, `SELECT count(*) FROM taskrelay.task_attempt WHERE task_id = $1`, bad)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	operator("dead", "requeue", "--type", "PAY", "--reason", "test", "--yes")
	e.WaitCount(t, soon, 3, `SELECT count(*) FROM taskrelay.task_attempt WHERE task_id = $1`, bad)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	if nc := l.connect(t, "operator", "_INBOX"); true {
		done(t, nc, "eu.taskrelay.ops.requeue", fmt.Sprintf(`{"ids": ["%d"], "reason": "test"}`, bad), 1)
	}
	e.WaitCount(t, soon, 4, `SELECT count(*) FROM taskrelay.task_attempt WHERE task_id = $1`, bad)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	letter := names.DeadSubject("PAY", bad)
	for _, args := range [][]string{
		{"stream", "subjects", "EU_TASKS_DEAD"}, {"stream", "state", "EU_TASKS_DEAD"}, {"stream", "get", "EU_TASKS_DEAD", "--last-for", letter},
		{"sub", "--stream", "EU_TASKS_DEAD", "eu.dead.PAY.*", "--all", "-T", "--wait", "1s"},
		{"consumer", "report", "EU_TASKS"}, {"consumer", "info", "EU_TASKS", "PAY-low"}, {"micro", "ls"},
	} {
		if out, err := l.natsCLI(t, "operator", "_INBOX", args...); err != nil || strings.Contains(out, "ermissions") {
			t.Errorf("nats %v as operator: %v\n%s", args, err, out)
		}
	}
	for _, args := range [][]string{{"stream", "subjects", "EU_TASKS"}, {"stream", "info", "EU_TASKS_DEAD"}, {"consumer", "report", "EU_TASKS"}} {
		if out, err := l.natsCLI(t, "viewer", "_INBOX_viewer", args...); err != nil || strings.Contains(out, "ermissions") {
			t.Errorf("nats %v as viewer: %v\n%s", args, err, out)
		}
	}

	// The relay makes the streams anew, and all that was in them.
	if err := l.JS.DeleteStream(t.Context(), names.Stream()); err != nil {
		t.Fatal(err)
	}
	last := e.Insert(t, "PAY", "biz_id", "last")
	e.WaitStatus(t, soon, last, "dead")
	for _, p := range []*testenv.Process{relay, worker} {
		for _, complaint := range []string{"ermissions violation", "permission denied"} {
			if i := strings.Index(strings.ToLower(p.Logs()), complaint); i >= 0 {
				t.Errorf("%s lacks a right: %s", p.Name, p.Logs()[max(0, i-300):min(len(p.Logs()), i+300)])
			}
		}
	}
}

// What a user may do in NATS, and may not. An entry is a subject to publish to, or "sub " and one to subscribe to.
func TestNATSPermissionsRefuseTheRest(t *testing.T) {
	t.Parallel()
	cases := map[string][]string{}
	for _, c := range []struct{ do, may string }{
		{"tasks.PAY.low", "relay"},
		{"dead.PAY.1", "relay"},
		{"events.PAY.dead", "relay"},
		{"taskrelay.wake", "producer operator"},
		{"taskrelay.ops.requeue", "operator"},
		{"$JS.API.STREAM.INFO.TASKS", "relay worker operator viewer"},
		{"$JS.API.STREAM.CREATE.TASKS", "relay"},
		{"$JS.API.STREAM.CREATE.OTHER", ""},
		{"$JS.API.STREAM.UPDATE.TASKS", "relay operator"},
		{"$JS.API.STREAM.DELETE.TASKS", ""},
		{"$JS.API.STREAM.PURGE.TASKS", ""},
		{"$JS.API.STREAM.PURGE.TASKS_DEAD", ""},
		{"$JS.API.STREAM.MSG.DELETE.TASKS_DEAD", "relay"},
		{"$JS.API.STREAM.MSG.GET.TASKS", "relay operator"},
		{"$JS.API.STREAM.MSG.GET.TASKS_DEAD", "relay operator"},
		{"$JS.API.DIRECT.GET.TASKS_DEAD", "operator"},
		{"$JS.API.STREAM.INFO.OTHER", ""},
		{"$JS.API.STREAM.MSG.GET.OTHER", ""},
		{"$JS.API.CONSUMER.CREATE.TASKS.PAY-low.tasks.PAY.low", "relay worker"},
		{"$JS.API.CONSUMER.CREATE.TASKS.thief", ""}, // one without a filter takes every lane
		{"$JS.API.CONSUMER.CREATE.TASKS.thief.tasks.>", ""},
		{"$JS.API.CONSUMER.CREATE.TASKS_DEAD.mine", "operator"},
		{"$JS.API.CONSUMER.MSG.NEXT.TASKS.PAY-low", "worker"},
		{"$JS.API.CONSUMER.MSG.NEXT.TASKS_EVENTS.notices", "relay"},
		{"$JS.API.CONSUMER.MSG.NEXT.TASKS_DEAD.mine", "operator"},
		{"$JS.API.CONSUMER.DELETE.TASKS.PAY-low", "relay operator"},
		{"$JS.API.CONSUMER.DELETE.TASKS_EVENTS.notices", ""},
		{"$JS.API.CONSUMER.PAUSE.TASKS.PAY-low", "relay operator"},
		{"$JS.ACK.TASKS.PAY-low.1.2.3.4.5", "worker"},
		{"$JS.ACK._.h.TASKS.PAY-low.1.2.3.4.5.0", "worker"},
		{"$JS.ACK.TASKS_EVENTS.notices.1.2.3.4.5", "relay"},
		{"$JS.API.ACCOUNT.PURGE.TASKRELAY", ""},
		{"other.subject", ""},
		{"sub tasks.>", ""},
		{"sub dead.>", "operator"},
		{"sub events.>", "operator"},
		{"sub >", ""},
		{"sub $JS.>", ""},
		{"sub _INBOX.>", "operator"},
		{"sub _INBOX_relay.x", "relay"},
		{"sub _INBOX_worker.x", "worker"},
		{"sub _INBOX_taskrelay.x", "operator"},
		{"sub _INBOX_viewer.x", "viewer"},
		{"sub taskrelay.wake", "relay"},
		{"sub taskrelay.ops.requeue", "relay"},
		{"sub $SRV.PING", "relay"},
	} {
		cases[c.do] = strings.Fields(c.may)
	}
	for _, ns := range []string{"", "eu"} {
		names := outbox.Names{Namespace: ns}
		l := startLocked(t, names)
		users := map[string]*nats.Conn{}
		for user, inbox := range map[string]string{"relay": "_INBOX_relay", "worker": "_INBOX_worker", "producer": "_INBOX", "operator": "_INBOX", "viewer": "_INBOX_viewer"} {
			users[user] = l.connect(t, user, inbox)
		}
		for do, may := range cases {
			subject, subscribes := strings.CutPrefix(inNamespace(do, names), "sub ")
			for user, nc := range users {
				got, want := l.allows(t, nc, subject, subscribes), slices.Contains(may, user)
				if got != want {
					t.Errorf("namespace %q: may %s do %q: got %v, want %v", ns, user, subject, got, want)
				}
			}
		}
		// Without a client certificate, or with a wrong password, nobody comes in.
		if _, err := nats.Connect(l.url("relay"), nats.RootCAs(l.ca)); err == nil {
			t.Error("no client certificate was asked for")
		}
		if _, err := nats.Connect(strings.Replace(l.url("relay"), password("relay"), "wrong", 1), nats.RootCAs(l.ca), nats.ClientCert(l.cert, l.key)); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("wrong password: %v", err)
		}
	}
}

// inNamespace is a subject with the names that an installation of a namespace has.
func inNamespace(s string, names outbox.Names) string {
	if names.Namespace == "" {
		return s
	}
	for _, stream := range []string{"TASKS_DEAD", "TASKS_EVENTS", "TASKS"} {
		if strings.Contains(s, "."+stream) {
			s = strings.Replace(s, "."+stream, ".EU_"+stream, 1)
			break
		}
	}
	for _, subject := range []string{"tasks.", "dead.", "events.", "taskrelay."} {
		if rest, ok := strings.CutPrefix(s, "sub "+subject); ok {
			return "sub eu." + subject + rest
		}
		if i := strings.Index(s, subject); i == 0 || i > 0 && s[i-1] == '.' {
			return s[:i] + "eu." + s[i:]
		}
	}
	return s
}

// allows reports whether the server takes a publish or a subscription. Its refusal comes before its answer to a flush.
// The connection keeps its last refusal, so one counts only when it names this subject and this verb.
func (l *locked) allows(t *testing.T, nc *nats.Conn, subject string, subscribes bool) bool {
	t.Helper()
	verb := "publish"
	if subscribes {
		verb = "subscription"
		sub, err := nc.SubscribeSync(subject)
		if err != nil {
			t.Fatalf("subscribe to %s: %v", subject, err)
		}
		defer func() { _ = sub.Unsubscribe() }()
	} else if err := nc.PublishRequest(subject, "_INBOX_nobody", []byte("no JSON: nothing is done")); err != nil {
		t.Fatalf("publish to %s: %v", subject, err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	err := nc.LastError()
	return err == nil || !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(verb+` to "`+subject+`"`))
}
