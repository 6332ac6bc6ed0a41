// Package pause paces what is tried again for as long as it takes.
package pause

import (
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Growing returns pauses that grow from the first to the longest and never end, each up to half as long again or shorter.
// [backoff's own default gives up after 15 minutes.]
func Growing(first, longest time.Duration) *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(backoff.WithInitialInterval(first), backoff.WithMaxInterval(longest), backoff.WithMaxElapsedTime(0))
}
