package tests

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
	"github.com/taskrelay/taskrelay/internal/testenv"
)

// An outage is a way in which Postgres is away or refuses for a while.
type outage struct {
	name  string
	begin func(t *testing.T, p *pgtemp.Server, e *testenv.Env)
	end   func(t *testing.T, p *pgtemp.Server, e *testenv.Env)
	// It ends when the processes that are connected directly have logged this, so that it is not over before anybody has
	// noticed, or after this time.
	noticed string
	lasts   time.Duration
	// harmless: work must go on meanwhile.
	harmless bool
	soak     bool // in the long form alone
}

// Issue 3, part 4; C-043, C-046, C-058, C-059: whatever Postgres does to us, a task that was committed is called once. One
// relay and one worker are connected directly, the others through PgBouncer, where client connections survive what
// happens behind it.
func TestPostgresOutages(t *testing.T) {
	t.Parallel()
	p := testenv.OwnPostgres(t)
	db := testenv.DBOn(t, p)
	e := testenv.NewEnv(t, db, testenv.NATS(t))
	user := appUser(t, e)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 20 * time.Millisecond})
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=60s")
	app := &testenv.Database{URL: user, Name: e.Name, Pool: openPool(t, user, nil)}
	direct := slices.Concat(vars, []string{"TASKRELAY_DATABASE_URL=" + user})
	pooled := slices.Concat(vars, []string{"TASKRELAY_DATABASE_URL=" + startBouncer(t, pgbouncer(t), app, "transaction", "server_login_retry=1")})
	all := []*testenv.Process{e.StartRelay(direct...), e.StartWorker(direct...), e.StartRelay(pooled...), e.StartWorker(pooled...)}
	for _, p := range all {
		waitHealth(t, adminURL(t, p)+"/readyz", 200)
	}
	l := startLoad(t, testenv.NewEnv(t, app, e.NATS), sink, "ORDER_PAYMENT", 20*time.Millisecond)
	l.e = e // the verdict is a superuser's
	l.warmUp(30)
	for _, o := range outages() {
		if o.soak && !*soak {
			continue
		}
		began := time.Now()
		noticed := waitLogged(t, o.noticed, all[:2])
		o.begin(t, p, e)
		switch {
		case o.harmless:
			l.recovery(o.name+", while it lasts", time.Now(), 15*time.Second)
		case o.noticed != "":
			noticed()
		}
		time.Sleep(o.lasts)
		o.end(t, p, e)
		l.recovery(fmt.Sprintf("%s (%.1fs), from its end", o.name, time.Since(began).Seconds()), time.Now(), 15*time.Second)
		stillRunning(t, all...)
	}
	l.verdict(1)
	equal(t, "attempts in the log that did not succeed", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome <> 'succeeded'`), 0)
	equal(t, "attempts in the log", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt`), int64(len(sink.Calls())))
	for _, p := range all {
		waitHealth(t, adminURL(t, p)+"/readyz", 200)
		// In the long form workers cannot say for 45 s that they are alive: that is no reason to send for the operator.
		if strings.Contains(p.Logs(), "no live worker knows their type") {
			t.Errorf("%s misses the workers after an outage", p.Name)
		}
	}
}

func outages() []outage {
	nothing := func(*testing.T, *pgtemp.Server, *testenv.Env) {}
	return []outage{
		{name: "one backend killed",
			begin: func(t *testing.T, p *pgtemp.Server, e *testenv.Env) {
				pid := e.Int(t, `SELECT pid FROM pg_stat_activity WHERE datname = $1 AND application_name LIKE 'taskrelay-%' LIMIT 1`, e.Name)
				if err := syscall.Kill(int(pid), syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			},
			end: waitAnswer},
		{name: "read only",
			begin: set("default_transaction_read_only", "on"), noticed: "read-only transaction",
			end: set("default_transaction_read_only", "off")},
		{name: "connection limit reached",
			begin: func(t *testing.T, p *pgtemp.Server, e *testenv.Env) {
				admin(t, p, "ALTER DATABASE "+e.Name+" CONNECTION LIMIT 0")
				admin(t, p, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")
				admin(t, p, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'taskrelay-%'")
			},
			noticed: "53300",
			end: func(t *testing.T, p *pgtemp.Server, e *testenv.Env) {
				admin(t, p, "ALTER DATABASE "+e.Name+" CONNECTION LIMIT -1")
			}},
		{name: "killed",
			begin: func(t *testing.T, p *pgtemp.Server, _ *testenv.Env) {
				if err := p.Kill9(); err != nil {
					t.Fatal(err)
				}
			},
			end: restart},
		{name: "fast restart", begin: nothing, end: restart, soak: true},
		{name: "away for 45 s",
			begin: func(t *testing.T, p *pgtemp.Server, _ *testenv.Env) {
				if err := p.Shutdown(); err != nil {
					t.Fatal(err)
				}
			},
			lasts: 45 * time.Second, // for the pauses between tries to have grown to their longest
			end:   restart, soak: true},
		{name: "statement_timeout = 1ms", begin: set("statement_timeout", "'1ms'"), noticed: "57014",
			end: set("statement_timeout", "0"), soak: true},
		{name: "idle_in_transaction_session_timeout = 1ms", harmless: true,
			begin: set("idle_in_transaction_session_timeout", "'1ms'"), end: set("idle_in_transaction_session_timeout", "0"), soak: true},
		{name: "default_transaction_isolation = repeatable read", harmless: true,
			begin: set("default_transaction_isolation", "'repeatable read'"), end: set("default_transaction_isolation", "'read committed'")},
		{name: "default_transaction_isolation = serializable", harmless: true, soak: true,
			begin: set("default_transaction_isolation", "serializable"), end: set("default_transaction_isolation", "'read committed'")},
	}
}

// appUser makes a user that is no superuser, as limits hold for, and returns its URL.
func appUser(t *testing.T, e *testenv.Env) string {
	t.Helper()
	e.Exec(t, `CREATE ROLE app LOGIN PASSWORD 'app'; GRANT taskrelay_relay, taskrelay_worker, taskrelay_producer TO app`)
	u, err := url.Parse(e.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("app", "app")
	return u.String()
}

// admin runs a statement in the database postgres, as superuser.
func admin(t *testing.T, p *pgtemp.Server, sql string) {
	t.Helper()
	eventuallySQL(t, p.URL, sql)
}

// set changes a setting for every session, old and new, at once.
func set(name, value string) func(*testing.T, *pgtemp.Server, *testenv.Env) {
	return func(t *testing.T, p *pgtemp.Server, _ *testenv.Env) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		c, err := pgx.Connect(ctx, p.URL+"&default_transaction_read_only=off&statement_timeout=0")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close(ctx)
		for _, sql := range []string{"ALTER SYSTEM SET " + name + " = " + value, "SELECT pg_reload_conf()"} {
			if _, err := c.Exec(ctx, sql); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func waitAnswer(t *testing.T, p *pgtemp.Server, e *testenv.Env) {
	t.Helper()
	eventuallySQL(t, e.URL, "SELECT 1")
}

func restart(t *testing.T, p *pgtemp.Server, _ *testenv.Env) {
	t.Helper()
	if err := p.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// waitLogged returns a function that waits until each process has logged the text since now.
func waitLogged(t *testing.T, text string, processes []*testenv.Process) func() {
	before := make([]int, len(processes))
	for i, p := range processes {
		before[i] = strings.Count(p.Logs(), text)
	}
	return func() {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			for i, p := range processes {
				if strings.Count(p.Logs(), text) <= before[i] {
					return errorf("%s has not logged %q", p.Name, text)
				}
			}
			return nil
		})
	}
}
