package outbox

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	// firstPatience is what a statement may take at first. A link that takes questions and brings no answers is noticed
	// by nothing else, and should be before the leases of our lanes are long over.
	firstPatience = 5 * time.Second
	// queryTimeout is what a statement may take in the end: a connection that hangs must not hold a loop for ever.
	queryTimeout = 30 * time.Second
	// longestRead is what a read of the lanes may take in the end: see readRows.
	longestRead = 10 * time.Minute
)

// patience says how long each statement may take: more after each time that was not enough, since a statement that is
// ended each time after the same time would never get done, and again less when it gets done sooner.
type patience struct {
	mu   sync.Mutex
	next map[string]time.Duration // by statement, where it is not firstPatience
}

func (p *patience) of(sql string) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d, ok := p.next[sql]; ok {
		return d
	}
	return firstPatience
}

// learn takes note of how a statement ended that had begun then and may take limit in the end.
func (p *patience) learn(sql string, begun time.Time, err error, limit time.Duration) {
	d := p.of(sql)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		d = min(2*d, limit)
	case err == nil:
		d = min(max(firstPatience, 4*time.Since(begun)), limit)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if d == firstPatience {
		delete(p.next, sql)
		return
	}
	if p.next == nil {
		p.next = make(map[string]time.Duration)
	}
	p.next[sql] = d
}

// longest is what any statement may take now.
func (p *patience) longest() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	longest := queryTimeout
	for _, d := range p.next {
		longest = max(longest, d)
	}
	return longest
}

// withPatience runs one statement for as long as it may take, once there is a connection for its loop.
func (r *Relay) withPatience(ctx context.Context, sql string, limit time.Duration, run func(context.Context) error) error {
	leave, err := r.takePlace(ctx)
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, r.patience.of(sql))
	defer cancel()
	begun := time.Now()
	err = run(ctx)
	r.patience.learn(sql, begun, err, limit)
	return err
}
