package model

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

const (
	runLength = 160
	longest   = 400 // ticks until everything must be finished without faults
)

// A Violation is what a run found, and the steps that lead to it.
type Violation struct {
	Kind, Text string
	Steps      []step
	After      []step // without faults, until it showed
}

func (v *Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n", v.Kind, v.Text)
	for i, s := range v.Steps {
		fmt.Fprintf(&b, "  %3d  %v\n", i+1, s)
	}
	if v.Kind != "lost" && len(v.After) > 0 {
		b.WriteString("       then, without faults:\n")
		for i, s := range v.After {
			fmt.Fprintf(&b, "  %3d  %v\n", len(v.Steps)+i+1, s)
		}
	}
	return b.String()
}

// simulate makes a run by chance, then ends it without faults.
func simulate(p plan, seed uint64) *Violation {
	v, _ := simulated(p, seed)
	return v
}

func simulated(p plan, seed uint64) (*Violation, *world) {
	w := newWorld(p)
	rng := rand.New(rand.NewPCG(seed, 1))
	m := newMood(rng)
	var buf [2][]step
	for range runLength {
		w.choose(rng, m, &buf)
		if w.kind != "" {
			break
		}
	}
	return w.conclude(), w
}

// replay makes the run of the given steps, without those that cannot happen.
func replay(p plan, steps []step) *Violation {
	w := newWorld(p)
	var work, faults []step
	for _, s := range steps {
		if s.op != opTick {
			work, faults = w.steps(work[:0], faults[:0])
			if !slices.Contains(work, s) && !slices.Contains(faults, s) {
				continue
			}
		}
		if w.do(s); w.kind != "" {
			break
		}
	}
	return w.conclude()
}

// conclude ends all faults and lets everything finish, in a fixed order.
func (w *world) conclude() *Violation {
	taken := len(w.trace)
	if w.kind == "" {
		w.finish()
		if w.kind == "" {
			w.checkEnd()
		}
	}
	if w.kind == "" {
		return nil
	}
	return &Violation{w.kind, w.text, w.trace[:taken:taken], w.trace[taken:]}
}

// finish runs without faults: everybody is up and awake, and does whatever there is to do before time goes on.
func (w *world) finish() {
	w.settling = true
	for i, r := range w.relays {
		if r.sleeps = 0; r.name == 0 {
			w.startRelay(i)
		}
	}
	for i, k := range w.workers {
		if k.sleeps = 0; k.name == 0 {
			w.startWorker(i)
		}
	}
	var work []step
	for end := w.now + longest; w.now < end && w.kind == ""; w.now++ {
		for n := 0; w.kind == ""; n++ {
			if work, _ = w.steps(work[:0], nil); len(work) == 0 {
				break
			}
			if n > 5000 {
				w.violated("livelock", "no rest at %d: %v", w.now, work)
				return
			}
			w.do(work[n%len(work)])
		}
		if len(w.db.open) == 0 && w.open() == "" {
			return
		}
	}
}

// shorten leaves out steps as long as the run goes wrong in the same way.
func shorten(p plan, v *Violation) *Violation {
	for size := len(v.Steps) / 2; size > 0; {
		shorter := false
		for at := 0; at+size <= len(v.Steps); {
			rest := slices.Concat(v.Steps[:at], v.Steps[at+size:])
			if s := replay(p, rest); s != nil && s.Kind == v.Kind && len(s.Steps) < len(v.Steps) {
				v, shorter = s, true
				continue
			}
			at += size
		}
		if !shorter || size > 1 {
			size /= 2
		}
	}
	return v
}
