package tests

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// K18, K19: a short delay is left to JetStream, a long one goes through the table; either way the task comes at its time.
func TestShortDelaysAreNakedAndLongOnesGoThroughTheTable(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Statuses(500, 500, 200)...)
	e.StartRelay()
	vars := testenv.Types(
		testenv.HTTPType("SHORT", sink.URL, "STRATEGY", "fixed", "BASE_DELAY", "1500ms"),
		testenv.HTTPType("LONG", sink.URL, "STRATEGY", "fixed", "BASE_DELAY", "2500ms"),
	)
	e.StartWorker(append(vars, "TASKRELAY_WORKER_NAK_MAX=2s")...)
	short, long := e.Insert(t, "SHORT"), e.Insert(t, "LONG")

	r := e.WaitStatus(t, soon, short, "retrying")
	if r.RepublishAt != nil || r.Generation != 0 {
		t.Errorf("short delay: republish_at %v, generation %d, want none and 0", r.RepublishAt, r.Generation)
	}
	r = e.WaitStatus(t, soon, long, "retrying")
	if r.RepublishAt == nil || r.Generation != 1 {
		t.Errorf("long delay: republish_at %v, generation %d, want one and 1", r.RepublishAt, r.Generation)
	}
	e.WaitStatus(t, soon, short, "succeeded")
	r = e.WaitStatus(t, soon, long, "succeeded")
	equal(t, "generation after two hand-backs", r.Generation, 2)

	for id, want := range map[int64]time.Duration{short: 1500 * time.Millisecond, long: 2500 * time.Millisecond} {
		equal(t, "outcomes", outcomes(t, e, id), "[failed failed succeeded]")
		calls := sink.CallsOf(id)
		for i := 1; i < len(calls); i++ {
			if gap := calls[i].At.Sub(calls[i-1].Ended); gap < want-20*time.Millisecond || gap > want+3*time.Second {
				t.Errorf("gap before attempt %d of %d: got %v, want %v", i+1, id, gap, want)
			}
		}
	}
	s, err := e.NATS.JS.Consumer(t.Context(), "TASKS", "SHORT-low")
	if err != nil {
		t.Fatal(err)
	}
	info, err := s.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "MaxDeliver", info.Config.MaxDeliver, -1)
	equal(t, "AckWait", info.Config.AckWait, 3*time.Second)
	if info.Delivered.Consumer != 3 {
		t.Errorf("deliveries of one message that was nak'ed twice: got %d, want 3", info.Delivered.Consumer)
	}
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left in the stream", n)
		}
		return nil
	})
}

// A35, C-026, C-018: the second attempts of tasks that fail together are spread over the jitter's share of the delay,
// none after the delay and none before (1-j) of it.
func TestJitterSpreadsRetries(t *testing.T) {
	t.Parallel()
	const tasks = 200
	e := testenv.New(t)
	var mu sync.Mutex
	second := map[int64]time.Time{}
	var reg command.Registry
	mustRegister(t, &reg, "FAILS", command.Command[struct{}]{
		Concurrency: tasks,
		Retry:       retry.Exponential{Base: 4 * time.Second, Max: 4 * time.Second, Jitter: 0.5},
		Execute: func(_ context.Context, task *command.Task[struct{}]) (any, error) {
			if task.Attempt == 1 {
				return nil, errors.New("no")
			}
			mu.Lock()
			defer mu.Unlock()
			second[task.ID] = time.Now()
			return nil, nil
		},
	})
	e.RunRelay()
	e.RunWorker(&reg)
	insertMany(t, e, "FAILS", tasks)

	e.WaitCount(t, soon, tasks, "SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'failed'")
	planned := map[int64]time.Time{}
	rows, err := e.Pool.Query(t.Context(), `SELECT t.id, t.next_attempt_at, extract(epoch FROM t.next_attempt_at - a.finished_at)::float8
		FROM taskrelay.task AS t JOIN taskrelay.task_attempt AS a ON a.task_id = t.id WHERE t.status = 'retrying'`)
	if err != nil {
		t.Fatal(err)
	}
	early, late := 0, 0
	for rows.Next() {
		var id int64
		var next time.Time
		var delay float64
		if err := rows.Scan(&id, &next, &delay); err != nil {
			t.Fatal(err)
		}
		planned[id] = next
		if delay < 2 || delay > 4 {
			t.Errorf("task %d: planned delay of %.3fs, want 2s to 4s", id, delay)
		}
		if delay < 3 {
			early++
		} else {
			late++
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	if len(planned) < tasks/2 {
		t.Fatalf("%d of %d tasks are waiting for their second attempt", len(planned), tasks)
	}
	if early < len(planned)/4 || late < len(planned)/4 {
		t.Errorf("%d delays in the first half of the spread, %d in the second: want them even", early, late)
	}
	e.WaitNoneOpen(t, soon)

	mu.Lock()
	defer mu.Unlock()
	var latest time.Duration
	for id, next := range planned {
		d := second[id].Sub(next)
		if d < 0 {
			t.Errorf("task %d: second call %v before its time", id, -d)
		}
		latest = max(latest, d)
	}
	t.Logf("the latest second call came %v after its time", latest)
	if latest > time.Second {
		t.Errorf("a second call came %v after its time", latest)
	}
}

// C-017: whatever the attempt number, the next time lies in (now, now + the longest delay].
func TestDelaysOfLateAttemptsDoNotOverflow(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500})
	// The rows get their attempt number before anybody reads them.
	var ids []int64
	for _, attempt := range []int{33, 34, 61, 62, 63, 64, 310, 998} {
		id := e.Insert(t, "ORDER_PAYMENT", "max_attempts", 1000)
		e.Exec(t, "UPDATE taskrelay.task SET attempt = $2 WHERE id = $1", id, attempt)
		ids = append(ids, id)
	}
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "BASE_DELAY", "1s", "MAX_DELAY", "1h")...)
	for _, id := range ids {
		r := e.WaitStatus(t, soon, id, "retrying")
		left := e.Text(t, "SELECT CASE WHEN next_attempt_at > now() + interval '50 min' AND next_attempt_at <= now() + interval '1 h' THEN 'fine' ELSE (next_attempt_at - now())::text END FROM taskrelay.task WHERE id = $1", id)
		equal(t, "next time after attempt "+itoa(int64(r.Attempt)), left, "fine")
		equal(t, "calls", len(sink.CallsOf(id)), 1)
	}
}

// C-118, C30: the limit of the row goes before the worker's, and counts the first attempt.
func TestLimitOnAttempts(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "STRATEGY", "fixed", "BASE_DELAY", "10ms")...)
	ids := map[int64]int{
		e.Insert(t, "ORDER_PAYMENT", "max_attempts", 1): 1,
		e.Insert(t, "ORDER_PAYMENT", "max_attempts", 3): 3,
		e.Insert(t, "ORDER_PAYMENT"):                    10, // the documented default
	}
	for id, want := range ids {
		r := e.WaitStatus(t, soon, id, "dead")
		equal(t, "attempt", r.Attempt, want)
		equal(t, "calls", len(sink.CallsOf(id)), want)
		equal(t, "attempts in the log", len(e.Attempts(t, id)), want)
		equal(t, "reason", text(r.DeadReason), "max_attempts")
	}
}

func mustRegister[P any](t *testing.T, reg *command.Registry, bizType string, c command.Command[P]) {
	t.Helper()
	if err := command.Register(reg, bizType, c); err != nil {
		t.Fatal(err)
	}
}
