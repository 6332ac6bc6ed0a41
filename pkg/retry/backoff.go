package retry

import (
	"time"

	"github.com/cenkalti/backoff/v4"
)

// maxSteps is where FromBackOff stops counting: no task has more attempts.
const maxSteps = 1000

// FromBackOff makes a Policy of a cenkalti/backoff: after n failures the wait is
// what the n-th NextBackOff of a fresh backoff gives (n up to 1,000). newBackOff
// is called for each delay, because a backoff counts its own calls and a Policy
// must not.
//
// How many attempts a task gets is not the backoff's to say: where it answers
// backoff.Stop, the last delay before that stays (a Zero Exponential's, if there
// is none). An ExponentialBackOff adds its random part after the maximum; here
// MaxInterval is kept.
func FromBackOff(newBackOff func() backoff.BackOff) Policy {
	if newBackOff == nil {
		panic("retry: FromBackOff of a nil function")
	}
	return PolicyFunc(func(n int) time.Duration {
		b := newBackOff()
		b.Reset()
		last := backoff.Stop
		for range min(n, maxSteps) {
			d := b.NextBackOff()
			if d < 0 { // backoff.Stop, or a Stop of the user's own
				break
			}
			last = d
		}
		if last < 0 {
			return Exponential{}.Delay(n)
		}
		if e, ok := b.(*backoff.ExponentialBackOff); ok && e.MaxInterval > 0 {
			last = min(last, e.MaxInterval)
		}
		return last
	})
}
