package tests

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// forgetPositions makes lanes as if their relay had died before it saved what it published.
func forgetPositions(t *testing.T, e *testenv.Env) {
	t.Helper()
	e.Exec(t, `UPDATE taskrelay.lane SET snapshot = '1:1:', at = '-infinity', round_snapshot = NULL, round_at = NULL,
		key_xid = NULL, key_id = NULL, key_run_at = NULL, key_run_id = NULL, max_seq = 0, low_snapshot = '1:1:', low_at = '-infinity',
		mark_snapshot = NULL, mark_at = NULL, mark_seq = NULL`)
}

// A relay that died before it had saved its positions publishes the same ids again. The server's answers name the first
// copies; that must not pass for a stream that has lost messages, nor for messages that are gone: all would come twice.
func TestRepeatedPublishesAreNotTakenForALoss(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	relay := e.RunRelay(quick)
	s := e.NATS.WaitStream(t, "TASKS")
	for _, lane := range []string{"ORDER_PAYMENT", "REFUND", "SHIPMENT"} { // consumers hold the marks
		_, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: lane + "-low", FilterSubject: "tasks." + lane + ".low",
			AckPolicy: jetstream.AckExplicitPolicy, AckWait: 30 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT $1::text FROM generate_series(1, 700)`, lane)
	}
	waitMessages(t, e, 2100)
	relay.Stop()
	forgetPositions(t, e)
	again := countPublishes(t, e, "tasks.>")
	e.RunRelay(quick)
	testenv.Eventually(t, soon, func() error {
		if n := again.total(); n < 2100 {
			return errorf("%d published again, want 2100", n)
		}
		return nil
	})
	testenv.Never(t, 2*time.Second, func() error {
		if n := e.Int(t, `SELECT losses FROM taskrelay.installation`); n != 0 {
			return errorf("%d losses of the stream were counted", n)
		}
		if n := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE republish_at IS NOT NULL OR looks > 0`); n != 0 {
			return errorf("%d rows whose message waits in the stream are on the work list", n)
		}
		return nil
	})
	equal(t, "messages", e.NATS.Messages(t, "TASKS"), 2100)
}

// lockRow holds a row's lock, as a person in psql does, until the function it returns is called.
func lockRow(t *testing.T, e *testenv.Env, id int64) (unlock func()) {
	t.Helper()
	tx, err := e.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlock = func() { _ = tx.Rollback(context.Background()) }
	t.Cleanup(unlock)
	if _, err := tx.Exec(t.Context(), `SELECT FROM taskrelay.task WHERE id = $1 FOR UPDATE`, id); err != nil {
		t.Fatal(err)
	}
	return unlock
}

// fullLane makes a lane whose subject holds two messages and takes no more, with rows on the work list.
func fullLane(t *testing.T, e *testenv.Env, rows int) {
	t.Helper()
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, status, next_attempt_at, republish_at, generation, attempt)
		SELECT 'ORDER_PAYMENT', 'retrying', now(), now(), 1, 4 FROM generate_series(1, $1::int)`, rows)
}

// run-once ends although a lane is full and has retries that are due.
func TestRunOnceEndsAlthoughTheWorkListMeetsAFullLane(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	fullLane(t, e, 20)
	relay, err := outbox.NewRelay(e.OpenPool("relay"), e.Connect("relay"), outbox.RelayConfig{MaxPerSubject: 2})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	counts, err := relay.RunOnce(ctx)
	if err != nil {
		t.Fatalf("run-once: %v", err)
	}
	equal(t, "republished", counts.Republished, 2)
	equal(t, "lanes that cannot take more", counts.LanesWaiting, 1)
}

// A lane that stays full costs next to nothing: neither its rows are rewritten nor its messages offered again and again.
func TestFullLaneIsNotHammered(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	fullLane(t, e, 400)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 2000)`)
	e.RunRelay(func(c *outbox.RelayConfig) { c.MaxPerSubject = 10 })
	waitMessages(t, e, 10)
	// A slow worker: one message leaves every 50 ms, so that the lane is full again at once.
	s := e.NATS.WaitStream(t, "TASKS")
	c, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "ORDER_PAYMENT-low", FilterSubject: "tasks.ORDER_PAYMENT.low",
		AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		t.Fatal(err)
	}
	published := countPublishes(t, e, "tasks.>")
	written := func() int64 {
		return e.Int(t, `SELECT (SELECT n_tup_upd FROM pg_stat_user_tables WHERE relid = 'taskrelay.task'::regclass)`)
	}
	wrote, began, taken := written(), time.Now(), 0
	for time.Since(began) < 4*time.Second {
		m, err := c.Fetch(1, jetstream.FetchMaxWait(2*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		for msg := range m.Messages() {
			if err := msg.Ack(); err != nil {
				t.Fatal(err)
			}
			taken++
		}
		timer := time.NewTimer(50 * time.Millisecond)
		<-timer.C
	}
	if taken < 20 {
		t.Fatalf("only %d messages came in 4 s", taken)
	}
	if n := published.total(); n > 40*taken {
		t.Errorf("%d publishes for %d messages that left", n, taken)
	}
	testenv.Eventually(t, soon, func() error { // backends report a second late
		if n := written() - wrote; n == 0 {
			return errorf("no update seen yet")
		}
		return nil
	})
	if n := written() - wrote; n > int64(60*taken) {
		t.Errorf("%d row updates for %d messages that left", n, taken)
	}
	t.Logf("%d messages left, %d publishes, %d row updates", taken, published.total(), written()-wrote)
}

// While somebody holds the lock of one row, the others of its lane and all other lanes are compared with the stream.
func TestLockedRowDoesNotStopReconciling(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(quick)
	locked := e.Insert(t, "A_FIRST")
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'A_FIRST' FROM generate_series(1, 20)`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'B_SECOND' FROM generate_series(1, 20)`)
	waitMessages(t, e, 41)
	unlock := lockRow(t, e, locked)
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 15*time.Second, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 40 {
			return errorf("%d messages, want the 40 whose rows are not locked", n)
		}
		return nil
	})
	unlock()
	waitMessages(t, e, 41)
}

// A service may end Run with a cause of its own: that is no failure of the relay.
func TestRelayEndsWellWhateverTheCauseOfItsEnd(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	relay, err := outbox.NewRelay(e.OpenPool("relay"), e.Connect("relay"), outbox.RelayConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	testenv.Eventually(t, soon, relay.Ready)
	cancel(errorf("terminated signal received"))
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("Run returned %v, want nil", err)
		}
	case <-time.After(soon):
		t.Fatal("Run does not end")
	}
}

// A row that cannot be published and whose lock somebody holds must not cost the relay its lanes.
func TestRefusedRowThatIsLockedStopsNoLane(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	first := e.RunRelay()
	s := e.NATS.WaitStream(t, "TASKS")
	first.Stop()
	cfg := s.CachedInfo().Config
	cfg.MaxMsgSize = 2000
	if _, err := e.NATS.JS.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	large := e.Insert(t, "ORDER_PAYMENT", "payload", `{"text":"`+strings.Repeat("x", 4000)+`"}`)
	unlock := lockRow(t, e, large)
	e.RunRelay()
	began := time.Now()
	n := uint64(0)
	for time.Since(began) < 12*time.Second { // two leases of a lane
		e.Insert(t, "REFUND")
		n++
		testenv.Eventually(t, 3*time.Second, func() error {
			if got := e.NATS.Messages(t, "TASKS"); got < n {
				return errorf("after %v: %d messages, want %d", time.Since(began), got, n)
			}
			return nil
		})
		timer := time.NewTimer(250 * time.Millisecond)
		<-timer.C
	}
	unlock()
	e.WaitStatus(t, soon, large, "dead")
}
