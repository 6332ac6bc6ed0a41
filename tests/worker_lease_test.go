package tests

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
)

func TestHeartbeatKeepsALongTaskFromRunningTwice(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var calls atomic.Int64
	slow := func() *command.Registry {
		var reg command.Registry
		register(t, &reg, "SLOW", fast(func(ctx context.Context, _ *command.Task[raw]) (any, error) {
			calls.Add(1)
			select {
			case <-time.After(4 * time.Second):
				return nil, nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}))
		return &reg
	}
	short := func(c *command.WorkerConfig) { c.Lease = time.Second }
	l.worker(slow(), short)
	l.worker(slow(), short)
	id := l.task("SLOW")
	l.WaitStatus(t, soon, id, "running")
	l.publish(id) // a second copy, for the other worker too
	l.publish(id)
	l.waitStatus(id, "succeeded")
	l.waitEmpty()
	equal(t, "calls", calls.Load(), 1)
	equal(t, "outcomes", outcomes(t, l.Env, id), "[succeeded]")
}

// Interleaving 8: adjacent copies in one batch, and copies of a task that runs here.
func TestCopiesInOneBatchAreClaimedOnce(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	var calls atomic.Int64
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) {
		calls.Add(1)
		time.Sleep(300 * time.Millisecond)
		return nil, nil
	}))
	var ids []int64
	for range 10 {
		id := l.Insert(t, "PAY")
		for range 3 {
			l.publish(id)
		}
		ids = append(ids, id)
	}
	l.worker(&reg)
	for _, id := range ids {
		l.WaitStatus(t, soon, id, "succeeded")
		equal(t, "outcomes", outcomes(t, l.Env, id), "[succeeded]")
	}
	l.waitEmpty()
	equal(t, "calls", calls.Load(), 10)
}

// lock takes the lock of a row as a person in psql would, until the returned function is called.
func (l *workerLab) lock(id int64) (unlock func()) {
	l.t.Helper()
	tx, err := l.Pool.Begin(l.t.Context())
	if err != nil {
		l.t.Fatal(err)
	}
	if _, err := tx.Exec(l.t.Context(), "SELECT 1 FROM taskrelay.task WHERE id = $1 FOR UPDATE", id); err != nil {
		l.t.Fatal(err)
	}
	return func() { _ = tx.Rollback(context.Background()) }
}

// Interleaving 6: one locked row ends nobody else's lease, and holds up neither claims nor settles of others.
func TestLockedRowHoldsUpOnlyItself(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	release := make(chan struct{})
	c := fast(func(ctx context.Context, p *command.Task[payment]) (any, error) {
		if p.Payload.How == "quick" {
			return nil, nil
		}
		select {
		case <-release:
			return nil, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	})
	c.Concurrency = 40
	register(t, &reg, "PAY", c)
	l.worker(&reg, func(c *command.WorkerConfig) { c.Lease = time.Second })
	var running []int64
	for range 20 {
		running = append(running, l.task("PAY"))
	}
	l.WaitCount(t, soon, 20, "SELECT count(*) FROM taskrelay.task WHERE status = 'running'")
	unlock := l.lock(running[7])
	unclaimed := l.Insert(t, "PAY", "payload", `{"how": "quick"}`)
	unlockUnclaimed := l.lock(unclaimed)
	l.publish(unclaimed)
	// While the locks are held for three leases, everybody else's lease goes on and new tasks run.
	testenv.Never(t, 3*time.Second, func() error {
		n := l.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'running' AND lease_until < now() AND id <> $1", running[7])
		if n > 0 {
			return errorf("%d leases have ended", n)
		}
		return nil
	})
	l.waitStatus(l.task("PAY", "payload", `{"how": "quick"}`), "succeeded")
	equal(t, "locked and unclaimed", l.Task(t, unclaimed).Status, "pending")
	close(release)
	for i, id := range running {
		if i != 7 {
			l.WaitStatus(t, soon, id, "succeeded")
		}
	}
	equal(t, "locked", l.Task(t, running[7]).Status, "running")
	unlock()
	unlockUnclaimed()
	l.WaitStatus(t, soon, running[7], "succeeded")
	l.WaitStatus(t, soon, unclaimed, "succeeded")
	equal(t, "outcomes", outcomes(t, l.Env, running[7]), "[succeeded]")
	l.waitEmpty()
}

// C-093, C-096: whatever a dead worker left behind is run again, the lost attempt is logged and counted.
func TestEndedLeaseIsLoggedAsLostAndRunAgain(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	register(t, &reg, "PAY", fast(func(_ context.Context, p *command.Task[raw]) (any, error) { return p.Attempt, nil }))
	died, byHand := l.Insert(t, "PAY"), l.Insert(t, "PAY")
	l.Exec(t, `UPDATE taskrelay.task SET status = 'running', attempt = 1, lease_owner = 'gone', lease_token = 42,
		lease_until = now() + interval '1 s', started_at = now() WHERE id = $1`, died)
	l.Exec(t, `UPDATE taskrelay.task SET status = 'running', lease_until = now() WHERE id = $1`, byHand)
	w := l.worker(&reg)
	l.publish(died)
	l.publish(byHand)
	r := l.waitStatus(died, "succeeded")
	equal(t, "outcomes", outcomes(t, l.Env, died), "[lost succeeded]")
	equal(t, "attempt", r.Attempt, 2)
	equal(t, "lost worker", text(l.Attempts(t, died)[0].Worker), "gone")
	l.waitStatus(byHand, "succeeded")
	equal(t, "outcomes without a token", outcomes(t, l.Env, byHand), "[lost succeeded]")
	equal(t, "lost", w.Stats().Lost.Load(), 2)
	l.waitEmpty()
}

// Interleaving 17: attempts used up by crashes end the task without one more call.
func TestAttemptsUsedUpByCrashesAreNotExceeded(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) {
		t.Error("called")
		return nil, nil
	}))
	compensated := make(chan time.Time, 1)
	undo := fast(func(context.Context, *command.Task[raw]) (any, error) {
		t.Error("called")
		return nil, nil
	})
	undo.Compensate = func(context.Context, *command.Task[raw], error) error {
		compensated <- time.Now()
		return nil
	}
	register(t, &reg, "UNDO", undo)
	crashed := func(bizType string) int64 {
		id := l.Insert(t, bizType)
		l.Exec(t, `UPDATE taskrelay.task SET status = 'running', attempt = 3, lease_owner = 'gone', lease_token = 42,
			lease_until = now() - interval '1 s', started_at = now() - interval '2 s' WHERE id = $1`, id)
		return id
	}
	pay, undone := crashed("PAY"), crashed("UNDO")
	l.worker(&reg)
	began := time.Now()
	l.publish(pay)
	l.publish(undone)
	r := l.waitStatus(pay, "dead")
	equal(t, "reason", text(r.DeadReason), "lost")
	equal(t, "attempt", r.Attempt, 3)
	equal(t, "outcomes", outcomes(t, l.Env, pay), "[lost]")
	r = l.waitStatus(undone, "dead")
	equal(t, "outcomes", outcomes(t, l.Env, undone), "[lost succeeded]")
	equal(t, "compensation", r.Compensation, "done")
	equal(t, "reason", text(r.DeadReason), "lost")
	if wait := (<-compensated).Sub(began); wait < 2*time.Second {
		t.Errorf("compensation began %v after the lost attempt was found, want a lease (2s)", wait)
	}
}

// C-099, interleaving 9c: a result that comes after another worker took over is stale; it changes and acks nothing.
func TestLateResultIsStale(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	cause := make(chan error, 1)
	register(t, &reg, "PAY", fast(func(ctx context.Context, p *command.Task[raw]) (any, error) {
		if p.Attempt > 1 {
			return "second", nil
		}
		<-ctx.Done()
		cause <- context.Cause(ctx)
		return "first", nil
	}))
	w := l.worker(&reg)
	id := l.task("PAY")
	l.WaitStatus(t, soon, id, "running")
	// Another worker found the lease ended: it logged the attempt as lost and holds the row now.
	l.Exec(t, `WITH old AS (SELECT * FROM taskrelay.task WHERE id = $1 FOR UPDATE), log AS (
			INSERT INTO taskrelay.task_attempt (task_id, lease_token, biz_type, generation, phase, attempt, worker, outcome, started_at)
			SELECT id, lease_token, biz_type, generation, phase, attempt, lease_owner, 'lost', started_at FROM old)
		UPDATE taskrelay.task SET lease_token = 4711, lease_owner = 'other', started_at = now(),
			lease_until = now() + interval '3 s' WHERE id = $1`, id)
	if err := <-cause; !errors.Is(err, command.ErrLeaseLost) {
		t.Errorf("cause of the context is %v, want ErrLeaseLost", err)
	}
	testenv.Eventually(t, soon, func() error {
		if o := outcomes(t, l.Env, id); o != "[stale]" {
			return errorf("outcomes are %s, want [stale]", o)
		}
		return nil
	})
	r := l.Task(t, id)
	equal(t, "status", r.Status, "running")
	equal(t, "owner", text(r.LeaseOwner), "other")
	equal(t, "messages", l.NATS.Messages(t, "TASKS"), 1)
	equal(t, "stale", w.Stats().Stale.Load(), 1)
	// The other worker dies as well: the message that was not acked brings the task back here.
	r = l.waitStatus(id, "succeeded")
	equal(t, "result", text(r.Result), `"second"`)
	equal(t, "attempts", l.Int(t, "SELECT count(*) FROM taskrelay.task_attempt WHERE task_id = $1 AND outcome IN ('stale', 'lost', 'succeeded')", id), 3)
	l.waitEmpty()
}

// Interleaving 15.
func TestCancelRequestEndsTheTaskWhereverItIs(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	cause := make(chan error, 10)
	register(t, &reg, "PAY", fast(func(ctx context.Context, p *command.Task[payment]) (any, error) {
		switch p.Payload.How {
		case "waits":
			<-ctx.Done()
			cause <- context.Cause(ctx)
			return nil, ctx.Err()
		case "fails soon":
			time.Sleep(200 * time.Millisecond)
			return nil, errFlaky
		case "succeeds":
			time.Sleep(200 * time.Millisecond)
			return nil, nil
		}
		t.Error("called")
		return nil, nil
	}))
	l.worker(&reg)
	const request = "UPDATE taskrelay.task SET cancel_requested_at = now() WHERE id = $1"
	for how, want := range map[string]string{"waits": "cancelled", "fails soon": "cancelled", "succeeds": "succeeded"} {
		id := l.task("PAY", "payload", fmt.Sprintf(`{"how": %q}`, how))
		l.WaitStatus(t, soon, id, "running")
		l.Exec(t, request, id)
		l.waitStatus(id, want)
	}
	if err := <-cause; !errors.Is(err, command.ErrCancelled) {
		t.Errorf("cause of the context is %v, want ErrCancelled", err)
	}
	// The worker died after the request: the next claim must not call the handler again.
	died := l.Insert(t, "PAY")
	l.Exec(t, `UPDATE taskrelay.task SET status = 'running', attempt = 1, lease_token = 42, lease_until = now() - interval '1 s',
		started_at = now(), cancel_requested_at = now() WHERE id = $1`, died)
	l.publish(died)
	r := l.waitStatus(died, "cancelled")
	equal(t, "attempt", r.Attempt, 1)
	equal(t, "outcomes", outcomes(t, l.Env, died), "[lost]")
	if r.FinishedAt == nil || r.LeaseUntil != nil {
		t.Errorf("final columns are wrong: %+v", r)
	}
	l.waitEmpty()
}

// Interleaving 12: a message that comes long before its task is due goes back to the table.
func TestEarlyMessageIsParkedOrHandedBack(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, nil }))
	l.worker(&reg, func(c *command.WorkerConfig) { c.NakMax = 3 * time.Second })
	shortly := l.Insert(t, "PAY", "run_at", time.Now().Add(1500*time.Millisecond))
	tomorrow := l.Insert(t, "PAY", "run_at", time.Now().Add(24*time.Hour))
	never := l.Insert(t, "PAY")
	for _, id := range []int64{shortly, tomorrow} {
		l.publish(id)
	}
	m := l.message(never)
	l.Exec(t, "UPDATE taskrelay.task SET run_at = 'infinity' WHERE id = $1", never)
	l.publishMsg(m)
	r := l.waitStatus(shortly, "succeeded")
	equal(t, "generation", r.Generation, 0)
	if r.StartedAt.Before(*r.RunAt) {
		t.Errorf("started at %v, before it was due at %v", r.StartedAt, r.RunAt)
	}
	l.waitEmpty()
	r = l.Task(t, tomorrow)
	equal(t, "status", r.Status, "pending")
	equal(t, "generation", r.Generation, 1)
	equal(t, "republish at", r.RepublishAt.UnixMicro(), r.RunAt.UnixMicro())
	equal(t, "next attempt at", r.NextAttemptAt.UnixMicro(), r.RunAt.UnixMicro())
	equal(t, "never", l.Text(t, "SELECT republish_at::text FROM taskrelay.task WHERE id = $1", never), "infinity")
}

// C-113: rows removed by hand leave no loop behind.
func TestRowsDeletedByHandAreForgotten(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	goOn := make(chan struct{})
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) {
		<-goOn
		return nil, nil
	}))
	published := l.task("PAY")
	l.Exec(t, "DELETE FROM taskrelay.task WHERE id = $1", published)
	w := l.worker(&reg)
	running := l.task("PAY")
	l.WaitStatus(t, soon, running, "running")
	l.Exec(t, "DELETE FROM taskrelay.task WHERE id = $1", running)
	close(goOn)
	l.waitEmpty()
	equal(t, "terminated", w.Stats().Terminated.Load(), 2)
	equal(t, "outcomes", outcomes(t, l.Env, running), "[stale]")
	if err := w.Ready(); err != nil {
		t.Errorf("not ready: %v", err)
	}
}

func TestCompleteSettlesInTheHandlersTransaction(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	l.Exec(t, "CREATE TABLE paid (task_id bigint, attempt int)")
	var reg command.Registry
	pool := l.OpenPool("handlers")
	c := fast(func(ctx context.Context, p *command.Task[payment]) (any, error) {
		level := pgx.ReadCommitted
		if p.Payload.How == "repeatable read" {
			level = pgx.RepeatableRead
		}
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
		if err != nil {
			return nil, err
		}
		defer tx.Rollback(context.Background())
		if _, err := tx.Exec(ctx, "INSERT INTO paid VALUES ($1, $2)", p.ID, p.Attempt); err != nil {
			return nil, err
		}
		if p.Payload.How == "long" { // heartbeats touch the row meanwhile
			time.Sleep(1500 * time.Millisecond)
		}
		if err := command.Complete(ctx, tx, p); err != nil {
			return nil, err
		}
		if p.Payload.How == "slow commit" { // the settle, heartbeats and copies meet the locked row
			l.publish(p.ID)
			time.Sleep(2500 * time.Millisecond)
		}
		if p.Payload.How == "forgets" && p.Attempt == 1 {
			return nil, nil
		}
		if err := tx.Commit(ctx); err != nil {
			return nil, err
		}
		if p.Payload.How == "fails afterwards" {
			return nil, errFlaky
		}
		return nil, nil
	})
	register(t, &reg, "PAY", c)
	w := l.worker(&reg, func(c *command.WorkerConfig) { c.Lease = time.Second })
	cases := []struct{ how, status, outcomes string }{
		{"commits", "succeeded", "[succeeded]"},
		{"long", "succeeded", "[succeeded]"},
		{"slow commit", "succeeded", "[succeeded]"},
		{"forgets", "succeeded", "[failed succeeded]"},
		{"fails afterwards", "succeeded", "[succeeded]"},
		{"repeatable read", "dead", "[failed failed failed]"},
	}
	var ids []int64
	for _, c := range cases {
		ids = append(ids, l.task("PAY", "payload", fmt.Sprintf(`{"how": %q}`, c.how)))
	}
	for i, c := range cases {
		l.waitStatus(ids[i], c.status)
		equal(t, c.how, outcomes(t, l.Env, ids[i]), c.outcomes)
		want := int64(1)
		if c.status == "dead" {
			want = 0
		}
		equal(t, c.how+": business rows", l.Int(t, "SELECT count(*) FROM paid WHERE task_id = $1", ids[i]), want)
	}
	equal(t, "forgotten commit", text(l.Attempts(t, ids[3])[0].ErrorClass), "not_committed")
	l.waitEmpty()
	equal(t, "stale", w.Stats().Stale.Load(), 0)
}

// A handler whose task another worker has by now cannot complete it: its transaction is told so, whatever it has written.
func TestCompleteOfALostLeaseIsRefused(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	pool := l.OpenPool("handlers")
	goOn, completed := make(chan struct{}), make(chan error, 1)
	register(t, &reg, "PAY", fast(func(_ context.Context, p *command.Task[raw]) (any, error) {
		<-goOn
		return nil, pgx.BeginFunc(context.Background(), pool, func(tx pgx.Tx) error {
			err := command.Complete(context.Background(), tx, p)
			completed <- err
			return err
		})
	}))
	l.worker(&reg)
	id := l.task("PAY")
	l.WaitStatus(t, soon, id, "running")
	l.Exec(t, `UPDATE taskrelay.task SET lease_token = 4711, lease_owner = 'other', lease_until = now() + interval '1 minute' WHERE id = $1`, id)
	close(goOn)
	if err := <-completed; !errors.Is(err, command.ErrLeaseLost) {
		t.Errorf("Complete says %v, want ErrLeaseLost", err)
	}
	testenv.Eventually(t, soon, func() error {
		if o := outcomes(t, l.Env, id); o != "[stale]" {
			return errorf("outcomes are %s, want [stale]", o)
		}
		return nil
	})
	r := l.Task(t, id)
	equal(t, "status", r.Status, "running")
	equal(t, "owner", text(r.LeaseOwner), "other")
}
