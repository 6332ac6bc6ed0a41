package tests

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// refused is one statement and what its refusal must say.
type refused struct{ sql, want string }

func TestProducerWritesItsColumnsAndNothingElse(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	pool := asRole(t, db, "taskrelay_producer")
	for _, sql := range []string{
		`INSERT INTO taskrelay.task (biz_type, biz_id, priority, ordering_key, payload, headers, run_at, max_attempts)
		 VALUES ('A', '1', 'high', NULL, '{"a":1}', '{"tenant":"x"}', now(), 3)`,
		`INSERT INTO taskrelay.task (biz_type, biz_id) VALUES ('A', '1') ON CONFLICT (biz_type, biz_id) DO NOTHING`,
		`INSERT INTO taskrelay.task (biz_type) VALUES ('A') RETURNING id`,
		`SELECT id, is_new FROM taskrelay.enqueue('A', '{"a":1}', 'e-1')`,
		`SELECT id, biz_type, biz_id, status FROM taskrelay.task`,
		`SELECT strict_types FROM taskrelay.installation`,
		`SELECT biz_type, default_priority, known_by FROM taskrelay.biz_type`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	equal(t, "tasks", db.Int(t, `SELECT count(*) FROM taskrelay.task`), 3)
	refuse(t, pool, []refused{
		{`INSERT INTO taskrelay.task (biz_type, status) VALUES ('A', 'succeeded')`, "permission denied"},
		{`INSERT INTO taskrelay.task (biz_type, xid) VALUES ('A', '1')`, "permission denied"},
		{`INSERT INTO taskrelay.task (biz_type, created_at) VALUES ('A', now())`, "permission denied"},
		{`INSERT INTO taskrelay.task (biz_type, generation) VALUES ('A', 5)`, "permission denied"},
		{`UPDATE taskrelay.task SET status = 'succeeded'`, "permission denied"},
		{`UPDATE taskrelay.task SET payload = '{}'`, "permission denied"},
		{`DELETE FROM taskrelay.task`, "permission denied"},
		{`TRUNCATE taskrelay.task`, "permission denied"},
		{`SELECT payload FROM taskrelay.task`, "permission denied"},
		{`SELECT * FROM taskrelay.requeue(1, 'x')`, "permission denied"},
		{`SELECT * FROM taskrelay.cancel(1, 'x')`, "permission denied"},
		{`SELECT * FROM taskrelay.task_view`, "permission denied"},
		{`INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('A', 'me')`, "permission denied"},
		{`UPDATE taskrelay.installation SET strict_types = false`, "permission denied"},
		{`UPDATE taskrelay.lane SET at = now()`, "permission denied"},
		{`INSERT INTO taskrelay.audit (action) VALUES ('x')`, "permission denied"},
		{`CREATE TABLE taskrelay.mine ()`, "permission denied"},
	})
}

func TestViewerSeesNoPayload(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Insert(t, "A", "payload", `{"secret":"hunter2"}`, "headers", `{"token":"hunter2"}`)
	db.Exec(t, `UPDATE taskrelay.task SET result = '{"r":"hunter2"}'`)
	db.Exec(t, `UPDATE taskrelay.task SET status = 'dead', finished_at = now() - interval '1 hour', dead_at = now() - interval '1 hour'`)
	db.Exec(t, `INSERT INTO taskrelay.task_attempt (task_id, lease_token, started_at, generation, attempt, biz_type, phase, outcome)
		VALUES (1, 1, now() - interval '1.5 s', 0, 1, 'A', 'execute', 'failed')`)
	pool := asRole(t, db, "taskrelay_viewer")
	for view, want := range map[string]int64{
		"task_view": 1, "attempt_view": 1, "dead": 1, "stuck": 1, "lag": 1, "task_attempt": 1, "lane": 0, "worker": 0, "relay": 0, "known_lane": 1,
	} {
		var rows int64
		var all string
		err := pool.QueryRow(t.Context(), `SELECT count(*), coalesce(string_agg(v::text, ''), '') FROM taskrelay.`+view+` AS v`).Scan(&rows, &all)
		if err != nil {
			t.Errorf("%s: %v", view, err)
			continue
		}
		equal(t, "rows of "+view, rows, want)
		if strings.Contains(all, "hunter2") {
			t.Errorf("%s shows the payload: %s", view, all)
		}
	}
	refuse(t, pool, []refused{
		{`SELECT payload FROM taskrelay.task`, "permission denied"},
		{`SELECT id FROM taskrelay.task`, "permission denied"},
		{`SELECT * FROM taskrelay.requeue(1, 'x')`, "permission denied"},
		{`SELECT * FROM taskrelay.enqueue('A')`, "permission denied"},
		{`INSERT INTO taskrelay.task (biz_type) VALUES ('A')`, "permission denied"},
	})
}

func TestOperatorActsThroughFunctionsOnly(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	id := db.Insert(t, "A", "biz_id", "1", "payload", `{"a":1}`)
	pool := asRole(t, db, "taskrelay_operator")
	for _, sql := range []string{
		`SELECT * FROM taskrelay.cancel(1, 'test')`,
		`SELECT * FROM taskrelay.requeue(ARRAY[1], 'test')`,
		`SELECT * FROM taskrelay.delay(1, '1 h', 'test')`,
		`SELECT * FROM taskrelay.run_now(1, 'test')`,
		`SELECT * FROM taskrelay.reset('A', '1', 'test')`,
		`SELECT payload FROM taskrelay.task`,
		`SELECT * FROM taskrelay.task_view, taskrelay.dead, taskrelay.stuck, taskrelay.lag, taskrelay.attempt_view, taskrelay.audit, taskrelay.task_attempt`,
		`SELECT * FROM taskrelay.set_type('NEW', '{}', 'test', add => true)`,
		`SELECT * FROM taskrelay.set_strict_types(true, 'test')`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	equal(t, "generation", db.Task(t, id).Generation, 5)
	equal(t, "audited", db.Int(t, `SELECT count(*) FROM taskrelay.audit`), 7)
	refuse(t, pool, []refused{
		{`INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('OTHER', 'me')`, "permission denied"}, // nobody would know who did it
		{`UPDATE taskrelay.biz_type SET paused_at = now()`, "permission denied"},
		{`UPDATE taskrelay.installation SET strict_types = false`, "permission denied"},
		{`UPDATE taskrelay.task SET status = 'pending'`, "permission denied"},
		{`DELETE FROM taskrelay.task`, "permission denied"},
		{`INSERT INTO taskrelay.task (biz_type) VALUES ('A')`, "permission denied"},
		{`DELETE FROM taskrelay.audit`, "permission denied"},
		{`UPDATE taskrelay.audit SET reason = 'other'`, "permission denied"},
		{`SELECT * FROM taskrelay.operate('delete', ARRAY[1], 'x')`, "permission denied"},
	})
}

func TestRelayAndWorkerUpdateOnlyWhatTheyWrite(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Insert(t, "A")
	for _, role := range []string{"taskrelay_relay", "taskrelay_worker"} {
		refuse(t, asRole(t, db, role), []refused{
			{`UPDATE taskrelay.task SET payload = '{}'`, "permission denied"},
			{`UPDATE taskrelay.task SET biz_id = 'x'`, "permission denied"},
			{`UPDATE taskrelay.task SET created_at = now()`, "permission denied"},
			{`UPDATE taskrelay.task SET run_at = now()`, "permission denied"},
			{`DELETE FROM taskrelay.task`, "permission denied"},
			{`INSERT INTO taskrelay.task (biz_type) VALUES ('A')`, "permission denied"},
			{`UPDATE taskrelay.installation SET id = gen_random_uuid()`, "permission denied"},
			{`SELECT * FROM taskrelay.cancel(1, 'x')`, "permission denied"},
		})
	}
	relay := asRole(t, db, "taskrelay_relay")
	for _, sql := range []string{
		`UPDATE taskrelay.task SET xid = pg_current_xact_id()`, // after a restore from another cluster
		`UPDATE taskrelay.installation SET losses = losses + 1, system_identifier = (SELECT system_identifier FROM pg_control_system())`,
	} {
		if _, err := relay.Exec(t.Context(), sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	refuse(t, relay, []refused{
		{`UPDATE taskrelay.task SET lease_token = 1`, "permission denied"},
		{`UPDATE taskrelay.task SET attempt = 0`, "permission denied"},
	})
	refuse(t, asRole(t, db, "taskrelay_worker"), []refused{
		{`UPDATE taskrelay.lane SET at = now()`, "permission denied"},
		{`DELETE FROM taskrelay.task_attempt`, "permission denied"},
	})
}

// The main path, each process with its own role and no other right.
func TestRelayAndWorkerRunWithTheirRoles(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500})
	settings := testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "2", "BASE_DELAY", "50ms")
	e.StartRelay("TASKRELAY_DATABASE_URL=" + withRole(e.URL, "taskrelay_relay"))
	e.StartWorker(append(settings, "TASKRELAY_DATABASE_URL="+withRole(e.URL, "taskrelay_worker"))...)
	id := e.Insert(t, "ORDER_PAYMENT")
	e.WaitStatus(t, soon, id, "dead")
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	sink.Default(testenv.Reply{Status: 200})
	e.Exec(t, `SELECT taskrelay.requeue(1, 'mended')`)
	e.WaitStatus(t, soon, id, "succeeded")
}

func refuse(t *testing.T, pool *pgxpool.Pool, all []refused) {
	t.Helper()
	for _, r := range all {
		_, err := pool.Exec(t.Context(), r.sql)
		if err == nil {
			t.Errorf("allowed: %s", r.sql)
		} else if !strings.Contains(err.Error(), r.want) {
			t.Errorf("%s: got %v, want %q", r.sql, err, r.want)
		}
	}
}

// asRole opens a pool that acts with the rights of a role.
func asRole(t *testing.T, db *testenv.Database, role string) *pgxpool.Pool {
	t.Helper()
	return openPool(t, db.URL, func(c *pgxpool.Config) { c.AfterConnect = setRole(role) })
}

func setRole(role string) func(context.Context, *pgx.Conn) error {
	return func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, "SET ROLE "+role)
		return err
	}
}

// withRole makes the server act with the rights of a role from the start of the session.
func withRole(url, role string) string {
	sep := "?"
	if strings.Contains(url, "?") {
		sep = "&"
	}
	return url + sep + "role=" + role
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}
