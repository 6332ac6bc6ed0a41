package retry

import (
	"errors"
	"time"
)

// Permanent marks err as final: no further attempt is made, however many are
// left. Permanent(nil) is nil, so that `return retry.Permanent(f())` succeeds
// when f does. errors.Is and errors.As see err.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

// IsPermanent tells whether err, or an error that it wraps, came from Permanent.
// It wins over After.
func IsPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

// After says that the next attempt is to come after d, whatever the policy says;
// an attempt is used up all the same. A negative d counts as 0. After(d, nil) is
// nil. errors.Is and errors.As see err.
func After(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &afterError{max(0, d), err}
}

// AfterDelay returns the delay that err, or an error that it wraps, got from
// After; the outermost counts.
func AfterDelay(err error) (time.Duration, bool) {
	var a *afterError
	if !errors.As(err, &a) {
		return 0, false
	}
	return a.delay, true
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

type afterError struct {
	delay time.Duration
	err   error
}

func (e *afterError) Error() string { return e.err.Error() }
func (e *afterError) Unwrap() error { return e.err }
