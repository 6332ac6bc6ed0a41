package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/taskrelay/taskrelay/internal/text"
)

// slot runs attempts one after another while any is ready.
func (w *Worker) slot(d *dispatcher) {
	defer d.restart() // for a goroutine that a handler ended by runtime.Goexit
	for a := d.next(true); a != nil; a = d.next(false) {
		w.run(a)
	}
}

// run calls the handler of one attempt, and hands what came of it to the settlers.
func (w *Worker) run(a *attempt) {
	d := a.lane.d
	now := w.now()
	if a.lost.Load() || now-time.Duration(a.leaseFrom.Load()) > w.cfg.Lease {
		// The lease has ended while the task waited, or while the answer to the claim did (a paused process, a slow
		// network): another worker may be at it.
		w.log.Warn().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("attempt", a.number).
			Msg("lease ended before the handler was called, left to the next claim")
		w.held.release(a)
		d.dropped(a)
		a.nak(time.Second)
		return
	}
	ctx, cancel := context.WithCancelCause(w.handlers)
	ctx, stop := context.WithTimeoutCause(ctx, d.b.timeout, errTimeout)
	a.started, a.deadline, a.cancel = now, now+d.b.timeout, cancel
	ctx = w.tracer.begin(ctx, a)
	a.stage.Store(stageRunning)
	if a.lost.Load() {
		cancel(ErrLeaseLost)
	}

	var end ending
	returned := false
	defer func() {
		if !returned {
			end = panicked(recover())
		}
		if a.ended.CompareAndSwap(false, true) {
			w.finish(a, end)
		} else {
			w.late(a, end)
		}
		stop()
		cancel(nil)
	}()
	result, err := w.call(ctx, a)
	end = endingOf(ctx, result, err)
	returned = true
}

// call runs the phase's function.
func (w *Worker) call(ctx context.Context, a *attempt) (json.RawMessage, error) {
	b := a.lane.d.b
	if a.phase != PhaseCompensate {
		return b.execute(ctx, a)
	}
	return nil, b.compensate(ctx, a, errors.New(a.cause))
}

// panicked makes a failure of a panic. r is nil when the handler called runtime.Goexit (t.FailNow does).
func panicked(r any) ending {
	e := ending{outcome: outcomePanic, stack: text.Storable(string(debug.Stack()), maxStackText)}
	switch r := r.(type) {
	case nil:
		e.err = errors.New("handler called runtime.Goexit")
	case error:
		e.err = fmt.Errorf("panic: %w", r)
	default:
		e.err = fmt.Errorf("panic: %v", r)
	}
	return e
}

// finish decides what happens to a task whose handler is over. Only who has set a.ended may call it.
func (w *Worker) finish(a *attempt, end ending) {
	d := a.lane.d
	took := w.now() - a.started
	if a.completed.Load() && !end.leaked {
		// If the handler's transaction has committed, the row is final and this matches nothing. If not, the
		// handler must not pass for done.
		if end.err == nil {
			end = ending{outcome: outcomeFailed, err: &classError{class: classNotCommitted,
				err: errors.New("transaction not committed: the handler called Complete, then its transaction was rolled back or left open")}}
		}
	}
	s := decide(a, d.b, end, w.cfg.Lease, a.lane.park)
	s.elapsed = took
	a.endSpan(s)
	a.stage.Store(stageSettling)
	w.settles.put(s)
	d.returned(a, took)
}

// late takes note of a handler that came back after its attempt had been settled for it.
func (w *Worker) late(a *attempt, end ending) {
	w.stats.Late.Add(1)
	e := w.log.Warn().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("attempt", a.number).
		Dur("elapsed", w.now()-a.started)
	if end.err != nil {
		e = e.Str("error", explain(end.err).text)
	}
	e.Msg("handler returned after its attempt had been settled, result discarded")
}

// park reports whether a retry after d may be left to JetStream as a nak, and counts it if so. Parked messages count
// against MaxAckPending, and all workers of the lane share it: a lane full of them stands still.
func (l *lane) park(d time.Duration) bool {
	if d > l.w.cfg.NakMax {
		return false
	}
	if d <= 0 {
		return true
	}
	l.d.mu.Lock()
	workers := max(l.d.set.workers, 1)
	l.d.mu.Unlock()
	return l.parked.add(l.w.now(), d, int(l.maxAckPending.Load())/2/workers)
}

// releaseUnstarted gives back a claimed task whose handler was not called; its attempt is not counted.
func (w *Worker) releaseUnstarted(a *attempt) {
	if !a.ended.CompareAndSwap(false, true) {
		return
	}
	a.stage.Store(stageSettling)
	a.lane.d.unstarted(a)
	w.settles.put(&settlement{a: a, action: actNak, outcome: outcomeReleased, logged: true})
}
