package tests

import (
	"context"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Interleaving 7: many rows of a lane that may not publish are due on the work list. The one row of another lane does
// not wait behind them, and they are not rewritten again and again.
func TestWorkListOfAPausedLaneHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type) VALUES ('PAUSED')`)
	e.Exec(t, `SELECT taskrelay.pause('PAUSED', 'test')`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, status, generation, attempt, next_attempt_at, republish_at)
		SELECT 'PAUSED', 'retrying', 1, 4, now(), now() - interval '1 minute' FROM generate_series(1, 5000)`)
	e.RunRelay(quick)
	e.WaitCount(t, soon, 2, `SELECT count(*) FROM taskrelay.lane WHERE biz_type = 'PAUSED' AND owner IS NOT NULL`)
	var other int64
	e.Scan(t, `INSERT INTO taskrelay.task (biz_type, status, generation, attempt, next_attempt_at, republish_at)
		VALUES ('OTHER', 'retrying', 1, 4, now(), now()) RETURNING id`, nil, &other)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND looks = 1`, other)
	equal(t, "rows of the paused lane that were rewritten", e.Int(t, `SELECT count(*) FROM taskrelay.task
		WHERE biz_type = 'PAUSED' AND republish_at > created_at - interval '30 seconds'`), 0)
	equal(t, "messages", e.NATS.Messages(t, "TASKS"), 1)
}

// Interleaving 11: an id is given out again while the server still remembers the message id of its first row. The new
// row's message is stored, and the old message does not run the new row with the old payload.
func TestIDGivenOutAgainIsAnotherTask(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(quick)
	id := e.Insert(t, "ORDER_PAYMENT", "payload", `"old"`)
	waitMessages(t, e, 1)
	e.Exec(t, `DELETE FROM taskrelay.task WHERE id = $1`, id) // as a failover to a standby that lags does
	e.Exec(t, `INSERT INTO taskrelay.task (id, biz_type, payload) OVERRIDING SYSTEM VALUE VALUES ($1, 'ORDER_PAYMENT', '"new"')`, id)
	waitMessages(t, e, 2)
	var reg command.Registry
	got := make(chan string, 10)
	register(t, &reg, "ORDER_PAYMENT", fast(func(_ context.Context, p *command.Task[string]) (any, error) {
		got <- p.Payload
		return nil, nil
	}))
	e.RunWorker(&reg)
	e.WaitStatus(t, soon, id, "succeeded")
	waitMessages(t, e, 0)
	equal(t, "calls", len(got), 1)
	equal(t, "payload", <-got, "new")
}

// Interleaving 12: Postgres's clock was a day ahead for a moment, and the position keeps that instant. What is due until
// then is published early, but runs at its time, and does not fill the lane meanwhile.
func TestClockThatWasADayAheadStopsNoLane(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority, at) VALUES ('ORDER_PAYMENT', 'low', now() + interval '1 day')`)
	e.RunRelay(quick)
	var reg command.Registry
	register(t, &reg, "ORDER_PAYMENT", fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, nil }))
	e.RunWorker(&reg, func(c *command.WorkerConfig) { c.NakMax = time.Second })
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, run_at) SELECT 'ORDER_PAYMENT', now() + interval '1 hour' FROM generate_series(1, 1500)`)
	soonDue := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(3*time.Second))
	atOnce := e.Insert(t, "ORDER_PAYMENT")
	e.WaitStatus(t, soon, atOnce, "succeeded") // behind more than MaxAckPending takes
	e.WaitCount(t, soon, 1500, `SELECT count(*) FROM taskrelay.task WHERE status = 'pending' AND generation = 1 AND republish_at = run_at`)
	row := e.WaitStatus(t, soon, soonDue, "succeeded")
	if row.StartedAt.Before(*row.RunAt) {
		t.Errorf("started at %v, due at %v", row.StartedAt, row.RunAt)
	}
	waitMessages(t, e, 0)
}

// Interleaving 20: a relay dies in a long round. Its successor goes on behind the last page whose messages are stored,
// not at the beginning.
func TestSuccessorResumesALongRound(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 2000)`)
	vars := []string{"TASKRELAY_STREAM_MAX_PER_SUBJECT=1000", "TASKRELAY_RELAY_BATCH=100"}
	first := e.StartRelay(vars...)
	var key int64
	testenv.Eventually(t, soon, func() error { // the lane is full, its round is saved as open
		e.Scan(t, `SELECT coalesce(max(key_id), 0) FROM taskrelay.lane WHERE biz_type = 'ORDER_PAYMENT' AND priority = 'low' AND round_snapshot IS NOT NULL`, nil, &key)
		if key < 900 {
			return errorf("the round is saved up to row %d, want 900", key)
		}
		return nil
	})
	first.Kill9(t)
	if err := e.NATS.WaitStream(t, "TASKS").Purge(t.Context()); err != nil { // as if all were done, and their ids forgotten
		t.Fatal(err)
	}
	finish(t, e, 1000)
	published := countPublishes(t, e, "tasks.>")
	e.StartRelay(vars...)
	waitMessages(t, e, 1000)
	published.mu.Lock()
	defer published.mu.Unlock()
	for id := range published.byID {
		part := strings.Split(id, ".") // <installation>.<id>.<created_at>.<generation>
		task, err := strconv.ParseInt(part[1], 10, 64)
		if err != nil {
			t.Fatalf("message id %q: %v", id, err)
		}
		if task <= key {
			t.Fatalf("task %d was published again, the round was saved up to %d", task, key)
		}
	}
}

// A lane was taken from its relay and put back (taskrelay reposition does, and so does a successor), while that relay has
// a position it has not saved. It must not write it over the new one: the row behind it would never be read.
func TestPositionOfALaneThatWasTakenAwayIsNotSaved(t *testing.T) {
	t.Parallel()
	f := &forgetful{Env: testenv.New(t), t: t}
	f.RunRelay(func(c *outbox.RelayConfig) { c.Reconcile = time.Hour }) // it would find what the rounds skip
	f.insert()
	f.waitAllInStream()
	f.waitRenewal() // which would find out as well; the next one is two seconds away
	f.Exec(t, `WITH back AS (UPDATE taskrelay.lane SET fence = fence + 1, snapshot = '1:1:', at = '-infinity')
		INSERT INTO taskrelay.task (biz_type, xid) VALUES ('ORDER_PAYMENT', DEFAULT), ('ORDER_PAYMENT', '3')`)
	f.waitAllInStream()
}

// A relay that sleeps past the lease of its lanes and wakes up beside its successor causes duplicates at most: what it
// saves is fenced.
func TestSleepingRelayChangesNothing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sleeper := e.StartRelay()
	var reg command.Registry
	var calls atomic.Int64
	register(t, &reg, "ORDER_PAYMENT", fast(func(context.Context, *command.Task[raw]) (any, error) {
		calls.Add(1)
		return nil, nil
	}))
	e.RunWorker(&reg)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 500)`)
	testenv.Eventually(t, soon, func() error {
		if calls.Load() < 50 {
			return errorf("%d calls", calls.Load())
		}
		return nil
	})
	sleeper.Pause(t) // in the midst of it
	const lane = `biz_type = 'ORDER_PAYMENT' AND priority = 'low'`
	owner := e.Text(t, `SELECT owner FROM taskrelay.lane WHERE `+lane)
	e.RunRelay()
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 500)`)
	e.WaitCount(t, soon, 1000, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'`)
	var successor string
	var fence int64
	e.Scan(t, `SELECT owner, fence FROM taskrelay.lane WHERE `+lane, nil, &successor, &fence)
	if successor == owner {
		t.Fatalf("the lane belongs to %s still", owner)
	}
	sleeper.Continue(t)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 500)`)
	e.WaitCount(t, soon, 1500, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'`)
	equal(t, "calls", calls.Load(), 1500)
	waitMessages(t, e, 0)
	equal(t, "attempts", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt`), 1500)
}
