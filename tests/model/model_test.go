package model

import (
	"flag"
	"testing"
)

var (
	firstSeed = flag.Uint64("seed", 1, "the first seed of the runs")
	runs      = flag.Int("runs", 1500, "how many runs of each kind")
)

// planOf alternates between commands with and without Compensate.
func planOf(losses bool, seed uint64, without guards) plan {
	return plan{losses: losses, compensates: seed%2 == 0, without: without}
}

// Whatever dies, everything that was committed finishes once the faults are over, and nothing is done that must not be.
func TestProtocolHoldsWhateverDies(t *testing.T) {
	t.Parallel()
	for name, losses := range map[string]bool{"processes die": false, "the stream loses messages, Postgres fails over": true} {
		t.Run(name, func(t *testing.T) {
			for seed := *firstSeed; seed < *firstSeed+uint64(*runs); seed++ {
				p := planOf(losses, seed, guards{})
				if v := simulate(p, seed); v != nil {
					t.Fatalf("seed %d: after %d steps, made shorter to %v", seed, len(v.Steps), shorten(p, v))
				}
			}
			t.Logf("%d runs of %d steps from seed %d", *runs, runLength, *firstSeed)
		})
	}
}

// The machine notices when a guard is taken out: else its silence would mean nothing.
func TestEachGuardIsMissed(t *testing.T) {
	t.Parallel()
	const most = 20000 // runs until it must have been noticed
	for _, c := range []struct {
		name    string
		without guards
		losses  bool
		kinds   []string // one of these
	}{
		{"fence token", guards{fence: true}, false, []string{"stale"}},
		{"generation", guards{generation: true}, false, []string{"old message", "letter"}},
		{"created_at", guards{created: true}, true, []string{"foreign"}},
		{"incarnation", guards{incarnation: true}, false, []string{"lost"}},
		{"ack after settle", guards{ack: true}, false, []string{"lost"}},
		{"reconcile", guards{reconcile: true}, true, []string{"lost"}},
		{"work list guard", guards{guard: true}, false, []string{"late look"}},
		{"position saved after PubAcks", guards{saved: true}, false, []string{"lost"}},
		{"live lease", guards{lease: true}, false, []string{"overlap", "after the end", "old message"}},
		{"due", guards{due: true}, false, []string{"early"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for seed := *firstSeed; seed < *firstSeed+most; seed++ {
				p := planOf(c.losses, seed, c.without)
				v := simulate(p, seed)
				if v == nil {
					continue
				}
				short := shorten(p, v)
				t.Logf("seed %d, run %d; %d steps, made shorter to %v", seed, seed-*firstSeed+1, len(v.Steps), short)
				for _, kind := range c.kinds {
					if short.Kind == kind {
						return
					}
				}
				t.Fatalf("noticed as %q, want one of %q", short.Kind, c.kinds)
			}
			t.Fatalf("not noticed in %d runs from seed %d", most, *firstSeed)
		})
	}
}

// The runs get everywhere: each kind of step is taken, and tasks end in every way.
func TestRunsReachEverything(t *testing.T) {
	t.Parallel()
	taken := map[op]int{}
	ends := map[string]int{}
	for seed := uint64(1); seed <= 1500; seed++ {
		v, w := simulated(planOf(seed%3 > 0, seed, guards{}), seed)
		if v != nil {
			t.Fatalf("seed %d: %v", seed, v)
		}
		for _, s := range w.trace {
			taken[s.op]++
		}
		w.db.each(func(r *row) {
			ends[r.status.String()]++
			if r.compensate {
				ends["compensated"]++
			}
		})
		for _, l := range w.db.log {
			ends[l.outcome]++
		}
	}
	for o, name := range opNames {
		if taken[op(o)] < 3 {
			t.Errorf("%q happened %d times in 1500 runs", name, taken[op(o)])
		}
	}
	for _, end := range []string{"succeeded", "dead", "cancelled", "compensated", "failed", "lost", "stale", "snoozed"} {
		if ends[end] < 10 {
			t.Errorf("%q was reached %d times in 1500 runs", end, ends[end])
		}
	}
	t.Log(ends)
}
