package outbox

import (
	"slices"
	"time"
)

// A pace keeps polls apart, so that a database that answers slowly is not kept busy by them. It goes by the quickest of
// the last polls: one slow poll (a checkpoint, a core taken by somebody else) says nothing about the next, and must not
// make tasks wait four times as long as it took.
type pace struct {
	took [8]time.Duration
	next int
}

func (p *pace) note(took time.Duration) {
	p.took[p.next%len(p.took)] = took
	p.next++
}

// cost is what a poll takes: zero before the first.
func (p *pace) cost() time.Duration {
	n := min(p.next, len(p.took))
	if n == 0 {
		return 0
	}
	return min(slices.Min(p.took[:n]), 250*time.Millisecond)
}
