// Package retry says how long to wait after a failed attempt, and lets a
// failure say that it wants no further attempt, or a later one.
//
// Properties:
//   - A policy is a pure function of the number of failed attempts (and of
//     chance, where there is jitter). It keeps no state, so that any worker on
//     any node can ask it.
//   - The policies of this package never give a negative delay, never overflow
//     and never give more than their Max, whatever number they are asked for.
//   - Jitter only shortens a delay: the figure that is configured is the longest
//     wait.
//
// How to use it: put a Policy in a command, or write one as a PolicyFunc. A
// handler returns Permanent(err) to give up at once and After(d, err) to choose
// the delay itself.
package retry

import (
	"cmp"
	"math/rand/v2"
	"time"
)

// Defaults of the policies' zero values.
const (
	DefaultBase      = 5 * time.Second
	DefaultFixedBase = 60 * time.Second
	DefaultMax       = time.Hour
)

// Policy says how long to wait before the next attempt.
type Policy interface {
	// Delay returns the wait after n failed attempts, n >= 1. It must be safe
	// for use by several goroutines.
	Delay(n int) time.Duration
}

// PolicyFunc makes a Policy of a function. The function is never called with a
// number below 1, and a negative result counts as no wait.
type PolicyFunc func(n int) time.Duration

// Delay calls f.
func (f PolicyFunc) Delay(n int) time.Duration { return max(0, f(max(1, n))) }

// Fixed waits the same time after every failure.
type Fixed struct {
	Base   time.Duration // By default 60s.
	Jitter float64       // Optional, 0 to 1: the wait is uniform in [(1-Jitter)*Base, Base].
}

// Delay returns Base, shortened by the jitter.
func (p Fixed) Delay(int) time.Duration {
	return Jitter(defaultTo(p.Base, DefaultFixedBase), p.Jitter)
}

// Exponential doubles the wait with each failure: min(Max, Base * 2^(n-1)).
// Base 5s gives 5s, 10s, 20s, 40s and so on up to Max.
type Exponential struct {
	Base   time.Duration // By default 5s.
	Max    time.Duration // By default one hour. A Max below Base wins over Base.
	Jitter float64       // Optional, 0 to 1: the wait is uniform in [(1-Jitter)*d, d].
}

// Delay returns the wait after n failures, shortened by the jitter.
func (p Exponential) Delay(n int) time.Duration {
	base, limit := defaultTo(p.Base, DefaultBase), defaultTo(p.Max, DefaultMax)
	shift := max(1, n) - 1
	d := limit
	// Compared on the right-hand side: 1s << 34 is negative, 1s << 62 is 0.
	if shift < 63 && base <= limit>>shift {
		d = base << shift
	}
	return Jitter(d, p.Jitter)
}

// Random waits a time chosen anew after each failure, uniform in [Min, Max].
type Random struct {
	Min time.Duration // By default 5s.
	Max time.Duration // By default one hour. A Max below Min wins over Min.
}

// Delay returns a time in [Min, Max].
func (p Random) Delay(int) time.Duration {
	limit := defaultTo(p.Max, DefaultMax)
	low := min(defaultTo(p.Min, DefaultBase), limit)
	return low + upTo(limit-low)
}

// Jitter shortens d by chance: the result is uniform in [(1-j)*d, d]. It is for
// policies of your own. j below 0 (and NaN) counts as 0, j above 1 as 1; a
// negative d gives 0.
func Jitter(d time.Duration, j float64) time.Duration {
	d = max(0, d)
	switch {
	case j >= 1:
		return upTo(d)
	case j > 0:
		// j < 1 is at most 1 - 2^-53, so that the product stays below 2^63.
		return d - upTo(min(d, time.Duration(float64(d)*j)))
	}
	return d
}

// upTo returns a time uniform in [0, d], both ends included.
func upTo(d time.Duration) time.Duration {
	return time.Duration(rand.Uint64N(uint64(d) + 1))
}

// defaultTo returns d, or the default where d is not above 0: a delay of nothing
// would be a loop without a pause.
func defaultTo(d, def time.Duration) time.Duration {
	return cmp.Or(max(0, d), def)
}
