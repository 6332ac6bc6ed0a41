package command

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/taskrelay/taskrelay/internal/pause"
	"github.com/taskrelay/taskrelay/internal/pg"
)

// Parts of the worker whose troubles Ready reports.
const (
	partClaim  = "claim"
	partSettle = "settle"
	partStale  = "log stale attempt"
)

// firstPatience is what a try may take at first. A link that takes questions and brings no answers is noticed by nothing
// else, and our statements take milliseconds.
const firstPatience = 5 * time.Second

// longestPatience is what a try may take in the end: a connection that hangs must not hold a batch for ever.
func (w *Worker) longestPatience() time.Duration { return max(w.cfg.Lease, 30*time.Second) }

// insist runs f with backoff until it is answered, or until ctx ends after a failure. A try is not cut off by ctx:
// a claim or a settle whose answer nobody reads costs a lease.
// Postgres being away marks nothing as failed.
func (w *Worker) insist(ctx context.Context, part string, f func(context.Context) error) error {
	return w.insistFor(ctx, part, firstPatience, f)
}

// insistFor is insist whose first try may take that long. Each that was cut off lets the next one take twice as long: a
// statement that is ended each time after the same time would never get done.
func (w *Worker) insistFor(ctx context.Context, part string, patience time.Duration, f func(context.Context) error) error {
	retry := pause.Growing(50*time.Millisecond, 2*time.Second)
	for failures := 0; ; failures++ {
		err := w.try(patience, f)
		if errors.Is(err, context.DeadlineExceeded) {
			patience = min(2*patience, w.longestPatience())
		}
		if err == nil {
			if failures > 0 {
				w.health.clear(part)
				w.log.Info().Int("count", failures).Msg(part + " works again")
			}
			return nil
		}
		if (part == partSettle || part == partStale) && refused(err) {
			w.health.clear(part)
			return err // an answer: the settler splits the batch
		}
		if w.background.Err() != nil {
			return w.background.Err()
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if part == partSettle {
			w.meter.failedTries.Add(1)
		}
		w.health.set(part, err, 0)
		if failures%20 == 0 {
			w.log.Warn().Err(err).Int("count", failures+1).Msg(part + " failed, trying again")
		}
		sleep(ctx, retry.NextBackOff())
	}
}

// try bounds one try.
func (w *Worker) try(patience time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(w.background, patience)
	defer cancel()
	return f(ctx)
}

// refused reports whether Postgres refused a value: data exception (22), integrity violation (23) or beyond one of its
// limits (54).
func refused(err error) bool {
	code := pg.Code(err)
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "23") || strings.HasPrefix(code, "54")
}

// sleep waits for d or the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
