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
				out[i], backlog[i] = out[i]+k, backlog[i]-k
			}
			if out[0]+out[1] > n {
				t.Fatalf("%v are out, limits %v, concurrency %d", out, limit, n)
			}
		}
		step := func(late bool) {
			h, l := share(n, demand{limit[0], out[0], backlog[0] > 0}, demand{limit[1], out[1], backlog[1] > 0})
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
		for range 600 {
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
		{10, demand{1, 0, false}, demand{9, 9, true}, 1, 9},
		{10, demand{1, 1, true}, demand{9, 9, true}, 1, 2}, // high grows as low ends
		{10, demand{1, 1, true}, demand{2, 2, true}, 8, 2},
		{10, demand{8, 8, true}, demand{2, 0, false}, 8, 1},
		{10, demand{8, 0, false}, demand{2, 2, true}, 1, 2},
		{10, demand{1, 0, false}, demand{2, 2, true}, 1, 9},
		{1, demand{0, 0, false}, demand{1, 1, true}, 0, 1},
		{1, demand{0, 0, true}, demand{1, 1, true}, 0, 0},
		{1, demand{0, 0, true}, demand{0, 0, true}, 1, 0},
		{1, demand{1, 0, false}, demand{0, 0, true}, 0, 0},
		{1, demand{0, 0, false}, demand{0, 0, true}, 0, 1},
		{3, demand{1000, 0, false}, demand{1000, 0, false}, 1, 2},
	} {
		h, l := share(tt.n, tt.high, tt.low)
		if h != tt.h || l != tt.l {
			t.Errorf("share(%d, %v, %v) = %d, %d, want %d, %d", tt.n, tt.high, tt.low, h, l, tt.h, tt.l)
		}
	}
}
