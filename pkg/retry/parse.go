package retry

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Strategies lists what Parse takes.
func Strategies() []string { return []string{"fixed", "exponential", "random"} }

// Parse makes the policy that configuration describes:
//
//	fixed        base
//	exponential  min(limit, base * 2^(n-1))
//	random       uniform in [base, limit]
//
// Jitter, 0 to 1, shortens the first two. A fixed policy does not use limit,
// a random one does not use jitter. An error begins with the setting it is about
// (STRATEGY, BASE_DELAY, MAX_DELAY or JITTER), so that a caller need only put the
// prefix of its variables before it.
func Parse(strategy string, base, limit time.Duration, jitter float64) (Policy, error) {
	if known := Strategies(); !slices.Contains(known, strategy) {
		return nil, fmt.Errorf("STRATEGY %q: want one of %s", strategy, strings.Join(known, ", "))
	}
	if base <= 0 {
		return nil, fmt.Errorf("BASE_DELAY %v: want a time above 0, such as 5s or 1m30s", base)
	}
	if strategy != "fixed" && limit < base {
		return nil, fmt.Errorf("MAX_DELAY %v: want a time not below BASE_DELAY (%v), such as 1h", limit, base)
	}
	if !(jitter >= 0 && jitter <= 1) { // so written, NaN is refused too
		return nil, fmt.Errorf("JITTER %v: want a number from 0 to 1, such as 0.2", jitter)
	}
	switch strategy {
	case "fixed":
		return Fixed{Base: base, Jitter: jitter}, nil
	case "random":
		return Random{Min: base, Max: limit}, nil
	}
	return Exponential{Base: base, Max: limit, Jitter: jitter}, nil
}
