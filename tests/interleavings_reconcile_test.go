package tests

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
)

// Interleaving 1: after a torn crash the stream holds acknowledged messages again, below the ack floor of their
// consumer. They are delivered to nobody and removed by nobody, and must neither fill the lane nor make reconciling blind.
func TestAcknowledgedMessagesThatComeBackDoNotBlindTheReconciler(t *testing.T) {
	t.Parallel()
	n := testenv.StartNATSProcess(t)
	e := testenv.NewEnv(t, testenv.DB(t), &n.NATSServer)
	relay := e.RunRelay(quick)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 10)`)
	waitMessages(t, e, 10)
	consumer := jetstream.ConsumerConfig{Durable: "ORDER_PAYMENT-low", FilterSubject: "tasks.ORDER_PAYMENT.low",
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: 500 * time.Millisecond}
	s := e.NATS.WaitStream(t, "TASKS")
	c, err := s.CreateConsumer(t.Context(), consumer)
	if err != nil {
		t.Fatal(err)
	}
	n.Stop(t)
	blocks := filepath.Join(n.Store(), "jetstream", "$G", "streams", "TASKS", "msgs")
	copied := filepath.Join(t.TempDir(), "msgs")
	if err := os.CopyFS(copied, os.DirFS(blocks)); err != nil {
		t.Fatal(err)
	}
	n.Start(t)
	testenv.Eventually(t, soon, func() error { _, err := c.Info(t.Context()); return err })
	batch, err := c.Fetch(10)
	if err != nil {
		t.Fatal(err)
	}
	for m := range batch.Messages() {
		if err := m.DoubleAck(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	waitMessages(t, e, 0)
	finish(t, e, 10)
	relay.Stop() // so that what it does next is all about what comes back
	n.Stop(t)
	if err := os.RemoveAll(blocks); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(blocks, os.DirFS(copied)); err != nil {
		t.Fatal(err)
	}
	n.Start(t)
	waitMessages(t, e, 10)
	info := func() *jetstream.ConsumerInfo {
		t.Helper()
		var i *jetstream.ConsumerInfo
		testenv.Eventually(t, soon, func() (err error) { i, err = c.Info(t.Context()); return err })
		return i
	}
	if i := info(); i.NumPending != 0 || i.AckFloor.Stream < 10 {
		t.Fatalf("the ten are not below the ack floor: pending %d, floor %d", i.NumPending, i.AckFloor.Stream)
	}

	// A message is lost while they lie there: it is found.
	e.RunRelay(quick)
	lost := e.Insert(t, "ORDER_PAYMENT")
	waitMessages(t, e, 11)
	m, err := s.GetLastMsgForSubject(t.Context(), "tasks.ORDER_PAYMENT.low")
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "last message", m.Header.Get("Task-Id"), itoa(lost))
	if err := s.DeleteMsg(t.Context(), m.Sequence); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if !tasksInStream(t, e)[itoa(lost)] {
			return errorf("task %d has no message", lost)
		}
		return nil
	})
	equal(t, "generation: a guess does not raise it", e.Task(t, lost).Generation, 0)
	// And the relay takes the consumer away, so that a worker makes it anew and clears the ten away.
	testenv.Eventually(t, soon, func() error {
		if _, err := s.Consumer(t.Context(), consumer.Durable); err != jetstream.ErrConsumerNotFound {
			return errorf("consumer that does not know its messages is still there: %v", err)
		}
		return nil
	})
	var reg command.Registry
	var calls atomic.Int64
	register(t, &reg, "ORDER_PAYMENT", fast(func(context.Context, *command.Task[raw]) (any, error) {
		calls.Add(1)
		return nil, nil
	}))
	e.RunWorker(&reg)
	e.WaitStatus(t, soon, lost, "succeeded")
	waitMessages(t, e, 0)
	equal(t, "calls: the ten are finished", calls.Load(), 1)
}

// Interleaving 4a: a row that was passed by the reconciler because it was on the work list, published, and whose message
// is then lost, is found by the look that repeats. It publishes the same generation under an id of its own.
func TestLostMessageOfTheWorkListIsFoundByTheNextLook(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(quick)
	s := e.NATS.WaitStream(t, "TASKS")
	var id int64
	e.Scan(t, `INSERT INTO taskrelay.task (biz_type, status, generation, attempt, next_attempt_at, republish_at)
		VALUES ('ORDER_PAYMENT', 'retrying', 1, 4, now(), now()) RETURNING id`, nil, &id)
	// Looked at, published, and put ten minutes ahead.
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND looks = 1 AND republish_at > now() + interval '9 minutes'`, id)
	first, err := s.GetLastMsgForSubject(t.Context(), "tasks.ORDER_PAYMENT.low")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteMsg(t.Context(), first.Sequence); err != nil { // within the duplicate window
		t.Fatal(err)
	}
	e.Exec(t, `UPDATE taskrelay.task SET republish_at = now() WHERE id = $1`, id) // ten minutes later
	var second *jetstream.RawStreamMsg
	testenv.Eventually(t, soon, func() (err error) {
		second, err = s.GetLastMsgForSubject(t.Context(), "tasks.ORDER_PAYMENT.low")
		return err
	})
	equal(t, "generation", second.Header.Get("Task-Generation"), "1")
	if a, b := first.Header.Get("Nats-Msg-Id"), second.Header.Get("Nats-Msg-Id"); a == b {
		t.Errorf("both looks have the message id %s: within its window the server would drop the second", a)
	}
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND looks = 2 AND republish_at > now() + interval '19 minutes'`, id)
	equal(t, "messages", e.NATS.Messages(t, "TASKS"), 1)
}
