package tests

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// aged inserts finished tasks of a type, with one attempt each, as they would be left by workers that long ago.
func aged(t *testing.T, e *testenv.Env, bizType, status string, n int, age string) {
	t.Helper()
	e.Exec(t, `WITH made AS (
		INSERT INTO taskrelay.task (biz_type, biz_id, status, finished_at, dead_at, dead_lettered_at)
		SELECT $1, $2 || $4 || i, $2, now() - $4::text::interval, d.at, d.at
		FROM generate_series(1, $3::int) AS i
		CROSS JOIN (SELECT CASE WHEN $2 = 'dead' THEN now() - $4::text::interval END AS at) AS d
		RETURNING id, biz_type, finished_at)
		INSERT INTO taskrelay.task_attempt (task_id, lease_token, biz_type, started_at, finished_at, generation, attempt, phase, outcome)
		SELECT id, 1, biz_type, finished_at, finished_at, 0, 1, 'execute', 'succeeded' FROM made`, bizType, status, n, age)
}

// keep sets the ages that relays would write.
func keep(t *testing.T, e *testenv.Env, succeeded, cancelled, dead string) {
	t.Helper()
	e.Exec(t, `UPDATE taskrelay.retention SET succeeded = nullif($1, '')::interval, cancelled = nullif($2, '')::interval,
		dead = nullif($3, '')::interval, attempts = '90 days', audit = '365 days'`, succeeded, cancelled, dead)
}

// B47, B80, B81, B93: what goes and what stays, and why, told by a dry run before and by the deletion itself.
func TestPurgeSaysWhatGoesAndWhyTheRestStays(t *testing.T) {
	t.Parallel()
	e := testenv.NewEnv(t, testenv.DB(t), nil)
	keep(t, e, "30 days", "30 days", "")
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, retain_succeeded, retain_dead) VALUES ('SHORT', '1 hour', '1 hour')`)
	aged(t, e, "A", "succeeded", 3, "31 days")
	aged(t, e, "A", "succeeded", 2, "29 days")
	aged(t, e, "A", "cancelled", 1, "31 days")
	aged(t, e, "A", "dead", 4, "400 days")
	aged(t, e, "SHORT", "succeeded", 5, "2 hours")
	aged(t, e, "SHORT", "dead", 2, "2 hours")
	e.Exec(t, `UPDATE taskrelay.task SET dead_lettered_at = NULL WHERE id = (SELECT max(id) FROM taskrelay.task)`)
	open := e.Insert(t, "A", "created_at", time.Now().Add(-400*24*time.Hour))
	equal(t, "an unfinished task to come back for", e.Int(t, `SELECT count(open_id) FROM taskrelay.purge_page(0, 1000, 500, true)`), 0)
	locked := e.Int(t, `SELECT min(id) FROM taskrelay.task`)

	tx, err := e.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM taskrelay.task WHERE id = $1 FOR UPDATE`, locked); err != nil {
		t.Fatal(err)
	}
	page := func(dry bool) string {
		return e.Text(t, `SELECT string_agg(concat_ws(' ', biz_type, status, verdict, tasks), '; ' ORDER BY biz_type, status, verdict)
			FROM taskrelay.purge_page(0, 1000, 500, $1)`, dry)
	}
	const stay = "A succeeded too young 2"
	equal(t, "dry run", page(true), "A cancelled due 1; A dead kept until a person decides 4; A pending unfinished 1; A succeeded due 3; "+stay+
		"; SHORT dead dead letter not out 1; SHORT dead due 1; SHORT succeeded due 5")
	equal(t, "rows after the dry run", e.Int(t, `SELECT count(*) FROM taskrelay.task`), 18)
	equal(t, "deleted", page(false), "A cancelled deleted 1; A dead kept until a person decides 4; A pending unfinished 1; A succeeded busy 1; A succeeded deleted 2; "+stay+
		"; SHORT dead dead letter not out 1; SHORT dead deleted 1; SHORT succeeded deleted 5")
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	equal(t, "again", page(false), "A dead kept until a person decides 4; A pending unfinished 1; A succeeded deleted 1; "+stay+"; SHORT dead dead letter not out 1")
	equal(t, "the open task", e.Task(t, open).Status, "pending")
	equal(t, "letters to take away", e.Int(t, `SELECT count(*) FROM taskrelay.letter_purge`), 1)
	equal(t, "attempts, which go by their own age", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt`), 17)
	// B96: the biz id is free again.
	equal(t, "new", e.Text(t, `SELECT is_new::text FROM taskrelay.enqueue('SHORT', biz_id => 'succeeded2 hours1')`), "true")
	// A batch bounds a statement, and the next one goes on behind it.
	aged(t, e, "A", "succeeded", 7, "31 days")
	var n, last int64
	e.Scan(t, `SELECT sum(tasks) FILTER (WHERE verdict = 'deleted'), max(last_id) FROM taskrelay.purge_page(0, 1000, 5, false)`, nil, &n, &last)
	equal(t, "deleted by a batch of 5", n, 5)
	equal(t, "deleted behind it", e.Int(t, `SELECT sum(tasks) FROM taskrelay.purge_page($1, 1000, 5, false) WHERE verdict = 'deleted'`, last), 2)
}

// B90, B94: the relay deletes by itself, tasks, attempts and audit each by their own age, and follows a type's own.
func TestRelayDeletesByAge(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	aged(t, e, "A", "succeeded", 1200, "2 hours")
	aged(t, e, "A", "succeeded", 10, "10 minutes")
	aged(t, e, "A", "dead", 3, "2 hours")
	aged(t, e, "LONG", "succeeded", 5, "2 hours")
	e.Exec(t, `SELECT * FROM taskrelay.set_type('LONG', '{"retain_succeeded": "forever"}', 'the auditors want them')`)
	e.Exec(t, `INSERT INTO taskrelay.audit (action, at) SELECT 'test', now() - i * interval '1 hour' FROM generate_series(1, 5) AS i`)
	open := e.Insert(t, "A")
	letter := e.Int(t, `SELECT min(id) FROM taskrelay.task WHERE status = 'dead'`)
	relay := e.RunRelay(func(c *outbox.RelayConfig) {
		c.Retain = outbox.Retention{Succeeded: time.Hour, Attempts: 90 * time.Minute, Audit: 150 * time.Minute, Every: 50 * time.Millisecond}
	})
	e.WaitCount(t, soon, 10, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'A' AND status = 'succeeded'`)
	e.WaitCount(t, soon, 10, `SELECT count(*) FROM taskrelay.task_attempt`)
	e.WaitCount(t, soon, 2, `SELECT count(*) FROM taskrelay.audit WHERE action = 'test'`)
	equal(t, "kept for ever", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'LONG'`), 5)
	equal(t, "dead", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'dead'`), 3)
	equal(t, "open", e.Task(t, open).Status, "pending")
	e.WaitCount(t, soon, 1200, `SELECT tasks FROM taskrelay.retention`)

	// A switch that is set now holds without a restart, for rows behind the low mark too; their letters go with them.
	e.Exec(t, `UPDATE taskrelay.task SET dead_lettered_at = NULL WHERE status = 'dead'`)
	subject := outbox.Names{}.DeadSubject("A", letter)
	testenv.Eventually(t, soon, func() error { _, err := e.NATS.Last(t.Context(), "TASKS_DEAD", subject); return err })
	e.Exec(t, `SELECT * FROM taskrelay.set_type('A', '{"retain_dead": "1 hour"}', 'nobody wants them')`)
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.task WHERE status = 'dead'`)
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS_DEAD"); n != 0 {
			return errorf("%d letters are left", n)
		}
		return nil
	})
	if !strings.Contains(relay.Logs(), "old rows deleted") {
		t.Error("the relay has not said that it deleted")
	}

	// A task that is unfinished when a look passes it goes by its age, not an hour later by the full pass. One that is
	// unfinished for long holds no mark.
	e.Exec(t, `DELETE FROM taskrelay.task WHERE id <> $1`, open) // nothing is too young, and ends a look
	e.Exec(t, `UPDATE taskrelay.task SET created_at = now() - interval '11 minutes' WHERE id = $1`, open)
	brief := e.Insert(t, "A")
	aged(t, e, "A", "succeeded", 1, "3 hours")
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'`) // so a look has passed both
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.retention WHERE task_low = $1`, brief-1)
	e.Exec(t, `UPDATE taskrelay.task SET status = 'succeeded', finished_at = now() - interval '2 hours' WHERE id = $1`, brief)
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.task WHERE id = $1`, brief)
	equal(t, "open", e.Task(t, open).Status, "pending")

	// A pass comes to its end although each of its looks finds rows that were written since the last.
	producing, stop := context.WithCancel(t.Context())
	var producer sync.WaitGroup
	producer.Go(func() {
		for producing.Err() == nil {
			_, _ = e.Pool.Exec(producing, `INSERT INTO taskrelay.task (biz_type) VALUES ('A')`)
		}
	})
	e.Exec(t, `UPDATE taskrelay.retention SET full_at = NULL`)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.retention WHERE full_at IS NOT NULL`)
	stop()
	producer.Wait()
}

// Keep-nothing: a task that succeeds is gone at once, its biz id free; one that does not succeed stays; the log stays.
func TestRetentionZeroDeletesOnSuccess(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var n atomic.Int64
	var reg command.Registry
	mustRegister(t, &reg, "BRIEF", fast(func(_ context.Context, task *command.Task[raw]) (any, error) {
		if n.Add(1); string(task.Raw) == `"bad"` {
			return nil, errFlaky
		}
		return nil, nil
	}))
	e.Exec(t, `SELECT * FROM taskrelay.set_type('BRIEF', '{"retain_succeeded": "0"}', 'nothing is kept', add => true)`)
	e.RunRelay()
	e.RunWorker(&reg)
	bad := e.Insert(t, "BRIEF", "payload", `"bad"`)
	for range 3 {
		id := e.Insert(t, "BRIEF", "biz_id", "same")
		e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.task WHERE id = $1`, id)
		equal(t, "its attempts", outcomes(t, e, id), "[succeeded]")
	}
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'BRIEF' FROM generate_series(1, 500)`)
	e.WaitStatus(t, soon, bad, "dead")
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task`)
	equal(t, "attempts of successes", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'succeeded'`), 503)
	equal(t, "calls", n.Load(), 503+3)
	waitMessages(t, e, 0)
}

// Two relays, of which one deletes; it is killed in the midst of it, and the other goes on where it was. Nothing else is
// touched, and new tasks run all the while.
func TestRetentionGoesOnAfterItsRelayIsKilled(t *testing.T) {
	t.Parallel()
	const old = 8000
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	aged(t, e, "OLD", "succeeded", old, "2 hours")
	aged(t, e, "OLD", "dead", 20, "2 hours")
	relays := map[int]*testenv.Process{}
	for range 2 {
		p := e.StartRelay("TASKRELAY_RETAIN_SUCCEEDED=1h", "TASKRELAY_RETAIN_DEAD=1h")
		relays[p.Pid()] = p
	}
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	var victim int
	testenv.Eventually(t, soon, func() error {
		return e.Pool.QueryRow(t.Context(), `SELECT p.pid FROM taskrelay.retention AS r JOIN taskrelay.relay AS p ON p.name = r.owner
			WHERE (SELECT count(*) FROM taskrelay.task WHERE biz_type = 'OLD') < $1`, old).Scan(&victim)
	})
	relays[victim].Kill9(t)
	left := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'OLD'`)
	for i := range 20 {
		e.Insert(t, "ORDER_PAYMENT", "biz_id", fmt.Sprint(i))
	}
	e.WaitCount(t, 2*soon, 0, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'OLD'`)
	e.WaitCount(t, soon, 20, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'ORDER_PAYMENT' AND status = 'succeeded'`)
	equal(t, "attempts, kept for 90 days", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE biz_type = 'OLD'`), old+20)
	noOverlaps(t, sink)
	t.Logf("%d of %d were left when the first relay was killed", left, old+20)
}
