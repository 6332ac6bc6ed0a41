package connect

import (
	"sync"
	"time"
)

// every lets one line through per interval.
type every struct {
	interval time.Duration
	mu       sync.Mutex
	next     time.Time
}

func (e *every) due() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if now.Before(e.next) {
		return false
	}
	e.next = now.Add(e.interval)
	return true
}
