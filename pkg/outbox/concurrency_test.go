package outbox

import (
	"testing"

	"pgregory.net/rapid"
)

// Whatever comes and goes, the two consumers of a type never have more out than its concurrency, and neither of them
// waits for ever.
func TestSharesNeverExceedTheConcurrency(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 30).Draw(t, "concurrency")
		var limit, out, backlog [2]int
		var started [2]uint64
		var turn soloist
		for i, p := range []string{PriorityHigh, PriorityLow} {
			var paused bool
			if limit[i], paused = FirstShare(n, p); paused {
				limit[i] = 0
			}
			backlog[i] = rapid.IntRange(0, 200).Draw(t, p)
		}
		deliver := func() {
			for i := range limit {
				k := min(max(limit[i]-out[i], 0), backlog[i])
				out[i], backlog[i], started[i] = out[i]+k, backlog[i]-k, started[i]+uint64(k)
			}
			if out[0]+out[1] > n {
				t.Fatalf("%v are out, limits %v, concurrency %d", out, limit, n)
			}
		}
		step := func(late bool) {
			high := demand{limit[0], out[0], backlog[0] > 0, started[0]}
			low := demand{limit[1], out[1], backlog[1] > 0, started[1]}
			h, l := share(n, high, low, turn.next(high, low))
			if late { // the server goes on delivering by the old limits while the new ones are on their way
				deliver()
			}
			limit[0] = h
			deliver()
			limit[1] = l
			deliver()
		}
		deliver()
		for range rapid.IntRange(1, 60).Draw(t, "turns") {
			step(rapid.Bool().Draw(t, "late"))
			for i := range out {
				out[i] -= rapid.IntRange(0, out[i]).Draw(t, "done")
			}
			if rapid.IntRange(0, 4).Draw(t, "more") == 0 {
				backlog[rapid.IntRange(0, 1).Draw(t, "lane")] += rapid.IntRange(1, 50).Draw(t, "new")
			}
			deliver()
		}
		for range 1500 { // one at a time, 400 of them, and a look without any at each turn that passes
			step(false)
			for i := range out {
				out[i] -= min(out[i], 1)
			}
		}
		if backlog[0]+backlog[1] > 0 {
			t.Fatalf("%v still wait, limits %v", backlog, limit)
		}
	})
}

func TestOneBusyLaneGetsNearlyAll(t *testing.T) {
	for _, tt := range []struct {
		n         int
		high, low demand
		h, l      int
	}{
		{10, demand{1, 0, false, 0}, demand{9, 9, true, 0}, 1, 9},
		{10, demand{1, 1, true, 0}, demand{9, 9, true, 0}, 1, 2}, // high grows as low ends
		{10, demand{1, 1, true, 0}, demand{2, 2, true, 0}, 8, 2},
		{10, demand{8, 8, true, 0}, demand{2, 0, false, 0}, 8, 1},
		{10, demand{8, 0, false, 0}, demand{2, 2, true, 0}, 1, 2},
		{10, demand{1, 0, false, 0}, demand{2, 2, true, 0}, 1, 9},
		{1, demand{0, 0, false, 0}, demand{1, 1, true, 0}, 0, 1},
		{1, demand{0, 0, true, 0}, demand{1, 1, true, 0}, 0, 0},
		{1, demand{0, 0, true, 0}, demand{0, 0, true, 0}, 1, 0},
		{1, demand{1, 0, false, 0}, demand{0, 0, true, 0}, 0, 0},
		{1, demand{0, 0, false, 0}, demand{0, 0, true, 0}, 0, 1},
		{3, demand{1000, 0, false, 0}, demand{1000, 0, false, 0}, 1, 2},
	} {
		h, l := share(tt.n, tt.high, tt.low, false)
		if h != tt.h || l != tt.l {
			t.Errorf("share(%d, %v, %v) = %d, %d, want %d, %d", tt.n, tt.high, tt.low, h, l, tt.h, tt.l)
		}
	}
}

// DESIGN 4.1: low keeps a fifth, also where only one task may run and high always has another one.
func TestLowHasItsTurnWhereOneTaskMayRun(t *testing.T) {
	for _, tt := range []struct {
		name   string
		looks  int // a task takes so many; 0: a look sees ten of them start
		absent [2]bool
		least  float64 // of all starts that could be
	}{
		{name: "short tasks", least: 0.8},
		{name: "tasks of two seconds", looks: 2, least: 0.6},
		{name: "tasks of a minute", looks: 60, least: 0.95},
		{name: "nobody takes high", absent: [2]bool{true, false}, least: 0},
		{name: "nobody takes low", absent: [2]bool{false, true}, least: 0.5},
	} {
		var turn soloist
		var limit, out, left [2]int
		var started [2]uint64
		limit[1] = 1
		const seconds = 6000
		for range seconds {
			high, low := demand{limit[0], out[0], true, started[0]}, demand{limit[1], out[1], true, started[1]}
			limit[0], limit[1] = share(1, high, low, turn.next(high, low))
			for i := range out {
				if out[i] > 0 {
					if left[i]--; left[i] <= 0 {
						out[i] = 0
					}
				}
				if limit[i] == 0 || out[i] > 0 || tt.absent[i] {
					continue
				}
				out[i], left[i], started[i] = 1, tt.looks, started[i]+1
				if tt.looks == 0 {
					started[i] += 9
				}
			}
			if out[0]+out[1] > 1 {
				t.Fatalf("%s: %v are out", tt.name, out)
			}
		}
		could := float64(seconds * 10)
		if tt.looks > 0 {
			could = float64(seconds / tt.looks)
		}
		all := float64(started[0] + started[1])
		if all < tt.least*could {
			t.Errorf("%s: %v started, want nearly %v", tt.name, started, could)
		}
		if share := float64(started[1]) / all; tt.absent == [2]bool{} && (share < 0.15 || share > 0.25) {
			t.Errorf("%s: %v started of high and low, want a fifth of low", tt.name, started)
		}
		for i := range started {
			if !tt.absent[i] && started[i] == 0 {
				t.Errorf("%s: %v started", tt.name, started)
			}
		}
	}
}
