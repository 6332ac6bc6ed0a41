package command

import (
	"sync"
	"time"
)

// complaints keeps a condition that lasts from filling the log.
type complaints struct {
	mu   sync.Mutex
	last map[string]time.Duration
}

// complain calls log at most once a minute for each subject.
func (w *Worker) complain(subject string, log func()) {
	c, now := &w.complaints, w.now()
	c.mu.Lock()
	if c.last == nil {
		c.last = make(map[string]time.Duration)
	}
	at, ok := c.last[subject]
	due := !ok || now-at >= time.Minute
	if due {
		c.last[subject] = now
	}
	c.mu.Unlock()
	if due {
		log()
	}
}
