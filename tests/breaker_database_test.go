package tests

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Whatever an administrator has set for the database, the outcome is the same: isolation, time zone, formats, plans and
// string syntax do not reach our statements.
func TestOddDatabaseSettingsChangeNothing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("fails", testenv.Reply{Status: 500})
	for _, set := range []string{
		"default_transaction_isolation = serializable", "default_transaction_deferrable = on", "timezone = 'America/St_Johns'",
		"datestyle = 'German, DMY'", "intervalstyle = sql_standard", "extra_float_digits = 0", "bytea_output = escape",
		"standard_conforming_strings = off", "backslash_quote = off", "quote_all_identifiers = on", "array_nulls = off",
		"transform_null_equals = on", "search_path = ''", "row_security = off", "xmloption = document", "default_tablespace = ''",
		"plan_cache_mode = force_generic_plan", "enable_indexscan = off", "enable_nestloop = off", "jit_above_cost = 0",
		"synchronous_commit = off", "idle_session_timeout = '1s'", "client_min_messages = debug1",
	} {
		e.Exec(t, "ALTER DATABASE "+e.Name+" SET "+set)
	}
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "2")...)
	odd := openPool(t, e.URL, nil) // its sessions have the settings
	for i := range 50 {
		_, err := odd.Exec(t.Context(), `INSERT INTO taskrelay.task (biz_type, biz_id, payload, run_at) VALUES ('ORDER_PAYMENT', $1, $2, now() + $3 * interval '1 s')`,
			fmt.Sprintf(`O\%d'`, i), `{"a": "\\ \u0041"}`, i%3)
		if err != nil {
			t.Fatal(err)
		}
	}
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "fails")
	e.WaitNoneOpen(t, soon)
	equal(t, "succeeded at once", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1`), 50)
	equal(t, "calls", len(sink.Calls()), 52)
	for _, c := range sink.Calls() {
		if c.BizID != "fails" && c.Body != `{"a": "\\ \u0041"}` {
			t.Errorf("body %q", c.Body)
		}
	}
	waitLetter(t, e, "ORDER_PAYMENT", id)
	sink.Script("fails", testenv.Reply{Status: 200})
	cli(t, e, "", "requeue", itoa(id), "--reason", "bank is back").ok(t, 0)
	e.WaitStatus(t, soon, id, "succeeded")
	cli(t, e, "", "list", "-o", "json").ok(t, 0)
	for _, bad := range []string{"", " \t"} {
		if _, err := odd.Exec(t.Context(), `SELECT * FROM taskrelay.cancel($1::bigint, $2)`, id, bad); err == nil || !strings.Contains(err.Error(), "reason") {
			t.Errorf("the reason %q: got %v, want a refusal", bad, err)
		}
	}
}

// C-059, C-070: the table is locked for long, and short limits end every statement that waits for it. Nothing piles up,
// nothing is marked failed, the relay says that it is not ready, and all goes on by itself.
func TestLockedTableIsWaitedFor(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.Exec(t, "ALTER DATABASE "+e.Name+" SET statement_timeout = '200ms'")
	e.Exec(t, "ALTER DATABASE "+e.Name+" SET lock_timeout = '100ms'")
	e.Exec(t, "ALTER DATABASE "+e.Name+" SET idle_in_transaction_session_timeout = '100ms'")
	relay := e.StartRelay()
	worker := e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	sink.Default(testenv.Reply{Status: 200, Delay: time.Second})
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 20)`)
	sink.WaitCalls(t, soon, 21) // they end while the table is locked, and cannot be settled

	tx, err := e.Pool.Begin(t.Context()) // a session from before the settings
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), `LOCK TABLE taskrelay.task IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 100)`); err != nil {
		t.Fatal(err)
	}
	waitHealth(t, adminURL(t, relay)+"/readyz?verbose", 503, "[-] relay")
	waitHealth(t, adminURL(t, worker)+"/readyz?verbose", 503, "[-] worker")
	testenv.Never(t, 3*time.Second, func() error {
		// pg_stat_activity has no lock on the table.
		if n := e.Int(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND application_name LIKE 'taskrelay-%'`, e.Name); n > 20 {
			return fmt.Errorf("%d connections, want at most 10 of each process", n)
		}
		for _, p := range []*testenv.Process{relay, worker} {
			select {
			case <-p.Done():
				return fmt.Errorf("%s has ended", p.Name)
			default:
			}
		}
		return nil
	})
	for _, p := range []*testenv.Process{relay, worker} {
		if n := strings.Count(p.Logs(), "\n"); n > 200 {
			t.Errorf("%s has written %d lines while it waited", p.Name, n)
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.WaitNoneOpen(t, soon)
	equal(t, "succeeded", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1`), 121)
	equal(t, "calls", len(sink.Calls()), 121)
	waitHealth(t, adminURL(t, worker)+"/readyz", 200)
}

// C-058: fewer connections than the processes would like. They share what there is, and say why they wait.
func TestFewConnectionsAreEnough(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("fails", testenv.Reply{Status: 500})
	role := "few_" + e.Name
	e.Exec(t, "CREATE ROLE "+role+" LOGIN PASSWORD 'few' CONNECTION LIMIT 4")
	t.Cleanup(func() {
		if err := pgxExec(e, "DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	e.Exec(t, "GRANT taskrelay_relay, taskrelay_worker TO "+role)
	u, err := url.Parse(e.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(role, "few")
	few := "TASKRELAY_DATABASE_URL=" + u.String()
	relay := e.StartRelay(few)
	worker := e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "2"), few)...)
	for _, p := range []*testenv.Process{relay, worker} {
		waitHealth(t, adminURL(t, p)+"/readyz", 200)
	}
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, run_at) SELECT 'ORDER_PAYMENT', CASE WHEN g % 2 = 0 THEN now() + interval '1 s' END FROM generate_series(1, 500) AS g`)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "fails")
	e.WaitNoneOpen(t, soon)
	equal(t, "succeeded at once", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1`), 500)
	equal(t, "calls", len(sink.Calls()), 502)
	waitLetter(t, e, "ORDER_PAYMENT", id)
	testenv.Eventually(t, time.Minute, func() error { // the next process finds room
		if n := e.Int(t, `SELECT count(*) FROM pg_stat_activity WHERE usename = $1`, role); n > 3 {
			return fmt.Errorf("two idle processes keep %d of 4 connections", n)
		}
		return nil
	})
	if logs := relay.Logs() + worker.Logs(); strings.Contains(logs, `"postgres://`) || strings.Contains(logs, ":few@") {
		t.Error("a log shows the password")
	}
}

// pgxExec works at the end of a test too, when its context is over.
func pgxExec(e *testenv.Env, sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := pgx.Connect(ctx, e.URL)
	if err != nil {
		return err
	}
	defer c.Close(ctx)
	_, err = c.Exec(ctx, sql)
	return err
}

// C-071: a grant is missing. Nothing is lost or called, the log and /readyz name the table, no attempt is used up; the
// grant alone mends it.
func TestMissingGrantIsNamedAndHurtsNothing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	columns := e.Text(t, `SELECT string_agg(column_name, ', ') FROM information_schema.column_privileges
		WHERE table_schema = 'taskrelay' AND table_name = 'task' AND grantee = 'taskrelay_relay' AND privilege_type = 'UPDATE'`)
	e.Exec(t, "REVOKE UPDATE ("+columns+") ON taskrelay.task FROM taskrelay_relay")
	e.Exec(t, "REVOKE INSERT ON taskrelay.task_attempt FROM taskrelay_worker")
	// Reconciling would only come to the missing right after 30 s.
	relay := e.StartRelay("TASKRELAY_DATABASE_URL="+withRole(e.URL, "taskrelay_relay"), "TASKRELAY_RELAY_RECONCILE=1s")
	worker := e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_DATABASE_URL="+withRole(e.URL, "taskrelay_worker"))...)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 50)`)
	// On the work list too, which the relay has to write to.
	e.Exec(t, `UPDATE taskrelay.task SET republish_at = now(), next_attempt_at = now() WHERE id <= 5`)
	waitHealth(t, adminURL(t, relay)+"/readyz?verbose", 503, "permission denied for table task")
	waitHealth(t, adminURL(t, worker)+"/readyz?verbose", 503, "permission denied for table task_attempt")
	relay.WaitLog(t, soon, "42501")
	worker.WaitLog(t, soon, "42501")
	equal(t, "touched", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE attempt > 0 OR status <> 'pending'`), 0)
	equal(t, "calls", len(sink.Calls()), 0)

	e.Exec(t, "GRANT UPDATE ("+columns+") ON taskrelay.task TO taskrelay_relay")
	e.Exec(t, "GRANT INSERT ON taskrelay.task_attempt TO taskrelay_worker")
	e.WaitNoneOpen(t, soon)
	equal(t, "succeeded at once", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1`), 50)
	equal(t, "calls", len(sink.Calls()), 50)
	for _, p := range []*testenv.Process{relay, worker} {
		waitHealth(t, adminURL(t, p)+"/readyz", 200)
	}
}

// C-046, C-062: sessions are cut off again and again, and the tables change under the statements, while tasks run. Each
// is called once: a settle whose connection dies is not a failure, and nothing else may run the task.
func TestSessionsCutOffAndTablesChangedUnderLoad(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 20 * time.Millisecond})
	e.StartRelay()
	e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=20s")...)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	const rounds = 15
	for i := range rounds {
		e.Exec(t, `INSERT INTO taskrelay.task (biz_type, run_at) SELECT 'ORDER_PAYMENT', now() + g * interval '5 ms' FROM generate_series(1, 40) AS g`)
		sink.WaitCalls(t, soon, 1+40*i+20) // in the middle of them
		if n := e.Int(t, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1 AND application_name LIKE 'taskrelay-%'`, e.Name); n == 0 {
			t.Fatal("no session to cut off")
		}
		switch i {
		case 4:
			e.Exec(t, `ALTER TABLE taskrelay.task ADD COLUMN theirs text DEFAULT 'x'`)
		case 8:
			e.Exec(t, `ALTER TABLE taskrelay.task_attempt ADD COLUMN theirs int`)
		case 12:
			e.Exec(t, `ALTER TABLE taskrelay.lane ADD COLUMN theirs int`)
		}
	}
	e.WaitNoneOpen(t, soon)
	equal(t, "succeeded at once", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1`), 1+40*rounds)
	equal(t, "attempts in the log", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'succeeded'`), 1+40*rounds)
	equal(t, "calls", len(sink.Calls()), 1+40*rounds)
	noOverlaps(t, sink)
}
