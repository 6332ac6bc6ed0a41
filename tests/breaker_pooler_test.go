package tests

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// pgbouncer is the program that scripts/ensure-pgbouncer installs.
func pgbouncer(t *testing.T) string {
	t.Helper()
	bin, err := exec.LookPath("pgbouncer")
	if err != nil {
		if bin, err = exec.LookPath("/usr/sbin/pgbouncer"); err != nil {
			t.Fatal("pgbouncer is not on this machine: run scripts/ensure-pgbouncer")
		}
	}
	return bin
}

// C-061, C-006: a pooler in transaction mode between everything, whatever way of sending statements the URL asks for. The
// plain URL is the one that people write: there pgx would prepare statements, which the next transaction's backend
// does not know.
func TestEverythingGoesThroughPgBouncer(t *testing.T) {
	t.Parallel()
	bin := pgbouncer(t)
	for _, c := range []struct{ name, setting, query string }{
		{"plain URL", "", ""},
		{"plain URL and one backend", "default_pool_size=1", ""},
		{"cache_describe", "server_round_robin=1", "&default_query_exec_mode=cache_describe"},
		{"exec", "", "&default_query_exec_mode=exec"},
		{"simple_protocol", "", "&default_query_exec_mode=simple_protocol"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := testenv.New(t)
			sink := testenv.NewSink(t)
			sink.Script("fails", testenv.Reply{Status: 500, Body: "no"})
			url := startBouncer(t, bin, e.Database, "transaction", c.setting) + c.query
			through := "TASKRELAY_DATABASE_URL=" + url
			var all []*testenv.Process
			for range 2 {
				all = append(all, e.StartRelay(through),
					e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "2"), through)...))
			}
			// Not before the first ones run: what they left prepared on a backend must not hurt those that come later.
			for _, p := range all {
				waitHealth(t, adminURL(t, p)+"/readyz", 200)
			}
			mode := c.query
			if mode == "" {
				mode = "&default_query_exec_mode=cache_describe" // a Go producer says so itself
			}
			producer := openPool(t, startBouncer(t, bin, e.Database, "transaction", c.setting)+mode, nil)
			for i := range 50 {
				err := pgx.BeginFunc(t.Context(), producer, func(tx pgx.Tx) error {
					_, err := outbox.Enqueue(t.Context(), tx, "ORDER_PAYMENT", map[string]int{"n": i}, outbox.In(time.Duration(i%3)*300*time.Millisecond))
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			fails := e.Insert(t, "ORDER_PAYMENT", "biz_id", "fails")
			e.WaitNoneOpen(t, soon)
			e.WaitCount(t, soon, 50, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1`)
			equal(t, "calls", len(sink.Calls()), 50+2)
			waitLetter(t, e, "ORDER_PAYMENT", fails)

			env := []string{through, "TASKRELAY_NATS_URL=" + e.NATS.URL}
			sink.Script("fails", testenv.Reply{Status: 200})
			for range 3 { // a backend that an earlier run of the command has used
				runCLI(t, "", env, "list", "--limit", "5").ok(t, 0)
				runCLI(t, "", env, "show", itoa(fails)).ok(t, 0, "ORDER_PAYMENT/fails")
			}
			runCLI(t, "", env, "requeue", itoa(fails), "--reason", "mended").ok(t, 0)
			runCLI(t, "", env, "enqueue", "ORDER_PAYMENT", "--biz-id", "by hand").ok(t, 0)
			e.WaitNoneOpen(t, soon)
			waitNoLetter(t, e, "ORDER_PAYMENT", fails)

			noticed := 0
			for _, p := range all {
				noticed += len(p.LogLines("a pooler answers: no statement is prepared ahead (default_query_exec_mode=cache_describe)"))
				for _, code := range []string{"42P05", "26000", "08P01"} {
					if strings.Contains(p.Logs(), code) {
						t.Errorf("%s logged SQLSTATE %s", p.Name, code)
					}
				}
			}
			want := 0
			if c.query == "" {
				want = len(all)
			}
			equal(t, "processes that noticed the pooler", noticed, want)
		})
	}
}

// Without a pooler statements are prepared once, and with one whoever knows better says so.
func TestDirectConnectionsAreNotTakenForAPooler(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	direct := e.StartRelay()
	told := e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", "noop:"),
		"TASKRELAY_DATABASE_URL="+startBouncer(t, pgbouncer(t), e.Database, "session", "default_pool_size=30")+"&default_query_exec_mode=cache_statement")...)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	for _, p := range []*testenv.Process{direct, told} {
		waitHealth(t, adminURL(t, p)+"/readyz", 200)
		if strings.Contains(p.Logs(), "a pooler answers") {
			t.Errorf("%s: a pooler is reported", p.Name)
		}
	}
}
