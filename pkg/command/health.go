package command

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Stats counts what a worker has met since it started. All fields are safe to read at any time.
type Stats struct {
	Claimed    atomic.Int64 // attempts claimed
	Succeeded  atomic.Int64 // attempts that ended without error
	Failed     atomic.Int64 // attempts that ended with an error, a panic or a timeout
	Dead       atomic.Int64 // tasks that ended dead
	Leaked     atomic.Int64 // handlers that outlived their timeout by a lease
	Stale      atomic.Int64 // results that came after their lease had been lost
	Lost       atomic.Int64 // attempts of other workers whose lease had ended
	Released   atomic.Int64 // attempts given back uncounted
	Foreign    atomic.Int64 // messages of another installation
	Terminated atomic.Int64 // messages that stand for no row
	Newer      atomic.Int64 // messages newer than their row: the database has lost its end
	Refused    atomic.Int64 // results that Postgres would not store
	Late       atomic.Int64 // handlers that returned after their attempt had been settled for them
}

// Stats returns the worker's counters.
func (w *Worker) Stats() *Stats { return &w.stats }

// stalled is how long a loop may make no turn before the process counts as hung.
const stalled = 30 * time.Second

// health keeps what is wrong at the moment, by part.
type health struct {
	mu       sync.Mutex
	problems map[string]problem
}

type problem struct {
	err   error
	until time.Duration // 0: until it is cleared
}

func (h *health) set(part string, err error, until time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.problems == nil {
		h.problems = make(map[string]problem)
	}
	h.problems[part] = problem{err: err, until: until}
}

func (h *health) clear(part string) {
	h.mu.Lock()
	delete(h.problems, part)
	h.mu.Unlock()
}

func (h *health) check(now time.Duration) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for part, p := range h.problems {
		if p.until > 0 && now > p.until {
			delete(h.problems, part)
			continue
		}
		errs = append(errs, fmt.Errorf("%s: %w", part, p.err))
	}
	return errors.Join(errs...)
}

var errNotRunning = errors.New("worker is not running")

// Live returns nil while the worker's loops go round, whatever its dependencies do; else what stands still.
// A process that is not live should be restarted.
func (w *Worker) Live() error {
	if !w.started.Load() {
		return nil // about to start
	}
	if w.finished.Load() {
		return errNotRunning
	}
	// A worker that waits for its servers to start is alive too: see await.
	now := w.now()
	for name, at := range map[string]*atomic.Int64{"sweep": &w.sweptAt, "heartbeat": &w.beatAt} {
		if idle := now - time.Duration(at.Load()); idle > stalled {
			return fmt.Errorf("%s loop has made no turn for %v", name, idle.Round(time.Second))
		}
	}
	return nil
}

// Ready returns nil while the worker can do work: Postgres and NATS answer, the stream is there and ours, claims and
// settles get through, and no message of another installation has come within a minute. Else it says what is wrong.
func (w *Worker) Ready() error {
	if !w.running.Load() {
		if err := w.health.check(w.now()); err != nil && !w.finished.Load() {
			return fmt.Errorf("worker waits to start: %w", err)
		}
		return errNotRunning
	}
	if !w.nc.IsConnected() {
		return fmt.Errorf("nats: not connected (%s)", w.nc.Status())
	}
	return w.health.check(w.now())
}
