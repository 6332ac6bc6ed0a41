package tests

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// calls counts the calls of each task of a type, and how many run at once.
type calls struct {
	mu         sync.Mutex
	byTask     map[int64]int
	open, most int
}

func (c *calls) command(work time.Duration) command.Command[struct{}] {
	c.byTask = map[int64]int{}
	return command.Command[struct{}]{
		Concurrency: 20,
		Execute: func(ctx context.Context, task *command.Task[struct{}]) (any, error) {
			c.mu.Lock()
			c.byTask[task.ID]++
			c.open++
			c.most = max(c.most, c.open)
			c.mu.Unlock()
			select {
			case <-time.After(work):
			case <-ctx.Done():
			}
			c.mu.Lock()
			c.open--
			c.mu.Unlock()
			return nil, nil
		},
	}
}

func (c *calls) total() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.byTask {
		n += k
	}
	return n
}

func (c *calls) waitTotal(t *testing.T, n int) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		if got := c.total(); got < n {
			return errorf("%d calls, want %d", got, n)
		}
		return nil
	})
}

// pauseType pauses a type by the function and waits until its consumers are paused too.
func pauseType(t *testing.T, e *testenv.Env, bizType string) {
	t.Helper()
	e.Exec(t, `SELECT * FROM taskrelay.pause($1, 'test')`, bizType)
	waitPaused(t, e, bizType, true)
}

func resumeType(t *testing.T, e *testenv.Env, bizType string) {
	t.Helper()
	e.Exec(t, `SELECT * FROM taskrelay.resume($1, 'test')`, bizType)
}

func waitPaused(t *testing.T, e *testenv.Env, bizType string, want bool) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		for _, p := range []string{"high", "low"} {
			info, err := consumerInfo(t, e, outbox.Names{}.Consumer(bizType, p))
			if err != nil {
				return err
			}
			if info.Paused != want {
				return errorf("consumer %s is paused: %v, want %v", info.Name, info.Paused, want)
			}
		}
		return nil
	})
}

func consumerInfo(t *testing.T, e *testenv.Env, name string) (*jetstream.ConsumerInfo, error) {
	t.Helper()
	c, err := e.NATS.JS.Consumer(t.Context(), "TASKS", name)
	if err != nil {
		return nil, err
	}
	return c.CachedInfo(), nil
}

// lanePlace is where a lane has been read to, as its relay has saved it.
func lanePlace(t *testing.T, e *testenv.Env, bizType string) string {
	t.Helper()
	return e.Text(t, `SELECT string_agg(concat_ws(' ', priority, snapshot, at, round_snapshot, key_xid, key_id, max_seq), '; ' ORDER BY priority)
		FROM taskrelay.lane WHERE biz_type = $1`, bizType)
}

// A flood is paused in its midst and resumed: nothing is published or delivered meanwhile, another type goes on, and in
// the end each task was called once. Two relays share the lanes.
func TestPausedFloodLosesNothing(t *testing.T) {
	t.Parallel()
	const flood = 2000
	e := testenv.New(t)
	var flooded, other calls
	var reg command.Registry
	mustRegister(t, &reg, "FLOOD", flooded.command(100*time.Millisecond)) // so that the flood outlasts the pause by seconds
	mustRegister(t, &reg, "OTHER", other.command(0))
	small := func(c *outbox.RelayConfig) { c.MaxPerSubject = 500 } // most of the flood waits in the table
	e.RunRelay(small)
	e.RunRelay(small)
	e.RunWorker(&reg)
	insertMany(t, e, "FLOOD", flood)
	flooded.waitTotal(t, 100)
	pauseType(t, e, "FLOOD")

	// What workers held is finished, and positions of what is out are saved; then nothing moves any more. (Messages that
	// a worker has given back stay with the paused consumer.)
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.task WHERE status = 'running'`)
	var stopped int
	var place string
	testenv.Eventually(t, soon, func() error {
		was, at := place, stopped
		place, stopped = lanePlace(t, e, "FLOOD"), flooded.total()
		timer := time.NewTimer(500 * time.Millisecond)
		<-timer.C
		if place != was || stopped != at {
			return errorf("position %s, %d calls: still moving", place, stopped)
		}
		return nil
	})
	if stopped >= flood {
		t.Fatalf("the flood was over before it was paused")
	}
	messages := e.NATS.Messages(t, "TASKS")
	e.Insert(t, "FLOOD", "priority", "high")
	e.Exec(t, `SELECT taskrelay.run_now($1::bigint, 'test')`, e.Insert(t, "FLOOD", "run_at", time.Now().Add(time.Hour))) // on the work list
	for i := range 20 {
		e.Insert(t, "OTHER")
		other.waitTotal(t, i+1)
	}
	testenv.Never(t, 1500*time.Millisecond, func() error {
		if n := flooded.total(); n != stopped {
			return errorf("%d tasks of the paused type were started", n-stopped)
		}
		return nil
	})
	equal(t, "the paused lanes' positions", lanePlace(t, e, "FLOOD"), place)
	equal(t, "messages in the stream", e.NATS.Messages(t, "TASKS"), messages)
	equal(t, "delivery of the new one", e.Text(t, `SELECT delivery FROM taskrelay.task_view WHERE biz_type = 'FLOOD' ORDER BY id DESC LIMIT 1`), "paused")

	resumeType(t, e, "FLOOD")
	e.WaitNoneOpen(t, soon)
	equal(t, "calls", flooded.total(), flood+2)
	flooded.mu.Lock()
	equal(t, "tasks called", len(flooded.byTask), flood+2)
	flooded.mu.Unlock()
	noDoubleSuccess(t, e)
	equal(t, "audited", e.Text(t, `SELECT string_agg(action || ' ' || biz_type || ' ' || reason, ', ' ORDER BY id) FROM taskrelay.audit
		WHERE action IN ('pause', 'resume')`), "pause FLOOD test, resume FLOOD test")
}

// A pause outlives relay, worker and stream: consumers that are made anew are made paused.
func TestPauseSurvivesRestartsAndALostStream(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var all calls
	var reg command.Registry
	mustRegister(t, &reg, "HELD", all.command(0))
	relay := e.RunRelay(quick)
	worker := e.RunWorker(&reg)
	e.Insert(t, "HELD")
	all.waitTotal(t, 1)
	pauseType(t, e, "HELD")
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, priority) SELECT 'HELD', p FROM generate_series(1, 50), (VALUES ('high'), ('low')) AS x (p)`)

	relay.Stop()
	worker.Stop()
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	e.RunWorker(&reg) // before the relay: it makes the consumers, and knows from the table that they are paused
	e.RunRelay(quick)
	waitPaused(t, e, "HELD", true)
	testenv.Never(t, time.Second, func() error {
		if n := all.total(); n != 1 {
			return errorf("%d tasks of the paused type were called", n-1)
		}
		return nil
	})
	equal(t, "messages of the paused type", e.NATS.Messages(t, "TASKS"), 0)
	resumeType(t, e, "HELD")
	all.waitTotal(t, 101)
	e.WaitNoneOpen(t, soon)
	waitPaused(t, e, "HELD", false)
	noDoubleSuccess(t, e)
}

// A consumer that a person has paused with the nats CLI is left to that person.
func TestConsumerPausedByHandIsLeft(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var all calls
	var reg command.Registry
	mustRegister(t, &reg, "HELD", all.command(0))
	relay := e.RunRelay(quick)
	e.RunWorker(&reg)
	e.Insert(t, "HELD")
	all.waitTotal(t, 1)
	until := time.Now().Add(time.Hour)
	if _, err := e.NATS.JS.PauseConsumer(t.Context(), "TASKS", "HELD-low", until); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if !strings.Contains(relay.Logs(), "paused by hand, left as it is") {
			return errorf("the relay has not said so")
		}
		return nil
	})
	info, err := consumerInfo(t, e, "HELD-low")
	if err != nil || !info.Paused || !info.Config.PauseUntil.Equal(until.UTC()) {
		t.Errorf("got %+v, %v, want it paused until %v", info, err, until)
	}
}

// B52, B56: with strict types an unknown one is not published, and both sides say so.
func TestStrictTypesAreNotPublishedAndReported(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `SELECT * FROM taskrelay.set_strict_types(true, 'production')`)
	e.Exec(t, `SELECT * FROM taskrelay.set_type('KNOWN', '{}', 'its worker comes tomorrow', add => true)`)
	relay := e.RunRelay()
	e.Insert(t, "KNOWN")
	e.Insert(t, "UNKNOWN") // a plain INSERT is not refused
	waitMessages(t, e, 1)
	if _, err := e.Pool.Exec(t.Context(), `SELECT taskrelay.enqueue('UNKNOWN')`); err == nil {
		t.Error("enqueue took an unknown type")
	}
	testenv.Eventually(t, soon, func() error {
		if !strings.Contains(relay.Logs(), `"biz_type":"UNKNOWN","count":1`) {
			return errorf("not reported: %s", relay.Logs())
		}
		return nil
	})
	equal(t, "messages", e.NATS.Messages(t, "TASKS"), 1)
	equal(t, "refused in the view types", e.Text(t, `SELECT string_agg(biz_type, ',') FROM taskrelay.types WHERE refused`), "UNKNOWN")
	e.Exec(t, `SELECT * FROM taskrelay.set_type('UNKNOWN', '{"known": true}', 'it is ours')`)
	waitMessages(t, e, 2)
}

// The rate holds over any stretch of messages, counted by the server's own times, and for one type alone.
func TestPublishRateIsKept(t *testing.T) {
	t.Parallel()
	const rate, n = 150, 600
	e := testenv.New(t)
	e.Exec(t, `SELECT * FROM taskrelay.set_type('SLOW', '{"rate": 150}', 'the bank asked for it', add => true)`)
	e.RunRelay()
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, priority) SELECT 'SLOW', CASE WHEN i % 2 = 0 THEN 'high' ELSE 'low' END FROM generate_series(1, $1) AS i`, n)
	s := e.NATS.WaitStream(t, "TASKS")
	testenv.Eventually(t, soon, func() error {
		if e.NATS.Messages(t, "TASKS") == 0 {
			return errorf("nothing published")
		}
		return nil
	})
	id := e.Insert(t, "QUICK")
	testenv.Eventually(t, soon, func() error {
		_, err := s.GetLastMsgForSubject(t.Context(), "tasks.QUICK.low")
		return err
	})
	if got := e.NATS.Messages(t, "TASKS"); got >= n {
		t.Errorf("task %d of another type waited for %d tasks of the limited one", id, got)
	}
	waitMessages(t, e, n+1)
	var times []time.Time
	for seq := uint64(1); seq <= n+1; seq++ {
		m, err := s.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		if m.Subject != "tasks.QUICK.low" {
			times = append(times, m.Time)
		}
	}
	// A window of two seconds' worth. A stall of the machine may make one slower, nothing may make one faster; a burst
	// after a stall is at most a fifth of a second's.
	const window = 2 * rate
	best := 0.0
	for i := 0; i+window < len(times); i++ {
		got := window / times[i+window].Sub(times[i]).Seconds()
		if got > 1.1*rate+0.2*rate/2 {
			t.Fatalf("messages %d to %d went out at %.0f a second, want %d", i, i+window, got, rate)
		}
		best = max(best, min(got, rate))
	}
	if best < 0.9*rate {
		t.Errorf("at most %.0f a second, want %d", best, rate)
	}
}

// The concurrency of a type holds over both its lanes and all workers, and neither lane starves.
func TestConcurrencyHoldsOverLanesAndWorkers(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var all calls
	var reg command.Registry
	mustRegister(t, &reg, "FEW", all.command(20*time.Millisecond))
	e.Exec(t, `SELECT * FROM taskrelay.set_type('FEW', '{"concurrency": 4}', 'the bank has four lines', add => true)`)
	e.RunRelay()
	e.RunWorker(&reg)
	e.RunWorker(&reg)
	const each = 40
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, priority) SELECT 'FEW', p FROM generate_series(1, $1), (VALUES ('high'), ('low')) AS x (p)`, each)
	e.WaitNoneOpen(t, soon)
	all.mu.Lock()
	most := all.most
	all.mu.Unlock()
	equal(t, "most calls at once", most, 4)
	equal(t, "calls", all.total(), 2*each)
}

// A consumer that was paused gets its share back, whatever paused it: the other lane's turn where one task at a time may
// run, or an operator. The server ignores pause_until in an update, so a share alone would not end the pause.
func TestLimitedTypeGoesOnAfterEachPause(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var all calls
	var reg command.Registry
	mustRegister(t, &reg, "ONE", all.command(time.Millisecond))
	var busy calls
	mustRegister(t, &reg, "BUSY", busy.command(200*time.Millisecond))
	for _, bizType := range []string{"ONE", "BUSY"} {
		e.Exec(t, `SELECT * FROM taskrelay.set_type($1, '{"concurrency": 1}', 'the bank has one line', add => true)`, bizType)
	}
	e.RunRelay(quick)
	e.RunWorker(&reg)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, priority) SELECT 'BUSY', 'high' FROM generate_series(1, 500)`)
	both := func() {
		e.Exec(t, `INSERT INTO taskrelay.task (biz_type, priority) SELECT 'ONE', p FROM generate_series(1, 3), (VALUES ('high'), ('low')) AS x (p)`)
	}
	none := func() {
		t.Helper()
		e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'ONE' AND finished_at IS NULL`)
	}
	both()
	none()
	e.WaitCount(t, soon, 1, `SELECT least(count(*), 1) FROM taskrelay.task WHERE biz_type = 'BUSY' AND status = 'succeeded'`)
	low := e.Insert(t, "BUSY")
	pauseType(t, e, "ONE")
	both()
	resumeType(t, e, "ONE")
	none()
	all.mu.Lock()
	equal(t, "most calls at once", all.most, 1)
	all.mu.Unlock()
	equal(t, "calls", all.total(), 12)

	// High always has another task here, and low has its turn all the same.
	e.WaitStatus(t, soon, low, "succeeded")
	if n := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'BUSY' AND finished_at IS NULL`); n == 0 {
		t.Error("low came last")
	}
	busy.mu.Lock()
	equal(t, "most calls at once of the busy type", busy.most, 1)
	busy.mu.Unlock()
}
