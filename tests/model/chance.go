package model

import (
	"math/rand/v2"
	"slices"
)

// A mood is how chance treats one run: which faults there are, how many, and what is slow. Runs that differ in this find
// more than runs that all have a little of everything.
type mood struct {
	faults, ticks int    // percent of the steps
	often         op     // the fault that happens most
	never         uint64 // a bit for each op that does not happen
	slow          uint64 // that mostly waits
}

func newMood(rng *rand.Rand) mood {
	return mood{faults: 3 + rng.IntN(18), ticks: 4 + rng.IntN(20), often: opCancel + op(rng.IntN(int(opFailOver-opCancel)+1)), never: rng.Uint64() >> opRollback << opRollback,
		slow: rng.Uint64() & rng.Uint64() & (1<<opTick - 1)}
}

// choose takes one step by chance.
func (w *world) choose(rng *rand.Rand, m mood, buf *[2][]step) {
	work, faults := w.steps(buf[0][:0], buf[1][:0])
	buf[0], buf[1] = work, faults
	switch n := rng.IntN(100); {
	case n < m.faults:
		if s, ok := pick(rng, m, faults); ok {
			w.do(s)
		}
	case n < m.faults+m.ticks || len(work) == 0:
		w.do(step{opTick, 0, 1 + rng.IntN(4)})
	default:
		s := work[rng.IntN(len(work))]
		if m.slow>>s.op&1 == 1 && rng.IntN(8) > 0 {
			s = work[rng.IntN(len(work))]
		}
		w.do(s)
	}
}

// pick takes a kind of fault first, then one of that kind: there are many rows to cancel and one Postgres to crash.
func pick(rng *rand.Rand, m mood, faults []step) (s step, ok bool) {
	var kinds []op
	for _, f := range faults {
		if m.never>>f.op&1 == 0 && (len(kinds) == 0 || kinds[len(kinds)-1] != f.op) {
			kinds = append(kinds, f.op)
		}
	}
	if len(kinds) == 0 {
		return s, false
	}
	kind := kinds[rng.IntN(len(kinds))]
	if slices.Contains(kinds, m.often) && rng.IntN(2) == 0 {
		kind = m.often
	}
	n := 0
	for _, f := range faults {
		if f.op == kind {
			if n++; rng.IntN(n) == 0 {
				s = f
			}
		}
	}
	return s, true
}
