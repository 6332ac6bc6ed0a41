package tests

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// adminURL is where a process serves its health: the log names the real port.
func adminURL(t *testing.T, p *testenv.Process) string {
	t.Helper()
	p.WaitLog(t, 20*time.Second, "admin server listens")
	return fmt.Sprint("http://", p.LogLines("admin server listens")[0]["address"])
}

func health(url string) (code int, text string, err error) {
	resp, err := http.Get(url)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

func waitHealth(t *testing.T, url string, code int, texts ...string) {
	t.Helper()
	testenv.Eventually(t, 30*time.Second, func() error {
		got, text, err := health(url)
		if err != nil || got != code {
			return fmt.Errorf("%s: got %d %q, %v, want %d", url, got, text, err, code)
		}
		for _, want := range texts {
			if !strings.Contains(text, want) {
				return fmt.Errorf("%s: got %q, want %q", url, text, want)
			}
		}
		return nil
	})
}

func TestHelpAndVersionNeedNoConfiguration(t *testing.T) {
	for name, words := range map[string][]string{
		"relay":  {"TASKRELAY_RELAY_POLL_MAX", "20ms", "TASKRELAY_DATABASE_URL", "Exit codes"},
		"worker": {"TASKRELAY_WORKER_LEASE", "30s", "TASKRELAY_BIZ_<TYPE>_TARGET", "5s (fixed: 60s)"},
	} {
		for _, flag := range []string{"-h", "--help"} {
			out, code := testenv.Run(t, name, []string{flag})
			if code != 0 {
				t.Errorf("%s %s: exit code %d", name, flag, code)
			}
			for _, w := range words {
				if !strings.Contains(out, w) {
					t.Errorf("%s %s does not print %q", name, flag, w)
				}
			}
		}
		if out, code := testenv.Run(t, name, []string{"-version"}); code != 0 || !strings.HasPrefix(out, name+" ") {
			t.Errorf("%s -version: %d %q", name, code, out)
		}
		for _, args := range [][]string{{"-verbose"}, {"run"}} {
			if out, code := testenv.Run(t, name, args); code != 2 || !strings.Contains(out, name+" -h") {
				t.Errorf("%s %v: %d %q", name, args, code, out)
			}
		}
	}
}

// C-131: the reason is one plain line on stderr, the exit code says whether to try again, and no password is shown.
func TestBadStartSaysWhy(t *testing.T) {
	e := testenv.New(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	empty := testenv.EmptyDB(t)
	noop := testenv.HTTPType("A", "noop:")
	wrong := func(old, new string) string { return "TASKRELAY_DATABASE_URL=" + strings.Replace(e.URL, old, new, 1) }

	for name, c := range map[string]struct {
		binary string
		vars   []string
		code   int
		want   string
	}{
		"unknown variable":    {"relay", e.Vars("TASKRELAY_DATABSE_URL=x"), 2, "relay: TASKRELAY_DATABSE_URL: unknown variable: did you mean TASKRELAY_DATABASE_URL?"},
		"nothing set":         {"relay", nil, 2, "relay: TASKRELAY_DATABASE_URL: required and not set"},
		"empty":               {"relay", e.Vars("TASKRELAY_NATS_URL="), 2, "relay: TASKRELAY_NATS_URL: set but empty"},
		"duration":            {"worker", e.Vars(append(noop, "TASKRELAY_WORKER_LEASE=60")...), 2, `worker: TASKRELAY_WORKER_LEASE: "60": expected a duration`},
		"no types":            {"worker", e.Vars(), 2, "worker: TASKRELAY_BIZ_TYPES: required by the stock worker"},
		"dsn":                 {"relay", e.Vars("TASKRELAY_DATABASE_URL=postgres://u:hunter2@h:port/x"), 2, "relay: TASKRELAY_DATABASE_URL: expected a Postgres URL"},
		"nats url":            {"relay", e.Vars("TASKRELAY_NATS_URL=u:hunter2@h"), 2, "relay: TASKRELAY_NATS_URL: expected NATS URLs"},
		"no database":         {"relay", e.Vars(wrong("/"+e.Name, "/nowhere")), 1, `relay: connect to Postgres`},
		"port in use":         {"relay", e.Vars("TASKRELAY_ADMIN_ADDR=" + taken.Addr().String()), 1, "TASKRELAY_ADMIN_ADDR"},
		"no schema":           {"relay", e.Vars("TASKRELAY_DATABASE_URL=" + empty.URL), 1, `run "taskrelay migrate up"`},
		"no schema, worker":   {"worker", e.Vars(append(noop, "TASKRELAY_DATABASE_URL="+empty.URL)...), 1, `run "taskrelay migrate up"`},
		"credentials missing": {"relay", e.Vars("TASKRELAY_NATS_CREDS=/no/such/file"), 2, "relay: TASKRELAY_NATS_CREDS"},
	} {
		t.Run(name, func(t *testing.T) {
			out, code := testenv.Run(t, c.binary, nil, c.vars...)
			if code != c.code || !strings.Contains(out, c.want) || strings.Contains(out, "hunter2") {
				t.Errorf("exit code %d, want %d; %q, want %q", code, c.code, out, c.want)
			}
			last := strings.Split(strings.TrimSpace(out), "\n")
			if line := last[len(last)-1]; !strings.HasPrefix(line, c.binary+": ") {
				t.Errorf("the last line is no plain line: %q", line)
			}
		})
	}
}

func TestMigrateAutoMakesTheSchema(t *testing.T) {
	empty := testenv.EmptyDB(t)
	e := testenv.NewEnv(t, empty, testenv.NATS(t))
	relays := []*testenv.Process{e.StartRelay("TASKRELAY_MIGRATE=auto"), e.StartRelay("TASKRELAY_MIGRATE=auto")}
	for _, p := range relays {
		waitHealth(t, adminURL(t, p)+"/readyz", 200)
	}
	empty.Insert(t, "A")
	for _, p := range relays {
		if code := p.Stop(t, 20*time.Second); code != 0 {
			t.Errorf("exit code %d", code)
		}
	}
}

func TestProcessWaitsForItsServersAndIsAliveMeanwhile(t *testing.T) {
	pg := testenv.OwnPostgres(t)
	db := testenv.DBOn(t, pg)
	n := testenv.StartNATSProcess(t)
	e := testenv.NewEnv(t, db, &n.NATSServer)
	n.Kill9(t)
	if err := pg.Kill9(); err != nil {
		t.Fatal(err)
	}

	relay := e.StartRelay()
	worker := e.StartWorker(testenv.HTTPType("A", "noop:")...)
	for _, p := range []*testenv.Process{relay, worker} {
		p.WaitLog(t, 20*time.Second, "Postgres does not answer, waiting")
		waitHealth(t, adminURL(t, p)+"/livez", 200, "ok")
		waitHealth(t, adminURL(t, p)+"/readyz", 503, "starting")
	}
	if err := pg.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range []*testenv.Process{relay, worker} {
		waitHealth(t, adminURL(t, p)+"/readyz?verbose", 503, "[+] postgres ok", "[-] nats")
		waitHealth(t, adminURL(t, p)+"/livez", 200, "ok")
	}
	n.Start(t)
	for _, p := range []*testenv.Process{relay, worker} {
		waitHealth(t, adminURL(t, p)+"/readyz?verbose", 200, "[+] postgres ok", "[+] nats ok")
		waitHealth(t, adminURL(t, p)+"/metrics", 200, "taskrelay_build_info")
	}
	id := db.Insert(t, "A")
	db.WaitStatus(t, 30*time.Second, id, "succeeded")
	for _, p := range []*testenv.Process{relay, worker} {
		if code := p.Stop(t, 20*time.Second); code != 0 {
			t.Errorf("%s: exit code %d", p.Name, code)
		}
	}
}

func TestDisabledRelayIsReadyAndPublishesNothing(t *testing.T) {
	e := testenv.New(t)
	e.Insert(t, "A")
	p := e.StartRelay("TASKRELAY_RELAY_ENABLED=false")
	waitHealth(t, adminURL(t, p)+"/readyz", 200)
	waitHealth(t, adminURL(t, p)+"/livez", 200)
	p.WaitLog(t, 10*time.Second, "publishing nothing")
	testenv.Never(t, 500*time.Millisecond, func() error {
		if info, err := e.NATS.JS.Stream(t.Context(), "TASKS"); err == nil {
			return fmt.Errorf("stream %s was made", info.CachedInfo().Config.Name)
		}
		return nil
	})
	if code := p.Stop(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	e := testenv.New(t)
	l, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	e.StartRelay()
	w := e.StartWorker(append(testenv.HTTPType("A", "http://"+l.Addr().String()), "TASKRELAY_WORKER_GRACE=10m")...)
	id := e.Insert(t, "A")
	e.WaitStatus(t, 30*time.Second, id, "running")

	admin := adminURL(t, w)
	w.Signal(t, syscall.SIGTERM)
	waitHealth(t, admin+"/readyz", 503, "stopping")
	waitHealth(t, admin+"/livez", 200)
	w.Signal(t, syscall.SIGTERM)
	if code := w.Wait(t, 5*time.Second); code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
	if !strings.Contains(w.Logs(), "worker: second signal") {
		t.Error("the log does not say why")
	}
}
