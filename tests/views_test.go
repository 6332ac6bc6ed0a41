package tests

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func TestTaskViewTellsWhereATaskIs(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by, paused_at, max_attempts) VALUES ('A', 'w', NULL, 7), ('P', 'w', now(), NULL)`)
	insert := func(set string) int64 {
		id := db.Insert(t, "A")
		if set != "" {
			db.Exec(t, `UPDATE taskrelay.task SET `+set+` WHERE id = $1`, id)
		}
		return id
	}
	delivery := func(id int64, want string) {
		t.Helper()
		got := db.Text(t, `SELECT delivery FROM taskrelay.task_view WHERE id = $1`, id)
		equal(t, fmt.Sprintf("delivery of %s", db.Text(t, `SELECT concat_ws(' ', biz_type, status, generation, republish_at, looks) FROM taskrelay.task WHERE id = $1`, id)), got, want)
	}
	before := insert("")
	delivery(before, "waiting for relay") // no relay has seen the lane

	db.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority, snapshot, at) VALUES ('A', 'low', pg_current_snapshot(), now())`)
	delivery(before, "published")
	delivery(insert(""), "waiting for relay")
	for set, want := range map[string]string{
		states["running"]:   "published",
		states["blocked"]:   "blocked",
		states["succeeded"]: "",
		states["dead"]:      "",
		states["cancelled"]: "",
		states["retrying"]:  "published",         // parked as a nak
		states["scheduled"]: "waiting for relay", // until it is due
		`generation = 1, republish_at = now(), next_attempt_at = now()`:                                             "on work list",
		`generation = 1, republish_at = now() + interval '30 s', next_attempt_at = now()`:                           "on work list", // being looked at
		`generation = 1, looks = 1, republish_at = now() + interval '10 min', next_attempt_at = now()`:              "published",
		`generation = 1, status = 'retrying', republish_at = now() + '10 min 5 s', next_attempt_at = now() + '5 s'`: "published", // a nak
		`looks = 1, republish_at = now()`:                     "on work list", // by the reconciler
		`looks = 2, republish_at = now() + interval '20 min'`: "published",
		states["compensating"]:                                "on work list",
	} {
		delivery(insert(set), want)
	}
	delivery(db.Insert(t, "UNKNOWN"), "unknown type")
	delivery(db.Insert(t, "P"), "paused")

	// In an open round the page key tells.
	first, second := insert(""), insert("")
	db.Exec(t, `UPDATE taskrelay.lane SET round_snapshot = pg_current_snapshot(), round_at = now(), key_run_at = at, key_run_id = 9223372036854775807,
		key_xid = t.xid, key_id = t.id FROM taskrelay.task AS t WHERE t.id = $1`, first)
	delivery(first, "published")
	delivery(second, "waiting for relay")

	id := insert(`run_at = now() + interval '1 hour', attempt = 2`)
	equal(t, "attempt of max", db.Text(t, `SELECT concat_ws('/', attempt, max_attempts) FROM taskrelay.task_view WHERE id = $1`, id), "2/7")
	equal(t, "due", db.Text(t, `SELECT (due_at = run_at)::text FROM taskrelay.task_view WHERE id = $1`, id), "true")
	db.Exec(t, `UPDATE taskrelay.task SET max_attempts = 3, next_attempt_at = now() WHERE id = $1`, id)
	equal(t, "attempt of max", db.Text(t, `SELECT concat_ws('/', attempt, max_attempts) FROM taskrelay.task_view WHERE id = $1`, id), "2/3")
	equal(t, "due", db.Text(t, `SELECT (due_at = next_attempt_at)::text FROM taskrelay.task_view WHERE id = $1`, id), "true")
	equal(t, "due of a fresh one", db.Text(t, `SELECT (due_at = created_at)::text FROM taskrelay.task_view WHERE id = $1`, before), "true")
}

func TestAttemptViewHasDurations(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `INSERT INTO taskrelay.task_attempt (task_id, lease_token, started_at, finished_at, generation, attempt, biz_type, phase, outcome) VALUES
		(1, 1, now() - interval '1234.5 ms', now(), 0, 1, 'A', 'execute', 'failed'), (1, 2, now(), now() - interval '1 s', 0, 2, 'A', 'execute', 'succeeded')`)
	got := db.Text(t, `SELECT string_agg(duration_ms::text, ' ' ORDER BY attempt) FROM taskrelay.attempt_view WHERE task_id = 1`)
	equal(t, "durations", got, "1234.5 0")
}

func TestLagCountsWhatIsDueAndNotPublished(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	lag := func(want string) {
		t.Helper()
		got := db.Text(t, `SELECT string_agg(concat_ws(' ', biz_type, priority, backlog, on_work_list, live_workers, coalesce(relay, '-'), paused_at IS NOT NULL,
			CASE WHEN oldest_due_age = '0' THEN 'none' WHEN oldest_due_age > '1 hour' THEN 'old' ELSE 'young' END), ', ' ORDER BY biz_type, priority) FROM taskrelay.lag`)
		equal(t, "lag", got, want)
	}
	lag("")
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, priority) SELECT 'A', 'low' FROM generate_series(1, 5)`)
	db.Insert(t, "A", "priority", "high")
	lag("A high 1 0 0 - f young, A low 5 0 0 - f young")

	db.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority, snapshot, at, owner, owner_until) VALUES ('A', 'low', pg_current_snapshot(), now(), 'r1', now() + interval '1 min')`)
	db.Exec(t, `INSERT INTO taskrelay.worker (name, host, pid, biz_types) VALUES ('w', 'h', 1, '{A,B}'), ('w2', 'h', 1, '{A}')`)
	db.Exec(t, `UPDATE taskrelay.worker SET seen_at = now() - interval '2 min' WHERE name = 'w2'`)
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, paused_at) VALUES ('A', now())`)
	lag("A high 1 0 1 - t young, A low 0 0 1 r1 t none")

	// After the position: due now, due later, due an hour ago, not waiting any more; before it: due since, on the work list.
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, run_at) VALUES ('A', NULL), ('A', now() + interval '1 day'), ('A', now() - interval '2 hours'), ('A', NULL)`)
	db.Exec(t, `UPDATE taskrelay.task SET status = 'cancelled', generation = 1, finished_at = now() WHERE id = (SELECT max(id) FROM taskrelay.task)`)
	lag("A high 1 0 1 - t young, A low 2 0 1 r1 t old")
	db.Exec(t, `UPDATE taskrelay.lane SET snapshot = pg_current_snapshot(), at = now() - interval '3 hours'`)
	lag("A high 1 0 1 - t young, A low 1 0 1 r1 t old")
	db.Exec(t, `UPDATE taskrelay.lane SET snapshot = pg_current_snapshot(), at = now()`)
	db.Exec(t, `SELECT taskrelay.run_now(1, 'why'); SELECT taskrelay.delay(2, '1 hour', 'why')`)
	lag("A high 1 0 1 - t young, A low 1 1 1 r1 t young")

	// A transaction that was open when the position was taken.
	tx := begin(t, db, "read committed")
	if _, err := tx.Exec(t.Context(), `INSERT INTO taskrelay.task (biz_type) VALUES ('A')`); err != nil {
		t.Fatal(err)
	}
	db.Insert(t, "B")
	db.Exec(t, `UPDATE taskrelay.lane SET snapshot = pg_current_snapshot(), at = now()`)
	lag("A high 1 0 1 - t young, A low 1 1 1 r1 t young, B low 1 0 1 - f young")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	lag("A high 1 0 1 - t young, A low 2 1 1 r1 t young, B low 1 0 1 - f young")
}

func TestStuckNamesTheReason(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by, paused_at) VALUES ('A', 'w', NULL), ('P', 'w', now()), ('B', 'w', NULL)`)
	db.Exec(t, `INSERT INTO taskrelay.worker (name, host, pid, biz_types) VALUES ('w', 'h', 1, '{A,P}')`)
	insert := func(bizType, set string) int64 {
		id := db.Insert(t, bizType)
		db.Exec(t, `UPDATE taskrelay.task SET created_at = now() - interval '1 hour', `+set+` WHERE id = $1`, id)
		return id
	}
	fresh := db.Insert(t, "A")
	early := insert("A", `run_at = now() + interval '1 hour'`)
	fine := insert("A", states["running"])
	done := insert("A", states["succeeded"])
	paused := insert("P", `looks = 0`)
	listed := insert("A", states["listed"])
	nobody := insert("B", `looks = 0`)
	published := insert("A", `looks = 0`)
	db.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority, snapshot, at) VALUES ('A', 'low', pg_current_snapshot(), now())`)
	unpublished := insert("A", `looks = 0`)
	abandoned := insert("A", `status = 'running', lease_until = now() - interval '2 min'`)
	overdue := insert("A", `generation = 1, republish_at = now() - interval '2 min', next_attempt_at = now() - interval '2 min'`)
	letter := insert("A", `status = 'dead', finished_at = now(), dead_at = now() - interval '2 min'`)

	check := func(id int64, want string) {
		t.Helper()
		got := db.Text(t, `SELECT coalesce(max(reason), '') FROM taskrelay.stuck WHERE id = $1`, id)
		equal(t, fmt.Sprintf("task %d", id), got, want)
	}
	for _, id := range []int64{fresh, early, fine, done, paused, listed} {
		check(id, "")
	}
	check(nobody, "no live worker knows its biz type")
	check(published, "published, but no worker has started it")
	check(unpublished, "no relay has published it")
	check(abandoned, "its worker is gone and no other has taken it over")
	check(overdue, "no relay has published it")
	check(letter, "its dead letter is not published")

	// Below the low-water only the work list is looked at.
	db.Exec(t, `UPDATE taskrelay.lane SET low_snapshot = pg_current_snapshot(), low_at = now()`)
	check(published, "")
	check(overdue, "no relay has published it")
}

// The views must stay fast however many tasks have been. What is ordinary reads a few pages, in a table of 200,000
// finished tasks and a backlog of 20,000; a scan of either would read thousands.
func TestViewsReadAFewPagesOfABigTable(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `ALTER TABLE taskrelay.task SET (autovacuum_enabled = false)`)
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, biz_id, priority, status, attempt, finished_at)
		SELECT 'T' || g % 4, g::text, CASE WHEN g % 3 = 0 THEN 'high' ELSE 'low' END, 'succeeded', 1, now() FROM generate_series(1, 200000) AS g`)
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, biz_id, status, finished_at, dead_at, dead_lettered_at)
		SELECT 'T1', 'd' || g, 'dead', now(), now() - g * interval '1 s', now() FROM generate_series(1, 5000) AS g`)
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, run_at) SELECT 'T1', now() + g * interval '1 min' FROM generate_series(1, 5000) AS g`)
	db.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority, snapshot, at, low_snapshot, low_at)
		SELECT biz_type, priority, pg_current_snapshot(), now(), pg_current_snapshot(), now() FROM taskrelay.known_lane`)
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'T1' FROM generate_series(1, 20000)`)
	for _, analyzed := range []bool{false, true} {
		if analyzed {
			db.Exec(t, `ANALYZE taskrelay.task, taskrelay.lane`)
		}
		for query, limit := range map[string]int64{
			`SELECT * FROM taskrelay.task_view WHERE id = 777`:                                       20,
			`SELECT * FROM taskrelay.task_view WHERE biz_type = 'T1' AND biz_id = '777'`:             20,
			`SELECT * FROM taskrelay.task_view ORDER BY id DESC LIMIT 20`:                            100,
			`SELECT * FROM taskrelay.attempt_view WHERE task_id = 777 ORDER BY started_at DESC`:      20,
			`SELECT * FROM taskrelay.dead ORDER BY dead_at DESC LIMIT 20`:                            100,
			`SELECT * FROM taskrelay.dead WHERE biz_type = 'T1' ORDER BY dead_at DESC LIMIT 20`:      100,
			`SELECT * FROM taskrelay.lag`:                                                            11000, // 10,000 rows are counted, most on shared pages
			`SELECT * FROM taskrelay.lag WHERE biz_type = 'T0'`:                                      11000,
			`SELECT * FROM taskrelay.known_lane`:                                                     200,
			`SELECT * FROM taskrelay.task WHERE dead_at IS NOT NULL AND dead_lettered_at IS NULL`:    20,
			`SELECT count(*) FROM taskrelay.task WHERE biz_type = 'T2' AND republish_at IS NOT NULL`: 20,
		} {
			if got := pagesRead(t, db, query); got > limit {
				t.Errorf("%s read %d pages, want at most %d (analyzed: %v)", query, got, limit, analyzed)
			}
		}
	}
	if plan := explain(t, db, `SELECT * FROM taskrelay.task_view ORDER BY id DESC LIMIT 20`); strings.Contains(plan, "Seq Scan on task") {
		t.Errorf("a sequential scan: %s", plan)
	}
}

func pagesRead(t *testing.T, db *testenv.Database, query string) int64 {
	t.Helper()
	var plan []struct {
		Plan struct {
			Hit  int64 `json:"Shared Hit Blocks"`
			Read int64 `json:"Shared Read Blocks"`
		}
	}
	if err := json.Unmarshal([]byte(explain(t, db, query)), &plan); err != nil {
		t.Fatal(err)
	}
	return plan[0].Plan.Hit + plan[0].Plan.Read
}

func explain(t *testing.T, db *testenv.Database, query string) string {
	t.Helper()
	db.Exec(t, query) // without it the first look pays for hint bits and the catalog
	var plan string
	db.Scan(t, `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) `+query, nil, &plan)
	return plan
}
