package tests

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// deafConn is a connection to Postgres that loses the answer to a statement: the server runs it, nobody hears.
type deafConn struct {
	net.Conn
	deaf   *atomic.Pointer[string] // part of the statement whose answer is to be lost next
	lost   *atomic.Int64
	broken bool
}

func (c *deafConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if part := c.deaf.Load(); err == nil && part != nil && bytes.Contains(b, []byte(*part)) && c.deaf.CompareAndSwap(part, nil) {
		// Wait for the whole answer: what was committed is committed.
		buf := make([]byte, 1<<16)
		var all []byte
		_ = c.Conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		for !bytes.Contains(all, []byte("COMMIT\x00Z")) {
			k, err := c.Conn.Read(buf)
			if err != nil {
				break
			}
			all = append(all, buf[:k]...)
		}
		c.lost.Add(1)
		c.broken = true
		_ = c.Conn.Close()
	}
	return n, err
}

func (c *deafConn) Read(b []byte) (int, error) {
	if c.broken {
		return 0, errors.New("connection lost by the test")
	}
	return c.Conn.Read(b)
}

// deafWorker starts a worker that loses answers on demand.
func (l *workerLab) deafWorker(reg *command.Registry) (w *runningWorker, deaf *atomic.Pointer[string], lost *atomic.Int64) {
	l.t.Helper()
	deaf, lost = new(atomic.Pointer[string]), new(atomic.Int64)
	cfg, err := pgxpool.ParseConfig(l.URL)
	if err != nil {
		l.t.Fatal(err)
	}
	cfg.ConnConfig.TLSConfig, cfg.ConnConfig.Fallbacks = nil, nil
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // the statement's text is in every message
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &deafConn{Conn: c, deaf: deaf, lost: lost}, nil
	}
	pool, err := pgxpool.NewWithConfig(l.t.Context(), cfg)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(pool.Close)
	w = l.unstartedOn(pool, reg)
	w.start()
	testenv.Eventually(l.t, soon, w.Ready)
	return w, deaf, lost
}

// Interleaving 9c: a settle that was committed and not heard of is neither stale nor done twice; a claim neither
// counts twice nor waits for its lease.
func TestLostAnswersOfPostgresChangeNothing(t *testing.T) {
	t.Parallel()
	for _, statement := range []string{"taskrelay: claim", "taskrelay: settle", "taskrelay: heartbeat"} {
		t.Run(statement, func(t *testing.T) {
			l := newWorkerLab(t)
			var reg command.Registry
			var calls atomic.Int64
			register(t, &reg, "PAY", fast(func(_ context.Context, p *command.Task[payment]) (any, error) {
				calls.Add(1)
				if statement == "taskrelay: heartbeat" {
					time.Sleep(3 * time.Second)
				}
				if p.Payload.How == "fails" && p.Attempt == 1 {
					return nil, retry.After(100*time.Millisecond, errFlaky)
				}
				return nil, nil
			}))
			w, deaf, lost := l.deafWorker(&reg)
			for _, how := range []string{"ok", "fails"} {
				deaf.Store(&statement)
				calls.Store(0)
				id := l.task("PAY", "payload", `{"how": "`+how+`"}`)
				r := l.waitStatus(id, "succeeded")
				want, n := "[succeeded]", 1
				if how == "fails" {
					want, n = "[failed succeeded]", 2
				}
				equal(t, "outcomes", outcomes(t, l.Env, id), want)
				equal(t, "attempt", r.Attempt, n)
				equal(t, "calls", calls.Load(), int64(n))
			}
			l.waitEmpty()
			equal(t, "lost answers", lost.Load(), 2)
			equal(t, "stale", w.Stats().Stale.Load(), 0)
		})
	}
}

// A claim is at its commit, which takes its time (a disk that stalls), when the connection breaks. The next try meets the
// lock of the first one, waits for it, and finds the task claimed for it: no attempt is lost, no lease waited for.
func TestClaimThatIsCutOffAtItsCommitIsFoundAgain(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	var calls atomic.Int64
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) {
		calls.Add(1)
		return nil, nil
	}))
	link, address := through(t, l.URL)
	w := l.unstartedOn(openPool(t, address, nil), &reg, func(c *command.WorkerConfig) { c.Lease = time.Minute })
	w.start()
	testenv.Eventually(t, soon, w.Ready)
	// A commit cannot be called off, and does not look whether its client is there.
	l.Exec(t, `CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			WHILE NOT pg_try_advisory_xact_lock_shared(7) LOOP
				BEGIN PERFORM pg_sleep(0.02); EXCEPTION WHEN query_canceled THEN NULL; END;
			END LOOP;
			RETURN NULL;
		END $$;
		CREATE CONSTRAINT TRIGGER stall AFTER UPDATE ON taskrelay.task DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
			WHEN (NEW.status = 'running') EXECUTE FUNCTION stall()`)
	disk, err := l.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = disk.Rollback(context.Background()) }()
	if _, err := disk.Exec(t.Context(), "SELECT pg_advisory_xact_lock(7)"); err != nil {
		t.Fatal(err)
	}
	id := l.task("PAY")
	l.WaitCount(t, soon, 1, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`)
	link.Cut()
	testenv.Eventually(t, soon, func() error {
		if err := w.Ready(); err == nil || !strings.Contains(err.Error(), "55P03") {
			return errorf("Ready says %v, want that the claim meets a lock", err)
		}
		return nil
	})
	if err := disk.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := l.WaitStatus(t, soon, id, "succeeded")
	equal(t, "attempt", r.Attempt, 1)
	equal(t, "outcomes", outcomes(t, l.Env, id), "[succeeded]")
	equal(t, "calls", calls.Load(), 1)
}

func TestPostgresAwayMarksNothingFailed(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	var calls atomic.Int64
	c := fast(func(context.Context, *command.Task[raw]) (any, error) {
		calls.Add(1)
		time.Sleep(200 * time.Millisecond)
		return nil, nil
	})
	register(t, &reg, "PAY", c)
	w := l.worker(&reg)
	l.Exec(t, `CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no settle today'; END $$;
		CREATE TRIGGER fails BEFORE INSERT ON taskrelay.task_attempt FOR EACH STATEMENT EXECUTE FUNCTION fails();`)
	var ids []int64
	for range 10 {
		ids = append(ids, l.task("PAY"))
	}
	testenv.Eventually(t, soon, func() error {
		if err := w.Ready(); err == nil || !strings.Contains(err.Error(), "no settle today") {
			return errorf("Ready says %v, want the failing settle", err)
		}
		return nil
	})
	testenv.Never(t, 3*time.Second, func() error { // longer than a lease
		if n := calls.Load(); n > 10 {
			return errorf("%d calls, want 10: results must wait, not run again", n)
		}
		return nil
	})
	l.Exec(t, "DROP TRIGGER fails ON taskrelay.task_attempt")
	for _, id := range ids {
		l.WaitStatus(t, soon, id, "succeeded")
	}
	testenv.Eventually(t, soon, w.Ready)
	equal(t, "calls", calls.Load(), 10)
	l.waitEmpty()
}

func TestDeletedConsumerAndStreamHeal(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, nil }))
	w := l.worker(&reg)
	l.waitStatus(l.task("PAY"), "succeeded")
	if err := l.NATS.JS.DeleteConsumer(t.Context(), "TASKS", "PAY-low"); err != nil {
		t.Fatal(err)
	}
	l.waitStatus(l.task("PAY"), "succeeded")
	if err := l.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if w.Ready() == nil {
			return errorf("the worker is ready without a stream")
		}
		return nil
	})
	l.makeStream(l.installation)
	l.waitStatus(l.task("PAY"), "succeeded")
	testenv.Eventually(t, soon, w.Ready)
}

// C-104, C-108: of two workers' limits the greater wins; an operator's change is left, but for MaxDeliver.
func TestConsumerSettings(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	reg := func(concurrency int) *command.Registry {
		var reg command.Registry
		c := fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, nil })
		c.Concurrency = concurrency
		register(t, &reg, "PAY", c)
		return &reg
	}
	info := func() (cfg jetstream.ConsumerConfig) {
		testenv.Eventually(t, soon, func() error { // a worker may be ready before it has made its consumers
			c, err := l.NATS.JS.Consumer(t.Context(), "TASKS", "PAY-low")
			if err == nil {
				cfg = c.CachedInfo().Config
			}
			return err
		})
		return cfg
	}
	wait := func(what string, check func(jetstream.ConsumerConfig) bool) {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			if c := info(); !check(c) {
				return errorf("%s: ack wait %v, max ack pending %d, max deliver %d", what, c.AckWait, c.MaxAckPending, c.MaxDeliver)
			}
			return nil
		})
	}
	lease := func(d time.Duration) func(*command.WorkerConfig) {
		return func(c *command.WorkerConfig) { c.Lease = d }
	}
	first := l.worker(reg(10), lease(5*time.Second))
	wait("as made", func(c jetstream.ConsumerConfig) bool {
		return c.AckWait == 5*time.Second && c.MaxAckPending == 1000 && c.MaxDeliver == -1 &&
			c.FilterSubject == "tasks.PAY.low" && c.AckPolicy == jetstream.AckExplicitPolicy && c.Durable == "PAY-low"
	})
	l.worker(reg(500), lease(2*time.Second))
	wait("the greater wins", func(c jetstream.ConsumerConfig) bool { return c.AckWait == 5*time.Second && c.MaxAckPending == 2000 })
	first.wait(soon)
	l.worker(reg(10), lease(8*time.Second))
	wait("the greater wins", func(c jetstream.ConsumerConfig) bool { return c.AckWait == 8*time.Second && c.MaxAckPending == 2000 })
	cfg := info()
	cfg.AckWait, cfg.MaxAckPending, cfg.MaxDeliver = 3*time.Second, 77, 2
	if _, err := l.NATS.JS.UpdateConsumer(t.Context(), "TASKS", cfg); err != nil {
		t.Fatal(err)
	}
	l.worker(reg(500), lease(9*time.Second))
	wait("the operator's stay", func(c jetstream.ConsumerConfig) bool {
		return c.AckWait == 3*time.Second && c.MaxAckPending == 77 && c.MaxDeliver == -1
	})
	l.waitStatus(l.task("PAY"), "succeeded")
}

// The limit over all workers is the consumer's; parked retries may fill half of it at most.
func TestConcurrencyOverAllWorkers(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	l.Exec(t, "INSERT INTO taskrelay.biz_type (biz_type, concurrency) VALUES ('PAY', 4)")
	var now, most atomic.Int64
	reg := func() *command.Registry {
		var reg command.Registry
		c := fast(func(_ context.Context, p *command.Task[payment]) (any, error) {
			if p.Payload.How == "fails" {
				return nil, retry.After(20*time.Second, errFlaky)
			}
			n := now.Add(1)
			defer now.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			time.Sleep(50 * time.Millisecond)
			return nil, nil
		})
		register(t, &reg, "PAY", c)
		return &reg
	}
	l.worker(reg())
	var failing []int64
	for range 12 {
		failing = append(failing, l.task("PAY", "payload", `{"how": "fails"}`))
	}
	for _, id := range failing {
		l.WaitStatus(t, soon, id, "retrying")
	}
	if n := l.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'retrying' AND generation = 0"); n > 2 {
		t.Errorf("%d retries are parked in JetStream, want at most half of MaxAckPending: 2", n)
	}
	l.worker(reg())
	for range 20 {
		l.task("PAY")
	}
	l.WaitCount(t, soon, 20, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'")
	if n := most.Load(); n > 4 {
		t.Errorf("%d ran at once, want at most 4 over all workers", n)
	}
}
