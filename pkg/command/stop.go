package command

import (
	"context"
	"sync"
	"time"
)

const (
	// heedWait is what handlers get to heed a cancelled context at the end of the grace.
	heedWait = 2 * time.Second
	// answerWait is what the last settles get after that.
	answerWait = 3 * time.Second
)

type stopper struct {
	endFetching, endClaiming context.CancelFunc
	lanes, claims            *sync.WaitGroup
}

// stop gives back what has not begun, lets what has begun finish within the grace, cancels the rest and hands it
// back uncounted. Settles go on meanwhile, with a context that is not cancelled: finished work is written down.
func (w *Worker) stop(s stopper) {
	deadline := w.now() + w.cfg.Grace
	var ready []*attempt
	for _, d := range w.dispatchers {
		ready = append(ready, d.stop()...)
	}
	s.endFetching()
	s.endClaiming()
	for _, a := range ready {
		w.releaseUnstarted(a)
	}
	// A claim in flight is answered and its tasks are released; what no claimer took is given back, and so is what
	// the server had already sent.
	waitFor(s.claims, max(deadline-w.now(), heedWait))
	for _, a := range w.claims.drain() {
		a.nak(0)
	}
	waitFor(s.lanes, heedWait)

	if !w.waitUntil(deadline, func() bool { return w.held.len() == 0 }) {
		w.cancelHandlers(ErrStopping)
		if !w.waitUntil(w.now()+heedWait, func() bool { return w.held.len() == 0 }) {
			w.abandon()
			w.waitUntil(w.now()+answerWait, func() bool { return w.held.len() == 0 })
		}
	}
	if n := w.held.len(); n > 0 {
		w.log.Error().Int("count", n).Msg("worker stops with attempts that could not be settled: their leases end and they count as lost")
	}
}

// abandon hands back the tasks of handlers that ignore their context.
func (w *Worker) abandon() {
	for _, a := range w.held.appendAll(nil) {
		if a.stage.Load() != stageRunning || !a.ended.CompareAndSwap(false, true) {
			continue
		}
		w.log.Error().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("attempt", a.number).
			Dur("elapsed", w.now()-a.started).Msg("handler ignores its context at the end of the grace, task handed back")
		w.finish(a, ending{err: ErrStopping, outcome: outcomeFailed, stopped: true})
	}
}

// waitUntil looks every few milliseconds whether done holds, until the deadline.
func (w *Worker) waitUntil(deadline time.Duration, done func() bool) bool {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		if w.now() >= deadline {
			return false
		}
		<-tick.C
	}
	return true
}

// farewell takes the worker off the list and gets its last answers out.
func (w *Worker) farewell() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	w.sayGone(ctx)
	if err := w.nc.FlushWithContext(ctx); err != nil {
		w.log.Warn().Err(err).Msg("last answers may not have reached the server: their messages come again and are dropped")
	}
}

// waitFor waits for g, but no longer than limit.
func waitFor(g *sync.WaitGroup, limit time.Duration) {
	done := make(chan struct{})
	go func() {
		g.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}
