package tests

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// quick makes a relay compare table and stream often enough for a test.
func quick(c *outbox.RelayConfig) { c.Reconcile = 200 * time.Millisecond }

// finish makes some rows final, as workers would, so that tests see that these are left alone.
func finish(t *testing.T, e *testenv.Env, upTo int64) {
	t.Helper()
	e.Exec(t, `UPDATE taskrelay.task SET status = 'succeeded', finished_at = now() WHERE id <= $1`, upTo)
}

func waitMessages(t *testing.T, e *testenv.Env, n uint64) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		if got := e.NATS.Messages(t, "TASKS"); got != n {
			return errorf("stream has %d messages, want %d", got, n)
		}
		return nil
	})
}

// A39, C10: the whole stream is lost; what is unfinished is published again with the same generation, the rest is not.
func TestLostStreamIsFilledAgainFromTheTable(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(quick)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 1000)`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, priority) SELECT 'REFUND', 'high' FROM generate_series(1, 200)`)
	e.Insert(t, "REFUND", "run_at", time.Now().Add(time.Hour))
	waitMessages(t, e, 1200)
	finish(t, e, 100)

	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	waitMessages(t, e, 1100)
	equal(t, "rows whose generation was raised by a guess", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE generation > 0`), 0)
	equal(t, "finished rows on the work list", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE finished_at IS NOT NULL AND republish_at IS NOT NULL`), 0)
	equal(t, "rows of the future on the work list", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE run_at IS NOT NULL AND republish_at IS NOT NULL`), 0)
}

// C-088: single messages and whole subjects disappear by hand; new ones go on being published meanwhile.
func TestPurgedMessagesAreFound(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(quick)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 300)`)
	waitMessages(t, e, 300)
	s := e.NATS.WaitStream(t, "TASKS")
	if err := s.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitMessages(t, e, 300)
}

// B84, B59: a row set to running by hand before the relay had read it, with a lease that has ended, runs all the same.
func TestRowSetRunningByHandIsPublished(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	id := e.Insert(t, "ORDER_PAYMENT")
	e.Exec(t, `UPDATE taskrelay.task SET status = 'running', lease_owner = 'manual', lease_until = now() - interval '10 min' WHERE id = $1`, id)
	e.RunRelay(quick)
	waitMessages(t, e, 1)
}

// A good message is never made stale, nor doubled, by reconciling while workers are slow.
func TestWaitingMessagesAreNotRepublished(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(quick)
	s := e.NATS.WaitStream(t, "TASKS")
	_, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "ORDER_PAYMENT-low", FilterSubject: "tasks.ORDER_PAYMENT.low",
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 50)`)
	waitMessages(t, e, 50)
	// Several turns of the reconciler: visible in the lane's low-water, which moves on only when the mark is clear.
	testenv.Never(t, 2*time.Second, func() error {
		if n := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE republish_at IS NOT NULL`); n != 0 {
			return errorf("%d rows are on the work list", n)
		}
		return nil
	})
	equal(t, "messages", e.NATS.Messages(t, "TASKS"), 50)
}

// C-084: the JetStream store is put back to an older copy: sequences are handed out again, the tail is lost.
func TestOlderCopyOfTheStoreIsNoticed(t *testing.T) {
	t.Parallel()
	n := testenv.StartNATSProcess(t)
	e := testenv.NewEnv(t, testenv.DB(t), &n.NATSServer)
	e.RunRelay(quick)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 100)`)
	waitMessages(t, e, 100)
	n.Stop(t)
	copied := t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(n.Store())); err != nil {
		t.Fatal(err)
	}
	n.Start(t)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 70)`)
	waitMessages(t, e, 170)
	n.Kill9(t)
	if err := os.RemoveAll(filepath.Join(n.Store(), "jetstream")); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(n.Store(), os.DirFS(copied)); err != nil {
		t.Fatal(err)
	}
	n.Start(t)
	testenv.Eventually(t, soon, func() error {
		if got := len(tasksInStream(t, e)); got != 170 {
			return errorf("stream has %d tasks, want 170", got)
		}
		return nil
	})
}

// Interleaving 14: rows copied in from another cluster have transaction ids that lie far ahead of this one's.
func TestCopiedRowsRunAlthoughTheirTransactionIDsAreForeign(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority) VALUES ('ORDER_PAYMENT', 'low')`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, xid) SELECT 'ORDER_PAYMENT', '90000000000' FROM generate_series(1, 20)`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, xid, status, next_attempt_at) VALUES ('ORDER_PAYMENT', '90000000000', 'retrying', now())`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, xid, status, finished_at) VALUES ('ORDER_PAYMENT', '90000000000', 'succeeded', now())`)
	e.RunRelay(quick)
	waitMessages(t, e, 21)
}

// C-036: dumped and restored into another cluster: what is unfinished runs, what is finished does not.
func TestRestoredInstallationGoesOn(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	relay := e.RunRelay(quick)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 50)`)
	waitMessages(t, e, 50)
	finish(t, e, 10)
	e.Exec(t, `UPDATE taskrelay.task SET status = 'retrying', next_attempt_at = now() WHERE id BETWEEN 11 AND 15`)
	relay.Stop()

	// As a restore leaves it: positions of a cluster whose transaction ids were far ahead, another identifier, no stream.
	e.Exec(t, `UPDATE taskrelay.lane SET snapshot = '90000000000:90000000000:', low_snapshot = '90000000000:90000000000:'`)
	e.Exec(t, `UPDATE taskrelay.installation SET system_identifier = 42`)
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	e.RunRelay(quick)
	e.Insert(t, "ORDER_PAYMENT")
	testenv.Eventually(t, soon, func() error {
		if got := len(tasksInStream(t, e)); got != 41 {
			return errorf("stream has %d tasks, want 41", got)
		}
		return nil
	})
	testenv.Never(t, time.Second, func() error {
		for id := range tasksInStream(t, e) {
			if n, err := strconv.Atoi(id); err != nil || n <= 10 {
				return errorf("task %s is finished and was published again", id)
			}
		}
		return nil
	})
}

// tasksInStream tells which tasks the stream holds; after a loss some may be there twice.
func tasksInStream(t *testing.T, e *testenv.Env) map[string]bool {
	t.Helper()
	got := map[string]bool{}
	s := e.NATS.WaitStream(t, "TASKS")
	info, err := s.Info(t.Context())
	if err != nil {
		return got
	}
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
		if m, err := s.GetMsg(t.Context(), seq); err == nil {
			got[m.Header.Get(outbox.HeaderID)] = true
		}
	}
	return got
}
