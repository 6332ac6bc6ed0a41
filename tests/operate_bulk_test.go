package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// deadTasks inserts n tasks that have died.
func deadTasks(t *testing.T, db *testenv.Database, bizType string, n int) {
	t.Helper()
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, biz_id, status, attempt, finished_at, dead_at, dead_lettered_at, dead_reason, last_error, first_started_at)
		SELECT $1::text, 'D-' || i, 'dead', 3, x.at, x.at, now(), 'max_attempts', 'bank is down', x.at
		FROM generate_series(1, $2::int) AS i CROSS JOIN LATERAL (SELECT now() - interval '1 hour' + i * interval '1 ms' AS at) AS x`, bizType, n)
}

// step works a bulk off as a relay would, from SQL alone, and returns how many batches it took.
func step(t *testing.T, db *testenv.Database) (batches int) {
	t.Helper()
	for {
		db.Exec(t, `UPDATE taskrelay.bulk SET next_at = now() WHERE state = 'open'`) // no waiting for the rate
		if db.Int(t, `SELECT count(*) FROM taskrelay.bulk_step('test', '6 s')`) == 0 {
			return batches
		}
		batches++
	}
}

// The whole of it from psql: look, start, press again, work off, look at the audit.
func TestBulkFromSQLAlone(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	deadTasks(t, db, "A", 120)
	deadTasks(t, db, "B", 5)
	db.Exec(t, `UPDATE taskrelay.task SET compensation = 'done', compensations = 1 WHERE biz_type = 'A' AND biz_id IN ('D-7', 'D-8')`)

	equal(t, "preview", db.Text(t, `SELECT matching || ' ' || cardinality(sample) || ' ' || normal FROM taskrelay.preview_bulk('requeue', '{"type": "A"}')`),
		`120 5 {"type": "A", "status": ["dead"]}`)
	id := db.Int(t, `SELECT id FROM taskrelay.start_bulk('requeue', '{"type": "A"}', 'bank is back') WHERE is_new`)
	equal(t, "second press", db.Text(t, `SELECT id || ' ' || is_new FROM taskrelay.start_bulk('requeue', '{"type": "A", "status": "dead"}', 'again')`), fmt.Sprint(id, " false"))
	deadTasks(t, db, "C", 1)
	db.Exec(t, `UPDATE taskrelay.task SET biz_type = 'A', biz_id = 'late', dead_at = now() WHERE biz_type = 'C'`) // died after the press: not meant

	if n := step(t, db); n < 3 {
		t.Errorf("120 tasks at 500/s took %d batches, want small ones", n)
	}
	equal(t, "bulk", db.Text(t, `SELECT concat_ws(' ', state, expected, done, changed, skipped) FROM taskrelay.bulk WHERE id = $1`, id), "done 120 120 118 2")
	why := db.Text(t, `SELECT skipped_why::text FROM taskrelay.bulk WHERE id = $1`, id)
	if !strings.Contains(why, "allow_compensated") || !strings.HasSuffix(why, ": 2}") {
		t.Errorf("why tasks were skipped: %s", why)
	}
	equal(t, "states", db.Text(t, `SELECT string_agg(s, ' ' ORDER BY s) FROM
		(SELECT biz_type || ':' || status || '=' || count(*) AS s FROM taskrelay.task GROUP BY biz_type, status) AS x`), "A:dead=3 A:pending=118 B:dead=5")
	equal(t, "audited", db.Int(t, `SELECT count(DISTINCT task_id) FROM taskrelay.audit WHERE bulk_id = $1 AND action = 'requeue' AND reason = 'bank is back'`, id), 118)
	equal(t, "audit of the press", db.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE bulk_id = $1 AND action = 'start_bulk'`, id), 1)

	// Press after the end: a new one, which finds what is left.
	again := db.Int(t, `SELECT id FROM taskrelay.start_bulk('requeue', '{"type": "A"}', 'once more', '{"allow_compensated": true}') WHERE is_new`)
	step(t, db)
	equal(t, "bulk", db.Text(t, `SELECT concat_ws(' ', state, changed, skipped) FROM taskrelay.bulk WHERE id = $1`, again), "done 3 0")
}

func TestBulkFilters(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	for _, row := range []string{
		`'d1', 'A', 'dead', 'timeout', 'bank 7: timeout', 'max_attempts', '3 hours'`,
		`'d2', 'A', 'dead', 'timeout', 'bank 8: timeout', 'permanent', '10 min'`,
		`'d3', 'B', 'dead', 'http', '100% no', 'permanent', '1 min'`,
		`'c1', 'A', 'cancelled', NULL, NULL, NULL, '2 hours'`,
		`'s1', 'A', 'succeeded', NULL, NULL, NULL, '1 hour'`,
		`'p1', 'A', 'pending', NULL, NULL, NULL, '5 hours'`,
		`'r1', 'B', 'retrying', 'timeout', 'bank 9: timeout', NULL, '1 min'`,
	} {
		db.Exec(t, `INSERT INTO taskrelay.task (biz_id, biz_type) SELECT v.biz_id, v.biz_type FROM (VALUES (`+row+`)) AS v (biz_id, biz_type)`)
		db.Exec(t, `UPDATE taskrelay.task AS t SET status = v.status, error_class = v.class, last_error = v.error, dead_reason = v.reason,
			created_at = now() - v.age::interval, finished_at = CASE WHEN v.status IN ('dead', 'cancelled', 'succeeded') THEN now() - v.age::interval END,
			dead_at = CASE WHEN v.status = 'dead' THEN now() - v.age::interval END
			FROM (VALUES (`+row+`)) AS v (biz_id, biz_type, status, class, error, reason, age) WHERE t.biz_id = v.biz_id`)
	}
	group := db.Text(t, `SELECT taskrelay.error_group(biz_type, error_class, last_error) FROM taskrelay.task WHERE biz_id = 'd1'`)
	for _, c := range []struct{ action, filter, want string }{
		{"requeue", `{"all": true}`, "d1 d2 d3"}, // not what somebody cancelled
		{"requeue", `{"type": "A"}`, "d1 d2"},
		{"requeue", `{"type": "A", "status": ["dead", "cancelled"]}`, "d1 d2 c1"},
		{"requeue", `{"error_class": "timeout"}`, "d1 d2"},
		{"requeue", `{"error": "100%"}`, "d3"},
		{"requeue", `{"dead_reason": "permanent", "type": "A"}`, "d2"},
		{"requeue", `{"older_than": "5 minutes"}`, "d1 d2"},
		{"requeue", `{"newer_than": "1 hour", "older_than": "5 minutes"}`, "d2"},
		{"requeue", `{"group": "` + group + `"}`, "d1 d2"},
		{"requeue", `{"type": "a"}`, ""},
		{"discard", `{"newer_than": "1 hour"}`, "d2 d3"},
		{"cancel", `{"all": true}`, "p1 r1"},
		{"cancel", `{"older_than": "1 hour"}`, "p1"},
		{"run_now", `{"error": "bank 9"}`, "r1"},
		{"delete", `{"type": "A", "status": ["succeeded", "cancelled"]}`, "c1 s1"},
		{"rerun", `{"status": "succeeded", "all": true}`, "s1"},
		{"reset", `{"status": "retrying", "type": "B"}`, "r1"},
	} {
		var got *string
		db.Scan(t, `SELECT (SELECT string_agg(t.biz_id, ' ' ORDER BY t.id) FROM taskrelay.task AS t WHERE t.id = ANY (p.sample))
			FROM taskrelay.preview_bulk($1, $2::text::jsonb) AS p`, []any{c.action, c.filter}, &got)
		equal(t, c.action+" "+c.filter, text(got), c.want)
	}
	for _, c := range []struct{ call, want string }{
		{`start_bulk('requeue', '{}', 'x')`, "the filter is empty"},
		{`start_bulk('requeue', '{"status": "dead"}', 'x')`, "the filter is empty"},
		{`start_bulk('requeue', '[]', 'x')`, "no JSON object"},
		{`start_bulk('requeue', '{"typ": "A"}', 'x')`, `unknown key "typ"`},
		{`start_bulk('requeue', '{"type": 7}', 'x')`, `"type" is no string`},
		{`start_bulk('requeue', '{"older_than": "soon"}', 'x')`, "invalid input syntax"},
		{`start_bulk('requeue', '{"older_than": "-1 hour"}', 'x')`, "not more than 0"},
		{`start_bulk('requeue', '{"older_than": "200000 years"}', 'x')`, "at most 100 years"}, // no timestamp reaches back so far
		{`start_bulk('requeue', '{"type": "A", "status": "succeeded"}', 'x')`, "not for tasks that are succeeded"},
		{`start_bulk('delete', '{"type": "A"}', 'x')`, "needs a status"},
		{`start_bulk('delete', '{"type": "A", "status": "running"}', 'x')`, "not for tasks that are running"},
		{`start_bulk('drop', '{"type": "A"}', 'x')`, "no bulk action"},
		{`start_bulk('requeue', '{"type": "A"}', ' ')`, "a reason is required"},
		{`start_bulk('requeue', '{"type": "A"}', 'x', '{"by": "1 min"}')`, `no option "by"`},
		{`start_bulk('delay', '{"type": "A"}', 'x')`, "out of range"},
		{`start_bulk('requeue', '{"type": "A"}', 'x', rate => 0)`, "out of range"},
		{`start_bulk('requeue', '{"type": "A"}', 'x', rate => 1e-15)`, "out of range"}, // nor one so far ahead
		{`start_bulk('requeue', '{"type": "A"}', 'x', rate => 'NaN')`, "out of range"},
	} {
		if _, err := db.Pool.Exec(t.Context(), "SELECT taskrelay."+c.call); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.call, err, c.want)
		}
	}
	equal(t, "bulks", db.Int(t, `SELECT count(*) FROM taskrelay.bulk`), 0)
}

// However few a filter finds, no statement looks at more than 10,000 rows, and a count says when it is none of all.
func TestBulkLooksAtSomeRowsAtATime(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	first := db.Insert(t, "A", "biz_id", "first")
	deadTasks(t, db, "A", 10_005)
	db.Exec(t, `UPDATE taskrelay.task SET last_error = 'the only one' WHERE biz_id = 'D-10005'`)
	count := func(filter, within string) string {
		t.Helper()
		return db.Text(t, `SELECT concat_ws(' ', matching, complete) FROM taskrelay.bulk_count(taskrelay.bulk_filter('delete', $1::text::jsonb), now(), 100, $2::text::interval)`,
			filter, within)
	}
	for _, filter := range []string{
		`{"status": "dead", "error": "the only one"}`,                                      // by death
		`{"status": "pending", "type": "A"}`,                                               // by id, from the newest
		`{"status": ["dead", "cancelled"], "older_than": "1 ms", "error": "the only one"}`, // by id, from the oldest
	} {
		equal(t, "a look of no time: "+filter, count(filter, "0"), "0 f")
		equal(t, "all: "+filter, count(filter, "1 hour"), "1 t")
	}
	equal(t, "as many as were asked for", count(`{"status": "dead", "all": true}`, "1 hour"), "100 f")

	db.Exec(t, `SELECT taskrelay.start_bulk('requeue', '{"error": "the only one"}', 'x')`)
	equal(t, "batches by death", step(t, db), 2)
	equal(t, "bulk", db.Text(t, `SELECT concat_ws(' ', state, done, changed, expected) FROM taskrelay.bulk ORDER BY id DESC LIMIT 1`), "done 1 1 1")
	db.Exec(t, `SELECT taskrelay.start_bulk('cancel', '{"type": "A", "status": "pending"}', 'x', rate => 10)`) // one a batch
	equal(t, "batches by id", step(t, db), 4)
	equal(t, "bulk", db.Text(t, `SELECT concat_ws(' ', state, done, changed) FROM taskrelay.bulk ORDER BY id DESC LIMIT 1`), "done 2 2")
	equal(t, "first", db.Task(t, first).Status, "cancelled")
}

// A row that somebody holds is skipped and said to be, not waited for; one that cannot be changed stops nobody.
func TestBulkPassesRowsItCannotChange(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	deadTasks(t, db, "A", 10)
	db.Exec(t, `ALTER TABLE taskrelay.task ADD CONSTRAINT not_this_one CHECK (biz_id <> 'D-5' OR status <> 'pending') NOT VALID`)
	held := db.Int(t, `SELECT id FROM taskrelay.task WHERE biz_id = 'D-3'`)
	tx, err := db.Pool.Begin(t.Context())
	noError(t, "begin", err)
	_, err = tx.Exec(t.Context(), `SELECT FROM taskrelay.task WHERE id = $1 FOR UPDATE`, held)
	noError(t, "hold a row", err)
	db.Exec(t, `SELECT taskrelay.start_bulk('requeue', '{"type": "A"}', 'x')`)
	step(t, db)
	noError(t, "let go", tx.Rollback(t.Context()))
	equal(t, "bulk", db.Text(t, `SELECT concat_ws(' ', state, done, changed, skipped) FROM taskrelay.bulk`), "done 10 8 2")
	why := db.Text(t, `SELECT skipped_why::text FROM taskrelay.bulk`)
	if !strings.Contains(why, "locked by another transaction") || !strings.Contains(why, "not_this_one") {
		t.Errorf("why tasks were skipped: %s", why)
	}
}

// Two relays, one of which is killed in the middle of a bulk: the other goes on, and each task is changed once.
func TestBulkSurvivesAKilledRelay(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	const n = 2000
	deadTasks(t, e.Database, "ORDER_PAYMENT", n)
	relays := []*testenv.Process{e.StartRelay(), e.StartRelay()}
	ref, err := outbox.StartBulk(t.Context(), e.Pool, "requeue", outbox.BulkFilter{BizType: "ORDER_PAYMENT"}, "bank is back", outbox.BulkOptions{Rate: 1000})
	noError(t, "start", err)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.bulk WHERE changed >= 300 AND owner IS NOT NULL`)
	owner := e.Text(t, `SELECT owner FROM taskrelay.bulk`)
	killed := 0
	for _, r := range relays {
		if strings.Contains(owner, fmt.Sprintf("-%d-", r.Pid())) {
			r.Kill9(t)
			killed++
		}
	}
	equal(t, "relays killed by the name of the owner "+owner, killed, 1)
	if state := e.Text(t, `SELECT state FROM taskrelay.bulk`); state != "open" {
		t.Fatalf("the bulk was %s before its relay was killed", state)
	}
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.bulk WHERE state = 'done'`)
	if e.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE bulk_id = $1 AND at > (SELECT max(a.at) FROM taskrelay.audit AS a WHERE a.action = 'start_bulk')`, ref.ID) == 0 {
		t.Error("nothing is audited")
	}
	equal(t, "bulk", e.Text(t, `SELECT concat_ws(' ', expected, done, changed, skipped) FROM taskrelay.bulk`), "2000 2000 2000 0")
	equal(t, "audit rows", e.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE action = 'requeue'`), n)
	equal(t, "tasks changed once", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'pending' AND generation = 1`), n)
	e.WaitCount(t, soon, n, `SELECT count(*) FROM taskrelay.task WHERE looks > 0`) // published
}

// What a bulk brings back does not pile up before workers that are slow: other tasks of the lane would wait behind it.
func TestBulkWaitsForTheWorkers(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	deadTasks(t, e.Database, "ORDER_PAYMENT", 100)
	release := make(chan struct{})
	var reg command.Registry
	noError(t, "register", command.Register(&reg, "ORDER_PAYMENT", command.Command[json.RawMessage]{
		Execute: func(ctx context.Context, _ *command.Task[json.RawMessage]) (any, error) {
			select {
			case <-release:
				return nil, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
		Concurrency: 5,
	}))
	e.RunRelay()
	e.RunWorker(&reg)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.worker WHERE 'ORDER_PAYMENT' = ANY (biz_types)`)
	_, err := outbox.StartBulk(t.Context(), e.Pool, "requeue", outbox.BulkFilter{BizType: "ORDER_PAYMENT"}, "bank is back", outbox.BulkOptions{Rate: 50})
	noError(t, "start", err)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.bulk WHERE held_back > 0`)
	if n := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'pending'`); n > 20 {
		t.Errorf("%d tasks were brought back and wait, want at most 20", n)
	}
	equal(t, "state", e.Text(t, `SELECT state FROM taskrelay.bulk`), "open")
	close(release)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.bulk WHERE state = 'done' AND changed = 100`)
	e.WaitCount(t, soon, 100, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'`)
}

// Where no relay runs all the time, run-once works bulks off too, and publishes what they bring back.
func TestRunOnceWorksBulksOff(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	deadTasks(t, e.Database, "ORDER_PAYMENT", 40)
	e.Exec(t, `SELECT taskrelay.start_bulk('requeue', '{"type": "ORDER_PAYMENT"}', 'bank is back')`)
	cli(t, e, "", "relay", "run-once").ok(t, 0)
	equal(t, "bulk", e.Text(t, `SELECT concat_ws(' ', state, changed) FROM taskrelay.bulk`), "done 40")
	equal(t, "messages", e.NATS.Messages(t, "TASKS"), 40)
}

func TestBulkIsForOperators(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	deadTasks(t, db, "A", 1)
	operator := asRole(t, db, "taskrelay_operator")
	for _, sql := range []string{
		`SELECT * FROM taskrelay.preview_bulk('discard', '{"type": "A"}')`, `SELECT * FROM taskrelay.start_bulk('discard', '{"type": "A"}', 'x')`,
		`SELECT * FROM taskrelay.bulk`, `SELECT * FROM taskrelay.cancel_bulk(1, 'x')`, `SELECT * FROM taskrelay.discard(1, 'x')`,
		`SELECT * FROM taskrelay.rerun(ARRAY[1], 'x')`, `SELECT * FROM taskrelay.set_priority(1, 'high', 'x')`, `SELECT * FROM taskrelay.cancel(1, 'x', true)`,
		`SELECT * FROM taskrelay.reset(1, 'x')`,
	} {
		if _, err := operator.Exec(t.Context(), sql); err != nil {
			t.Errorf("operator: %s: %v", sql, err)
		}
	}
	refuse(t, operator, []refused{
		{`SELECT * FROM taskrelay.bulk_step('me', '1 s')`, "permission denied"},
		{`SELECT * FROM taskrelay.operate('delete', ARRAY[1], 'x')`, "permission denied"},
		{`UPDATE taskrelay.bulk SET actor = 'somebody else'`, "permission denied"},
	})
	for _, role := range []string{"taskrelay_viewer", "taskrelay_producer", "taskrelay_worker", "taskrelay_relay"} {
		refuse(t, asRole(t, db, role), []refused{
			{`SELECT * FROM taskrelay.start_bulk('discard', '{"type": "A"}', 'x')`, "permission denied"},
			{`SELECT * FROM taskrelay.cancel_bulk(1, 'x')`, "permission denied"},
			{`SELECT * FROM taskrelay.discard(1, 'x')`, "permission denied"},
			{`SELECT * FROM taskrelay.rerun(1, 'x')`, "permission denied"},
			{`SELECT * FROM taskrelay.set_priority(1, 'high', 'x')`, "permission denied"},
		})
	}
	_, err := asRole(t, db, "taskrelay_relay").Exec(t.Context(), `SELECT * FROM taskrelay.bulk_step('me', '1 s')`)
	noError(t, "the relay works bulks off", err)
	_, err = asRole(t, db, "taskrelay_viewer").Exec(t.Context(), `SELECT * FROM taskrelay.bulk`)
	noError(t, "the viewer sees bulks", err)
}

// Ages count from the press, by Postgres's clock.
func TestBulkAPIRefusesWhatItCannotMean(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	for name, err := range map[string]error{
		"action": second(outbox.StartBulk(t.Context(), db.Pool, "drop", outbox.BulkFilter{All: true}, "x", outbox.BulkOptions{})),
		"age":    second(outbox.StartBulk(t.Context(), db.Pool, "requeue", outbox.BulkFilter{OlderThan: -time.Hour}, "x", outbox.BulkOptions{})),
		"NUL":    second(outbox.StartBulk(t.Context(), db.Pool, "requeue", outbox.BulkFilter{Error: "a\x00"}, "x", outbox.BulkOptions{})),
		"reason": second(outbox.StartBulk(t.Context(), db.Pool, "requeue", outbox.BulkFilter{All: true}, "", outbox.BulkOptions{})),
		"rate":   second(outbox.StartBulk(t.Context(), db.Pool, "requeue", outbox.BulkFilter{All: true}, "x", outbox.BulkOptions{Rate: -1})),
		"flag":   second(outbox.StartBulk(t.Context(), db.Pool, "cancel", outbox.BulkFilter{All: true}, "x", outbox.BulkOptions{Flags: []outbox.Flag{outbox.AllowSucceeded}})),
	} {
		if err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	ref, err := outbox.StartBulk(t.Context(), db.Pool, "delay", outbox.BulkFilter{All: true}, "x", outbox.BulkOptions{By: 90 * time.Minute, Rate: 3})
	noError(t, "start", err)
	b, err := outbox.Schema("").Bulk(t.Context(), db.Pool, ref.ID)
	noError(t, "get", err)
	equal(t, "bulk", fmt.Sprint(b.Action, string(b.Options), b.Rate, b.State, b.Passed), `delay{"by": "5400000000 microseconds"}3open0`)
	change, err := outbox.CancelBulk(t.Context(), db.Pool, ref.ID, "not needed")
	noError(t, "cancel", err)
	equal(t, "cancelled", change.Changed, true)
}
