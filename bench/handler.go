package main

import (
	"errors"
	"strings"
	"sync/atomic"
	"time"
)

// payload is the body of every task: about 256 bytes of JSON.
type payload struct {
	N   int    `json:"n"` // negative while warming up
	Pad string `json:"pad"`
}

// pad brings a payload to about 256 bytes.
var pad = strings.Repeat("taskrelay beside river, ", 9) + "0123456789abcdef"

// counter is the handler of both systems: it does nothing but count.
type counter struct {
	fail     bool
	done     atomic.Int64
	target   atomic.Int64
	first    chan struct{} // closed when one is handled
	reached  chan struct{} // closed at target
	arrivals []int64       // wall clock in ns, by payload.N
}

func newCounter(cfg childConfig) *counter {
	return &counter{fail: cfg.Fail, arrivals: make([]int64, cfg.Timed), first: make(chan struct{}), reached: make(chan struct{})}
}

// expect sets after how many tasks reached is closed. Nothing may be running.
func (c *counter) expect(n int64) {
	c.first, c.reached = make(chan struct{}), make(chan struct{})
	c.done.Store(0)
	c.target.Store(n)
}

var errFifth = errors.New("each fifth task fails once")

func (c *counter) handle(p payload, attempt int) error {
	if p.N >= 0 && p.N < len(c.arrivals) {
		atomic.StoreInt64(&c.arrivals[p.N], time.Now().UnixNano())
	}
	if c.fail && attempt == 1 && p.N%5 == 0 {
		return errFifth
	}
	n := c.done.Add(1)
	if n == 1 {
		close(c.first)
	}
	if n == c.target.Load() {
		close(c.reached)
	}
	return nil
}
