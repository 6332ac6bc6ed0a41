package command

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Causes of a handler's context, for context.Cause.
var (
	// ErrCancelled: an operator asked for the task to be cancelled. An error returned now ends it as cancelled;
	// success stays success.
	ErrCancelled = errors.New("task cancelled by an operator")
	// ErrLeaseLost: another worker may hold the task by now. Whatever the handler returns is logged as stale.
	ErrLeaseLost = errors.New("lease lost: the task may run elsewhere by now")
	// ErrStopping: the worker's grace is over. The attempt is not counted.
	ErrStopping = errors.New("worker is stopping")

	errTimeout = errors.New("attempt timed out")
)

// maxDelay bounds what retry.After, Snooze and policies may ask for.
const maxDelay = 24 * time.Hour

// Snooze ends an attempt without using it up: the task is tried again after d, between 0 and 24 h.
// It is for a task that finds its time has not come.
func Snooze(d time.Duration) error { return &snoozeError{delay: d} }

// Cancel ends a task as cancelled, with err as the reason; it is neither retried, compensated nor dead.
// In Compensate it is the same as retry.Permanent: what was done must not look as if it had been called off.
func Cancel(err error) error {
	if err == nil {
		err = errors.New("cancelled by its command")
	}
	return &cancelError{err: err}
}

type snoozeError struct{ delay time.Duration }

func (e *snoozeError) Error() string { return fmt.Sprintf("snoozed for %v", e.delay) }

type cancelError struct{ err error }

func (e *cancelError) Error() string { return e.err.Error() }
func (e *cancelError) Unwrap() error { return e.err }

// Outcomes of an attempt, as task_attempt stores them.
const (
	outcomeSucceeded = "succeeded"
	outcomeFailed    = "failed"
	outcomeTimeout   = "timeout"
	outcomePanic     = "panic"
	outcomeLost      = "lost"
	outcomeSnoozed   = "snoozed"
	outcomeReleased  = "released"
	outcomeCancelled = "cancelled"
	outcomeStale     = "stale"
)

// Classes of an error. A target may give its own by a method ErrorClass() string.
const (
	classDecode       = "decode"
	classTimeout      = "timeout"
	classPanic        = "panic"
	classPermanent    = "permanent"
	classLost         = "lost"
	classResult       = "result"
	classNotCommitted = "not_committed"
	classOther        = "error"
)

type classError struct {
	class string
	err   error
}

func (e *classError) Error() string      { return e.err.Error() }
func (e *classError) Unwrap() error      { return e.err }
func (e *classError) ErrorClass() string { return e.class }

// errorClass returns the class that err names itself, or "".
func errorClass(err error) string {
	var c interface{ ErrorClass() string }
	if errors.As(err, &c) {
		return c.ErrorClass()
	}
	return ""
}

// timedOut reports whether an attempt that returned err ended by its timeout. A handler may wrap the context's
// error, or return one of its own because its context was over.
func timedOut(ctx context.Context, err error) bool {
	return err != nil && errors.Is(context.Cause(ctx), errTimeout)
}
