package tests

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// editStream changes a setting of a stream, as an operator would.
func editStream(t *testing.T, e *testenv.Env, name string, change func(*jetstream.StreamConfig)) {
	t.Helper()
	cfg := e.NATS.WaitStream(t, name).CachedInfo().Config
	change(&cfg)
	if _, err := e.NATS.JS.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
}

// smallMessages makes a relay meet a stream that takes messages of a kilobyte only.
func smallMessages(t *testing.T, e *testenv.Env) *testenv.Running {
	t.Helper()
	makeStreams(t, e)
	editStream(t, e, "TASKS", func(c *jetstream.StreamConfig) { c.MaxMsgSize = 1000 })
	return e.RunRelay()
}

// C-082: an operator lowers the stream's limit on one message. What does not fit is dead, and its error says how large it
// is, what the stream takes, and how to mend that; the setting is in the log before.
func TestMessageAboveTheStreamsLimitSaysTheSizes(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	id := e.Insert(t, "ORDER_PAYMENT", "payload", `{"x": "`+strings.Repeat("y", 5000)+`"}`)
	fits := e.Insert(t, "ORDER_PAYMENT")
	// Written before a relay runs, but published after the limit is set.
	e.Exec(t, `UPDATE taskrelay.task SET run_at = now() + interval '1 hour'`)
	relay := smallMessages(t, e)
	e.Exec(t, `UPDATE taskrelay.task SET republish_at = now(), next_attempt_at = now(), generation = 1`)
	row := e.WaitStatus(t, soon, id, "dead")
	for _, want := range []string{" bytes with headers", "max_msg_size of stream TASKS is 1000", "nats stream edit TASKS", "requeue"} {
		if !strings.Contains(text(row.LastError), want) {
			t.Errorf("last error %q: want %q in it", text(row.LastError), want)
		}
	}
	equal(t, "reason", text(row.DeadReason), "oversize")
	equal(t, "the one that fits", e.Task(t, fits).Status, "pending")
	if logs := relay.Logs(); !strings.Contains(logs, `"setting":"max_msg_size"`) {
		t.Errorf("the log does not name the setting:\n%s", logs)
	}
}

// A compensation whose message no stream takes has failed: the row must not say that it is pending for ever, and the
// louder event goes out.
func TestRefusedCompensationHasFailed(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	smallMessages(t, e)
	id := e.Insert(t, "ORDER_PAYMENT", "payload", `{"x": "`+strings.Repeat("y", 5000)+`"}`, "phase", "compensate", "compensation", "pending",
		"generation", 1, "cause", "card declined", "execute_attempts", 3)
	e.Exec(t, `UPDATE taskrelay.task SET republish_at = now(), next_attempt_at = now() WHERE id = $1`, id)
	e.WaitStatus(t, soon, id, "dead")
	equal(t, "compensation", e.Text(t, `SELECT compensation FROM taskrelay.task WHERE id = $1`, id), "failed")
	testenv.Eventually(t, soon, func() error {
		_, err := e.NATS.Last(t.Context(), "TASKS_EVENTS", "events.ORDER_PAYMENT.compensation_failed")
		return err
	})
}

// A requeue takes its letter back by what the leader of the stream says: a follower may not have it yet, or have it still.
func TestLettersAreLookedUpAtTheLeader(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay()
	id := e.Insert(t, "ORDER_PAYMENT")
	e.Exec(t, `UPDATE taskrelay.task SET status = 'dead', finished_at = now(), dead_at = now(), dead_reason = 'permanent' WHERE id = $1`, id)
	waitLetter(t, e, "ORDER_PAYMENT", id)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND dead_lettered_at IS NOT NULL`, id)
	var direct atomic.Int64
	nc := e.Connect("questions") // the server hands each question to every subscriber
	if _, err := nc.Subscribe("$JS.API.DIRECT.GET.>", func(*nats.Msg) { direct.Add(1) }); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	e.Exec(t, `SELECT taskrelay.requeue($1::bigint, 'again')`, id)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND dead_lettered_at IS NULL AND republish_at > now() + interval '1 minute'`, id)
	equal(t, "letters", e.NATS.Messages(t, "TASKS_DEAD"), 0)
	equal(t, "questions that any replica may answer", direct.Load(), 0)
}

// A stream that turns unsafe while the relay runs makes it wait, not ready and saying why, and it goes on when somebody
// has mended it.
func TestRelayWaitsWhileItsStreamIsUnsafe(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	relay, err := outbox.NewRelay(e.OpenPool("relay"), e.Connect("relay"), outbox.RelayConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the relay ended with %v", err)
		}
	}()
	testenv.Eventually(t, soon, relay.Ready)
	editStream(t, e, "TASKS", func(c *jetstream.StreamConfig) { c.Discard, c.DiscardNewPerSubject = jetstream.DiscardOld, false })
	testenv.Eventually(t, soon, func() error {
		if err := relay.Ready(); err == nil || !strings.Contains(err.Error(), "discard policy is old") {
			return errorf("ready says %v", err)
		}
		return nil
	})
	e.Insert(t, "ORDER_PAYMENT")
	e.Insert(t, "ORDER_PAYMENT", "status", "retrying", "generation", 1, "attempt", 4, "republish_at", time.Now())
	testenv.Never(t, 2*time.Second, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages were published", n)
		}
		return nil
	})
	if err := relay.Live(); err != nil {
		t.Errorf("live: %v", err)
	}
	editStream(t, e, "TASKS", func(c *jetstream.StreamConfig) { c.Discard, c.DiscardNewPerSubject = jetstream.DiscardNew, true })
	waitMessages(t, e, 2)
	testenv.Eventually(t, soon, relay.Ready)
}
