package model

import (
	"fmt"
	"strings"
)

// checkCall is what must hold whenever the system downstream is called. A claim that a failover has undone excuses it:
// nobody can know.
func (w *world) checkCall(a *attempt) {
	if a.call.undone {
		return
	}
	r := w.db.rows[a.task]
	switch {
	case r == nil:
		w.violated("gone", "task %d is called and does not exist", a.uid)
	case r.uid != a.uid:
		w.violated("foreign", "row %d of task %d is run with the payload of task %d", a.task, r.uid, a.uid)
	case r.status.final():
		w.violated("after the end", "task %d is called and is %v", a.uid, r.status)
	case r.generation != a.generation:
		w.violated("old message", "task %d of generation %d is called by a message of generation %d", a.uid, r.generation, a.generation)
	}
	for _, c := range w.calls {
		if c.uid == a.uid && c.open && !c.undone && c.leaseUntil >= w.now {
			w.violated("overlap", "task %d is called at %d while a call of it runs under a lease until %d", a.uid, w.now, c.leaseUntil)
		}
	}
}

// open tells what is not finished, "" if all is.
func (w *world) open() string {
	var open []string
	w.db.each(func(r *row) {
		switch {
		case !r.status.final():
			open = append(open, fmt.Sprintf("task %d is %v", r.uid, r.status))
		case r.status == dead && !r.lettered:
			open = append(open, fmt.Sprintf("the death of task %d is not told", r.uid))
		}
	})
	return strings.Join(open, ", ")
}

// checkEnd is what must hold when everything is finished.
func (w *world) checkEnd() {
	if open := w.open(); open != "" {
		w.violated("lost", "without faults, after %d ticks: %s", longest, open)
		return
	}
	if w.failedOver { // letters and attempts of what never was
		return
	}
	w.db.each(func(r *row) {
		l, ok := w.stream.letters[r.uid]
		switch {
		case r.status == dead && (!ok || l.generation != r.generation):
			w.violated("letter", "task %d died in generation %d, its dead letter is of generation %d", r.uid, r.generation, l.generation)
		case r.status != dead && ok && !w.relayDied: // one that dies behind its publish leaves the letter to doctor
			w.violated("letter", "task %d is %v and has a dead letter", r.uid, r.status)
		}
	})
	called := map[int]int{}
	for _, c := range w.calls {
		if called[c.token]++; called[c.token] > 1 {
			w.violated("log", "two calls of task %d under lease %d", c.uid, c.token)
		}
		if _, ok := w.db.log[c.token]; !ok {
			w.violated("log", "the call of task %d under lease %d is not in the attempt log", c.uid, c.token)
		}
	}
	for token, l := range w.db.log {
		if l.outcome != "lost" && called[token] == 0 {
			w.violated("log", "attempt of task %d under lease %d is logged as %s and was no call", l.uid, token, l.outcome)
		}
	}
}
