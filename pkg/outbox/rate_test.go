package outbox

import (
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whatever the polls do, what is published stays within 10 % of the rate, counted over the bucket's own time.
func TestRateIsKeptHoweverItIsPolled(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Float64Range(1, 5000).Draw(t, "rate")
		pauses := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		now := time.Unix(0, 0)
		b := newBucket(rate, now)
		r := &Relay{buckets: map[string]*bucket{"T": b}}
		listed := rapid.Bool().Draw(t, "work list too")
		took := 0
		end := now.Add(time.Duration(200/rate*float64(time.Second)) + 20*time.Second)
		began := now
		for now.Before(end) {
			now = now.Add(time.Duration(1+pauses.IntN(80)) * time.Millisecond)
			for range 2 { // both lanes were told the same number
				n := min(r.mayRead("T", now), 500)
				r.spend("T", n)
				took += n
			}
			if listed {
				n := r.mayLook("T", now)
				r.spendLooks("T", n)
				took += n
			}
		}
		want := rate * now.Sub(began).Seconds()
		if got := float64(took); got < 0.9*want || got > 1.1*want {
			t.Fatalf("rate %.1f: %d in %v, want %.0f", rate, took, now.Sub(began), want)
		}
	})
}

// A backlog of new tasks, asked for at every poll, leaves the retries their half.
func TestRateIsSharedWithTheWorkList(t *testing.T) {
	now := time.Unix(0, 0)
	r := &Relay{}
	r.limitRates(map[string]float64{"T": 100}, now)
	fresh, list := 0, 0
	for range 10_000 { // 10 s
		now = now.Add(time.Millisecond)
		n := r.mayRead("T", now)
		r.spend("T", n)
		fresh += n
		n = r.mayLook("T", now)
		r.spendLooks("T", n)
		list += n
	}
	if fresh < 450 || fresh > 550 || list < 450 || list > 550 {
		t.Errorf("got %d new and %d of the list in 10 s at 100 a second, want about 500 each", fresh, list)
	}
	if got := r.mayRead("OTHER", now); got < 1<<30 {
		t.Errorf("a type without a rate is limited to %d", got)
	}
	r.limitRates(nil, now)
	if got := r.mayRead("T", now); got < 1<<30 {
		t.Errorf("a type whose rate was cleared is limited to %d", got)
	}
}
