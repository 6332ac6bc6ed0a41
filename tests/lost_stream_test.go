package tests

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Found by tests/faults: a stream that is lost takes the messages of rows on the work list along. They must not wait
// for the look that was put off, for ten minutes and more, while their message was believed to be there.
func TestLostStreamBringsTheWorkListForward(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(quick)
	const far = `now() + interval '1 hour'`
	// A first scan from the start is over when the marks of a lane have moved.
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 10)`)
	waitMessages(t, e, 10)
	finish(t, e, 10)
	s := e.NATS.WaitStream(t, "TASKS")
	if err := s.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.lane WHERE biz_type = 'ORDER_PAYMENT' AND priority = 'low' AND low_snapshot::text <> '1:1:'`)

	var waiting, later, leased int64
	e.Scan(t, `INSERT INTO taskrelay.task (biz_type, status, generation, attempt, next_attempt_at, republish_at)
		VALUES ('ORDER_PAYMENT', 'retrying', 1, 4, now(), `+far+`) RETURNING id`, nil, &waiting)
	e.Scan(t, `INSERT INTO taskrelay.task (biz_type, status, generation, attempt, next_attempt_at, republish_at)
		VALUES ('ORDER_PAYMENT', 'retrying', 1, 4, `+far+`, `+far+`) RETURNING id`, nil, &later)
	e.Scan(t, `INSERT INTO taskrelay.task (biz_type, status, generation, attempt, lease_until, lease_token, republish_at)
		VALUES ('ORDER_PAYMENT', 'running', 1, 4, now() + interval '20 minutes', 1, `+far+`) RETURNING id`, nil, &leased)
	testenv.Never(t, time.Second, func() error { // all that is wrong with them is what the stream will lose
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages, want none before the stream is lost", n)
		}
		return nil
	})
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	waitMessages(t, e, 1)
	equal(t, "generation: a guess does not raise it", e.Task(t, waiting).Generation, 1)
	if at := e.Task(t, later).RepublishAt; at == nil || time.Until(*at) < 30*time.Minute {
		t.Errorf("a row that is not due is looked at at %v", at)
	}
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND republish_at < now() + interval '21 minutes'`, leased)
}

// Found by tests/faults: a message that is given back may be one the stream has lost meanwhile. Where the reconciler has
// asked for a look, the settle must not put it off by ten minutes.
func TestRetryKeepsTheLookOfTheReconciler(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500, Delay: 2 * time.Second}, testenv.Reply{Status: 200})
	relay := e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "BASE_DELAY", "10s")...)
	id := e.Insert(t, "ORDER_PAYMENT")
	sink.WaitCallsOf(t, soon, id, 1)
	relay.Kill9(t) // it would take the look
	e.Exec(t, `UPDATE taskrelay.task SET republish_at = lease_until WHERE id = $1`, id)
	row := e.WaitStatus(t, soon, id, "retrying")
	if row.RepublishAt == nil || row.NextAttemptAt == nil || row.RepublishAt.Before(*row.NextAttemptAt) ||
		row.RepublishAt.Sub(*row.NextAttemptAt) > time.Minute {
		t.Errorf("looked at at %v, due at %v: want soon after", row.RepublishAt, row.NextAttemptAt)
	}
}

// Found by tests/faults: a store that is put back to an older copy has lost dead letters, though its streams are the same.
func TestOlderCopyOfTheStoreGetsItsDeadLettersBack(t *testing.T) {
	db := testenv.DB(t)
	nats := testenv.StartNATSProcess(t)
	e := testenv.NewEnv(t, db, &nats.NATSServer)
	die := func() int64 {
		id := e.Insert(t, "ORDER_PAYMENT")
		e.Exec(t, `UPDATE taskrelay.task SET status = 'dead', finished_at = now(), dead_at = now(), dead_reason = 'permanent' WHERE id = $1`, id)
		e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND dead_lettered_at IS NOT NULL`, id)
		return id
	}
	e.StartRelay()
	first := die()
	nats.Stop(t)
	copied := filepath.Join(t.TempDir(), "store")
	if err := os.CopyFS(copied, os.DirFS(nats.Store())); err != nil {
		t.Fatal(err)
	}
	nats.Start(t)
	second := die()
	nats.Kill9(t)
	if err := os.RemoveAll(nats.Store()); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(nats.Store(), os.DirFS(copied)); err != nil {
		t.Fatal(err)
	}
	nats.Start(t)
	waitLetter(t, e, "ORDER_PAYMENT", first)
	letter := waitLetter(t, e, "ORDER_PAYMENT", second)
	equal(t, "Task-Replayed", letter.Header.Get("Task-Replayed"), "true")
}
