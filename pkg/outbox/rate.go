package outbox

import (
	"math"
	"time"
)

// A bucket keeps the publish rate of a biz type: tokens come in at the rate, each message takes one. Both lanes
// of a type with a rate are held by one relay (home), so its bucket is the only one.
//
// Tokens are shared between new tasks and the work list, half to each, and what one does not need goes to the other:
// else a backlog of new tasks, which is asked for more often, would leave none to retries.
type bucket struct {
	rate  float64 // tokens a second
	fresh float64 // for tasks read by position
	list  float64 // for the work list
	at    time.Time
}

// burstTime is how much of the rate may come at once after a pause, by each of the two.
const burstTime = 200 * time.Millisecond

func newBucket(rate float64, now time.Time) *bucket {
	return &bucket{rate: rate, fresh: 1, at: now}
}

// full is how many tokens each half holds. One more than what burstTime brings: the fraction that is left when a whole
// token is taken must have room. [Without it a rate of 5 a second, polled every 40 ms, lost a tenth.]
func (b *bucket) full() float64 { return 1 + b.rate*burstTime.Seconds() }

// fill adds the tokens of the time since the last fill. Reading takes what there is, which may be more than both lanes
// together were allowed: then a half is in debt, and has to wait for longer.
func (b *bucket) fill(now time.Time) {
	elapsed := now.Sub(b.at).Seconds()
	if elapsed <= 0 {
		return
	}
	b.at = now
	half, full := b.rate*elapsed/2, b.full()
	b.fresh += half
	b.list += half
	if over := b.list - full; over > 0 {
		b.list, b.fresh = full, b.fresh+over
	}
	if over := b.fresh - full; over > 0 {
		b.fresh, b.list = full, min(full, b.list+over)
	}
}

// limitRates takes the rates that operators have set; r.mu is held. A bucket whose rate stays keeps its tokens.
func (r *Relay) limitRates(rates map[string]float64, now time.Time) {
	for t, b := range r.buckets {
		if rates[t] != b.rate {
			delete(r.buckets, t)
		}
	}
	for t, rate := range rates {
		if r.buckets[t] == nil {
			if r.buckets == nil {
				r.buckets = make(map[string]*bucket)
			}
			r.buckets[t] = newBucket(rate, now)
		}
	}
}

// mayRead is how many new tasks of a type may be published now; r.mu is held.
func (r *Relay) mayRead(bizType string, now time.Time) int {
	b := r.buckets[bizType]
	if b == nil {
		return math.MaxInt
	}
	b.fill(now)
	return int(max(b.fresh, 0))
}

// mayLook is how many rows of the work list may be; r.mu is held.
func (r *Relay) mayLook(bizType string, now time.Time) int {
	b := r.buckets[bizType]
	if b == nil {
		return math.MaxInt
	}
	b.fill(now)
	return int(max(b.list, 0))
}

// spend takes the tokens of new tasks that were read; r.mu is held.
func (r *Relay) spend(bizType string, n int) {
	if b := r.buckets[bizType]; b != nil {
		b.fresh -= float64(n)
	}
}

// spendLooks takes those of rows of the work list; r.mu is held.
func (r *Relay) spendLooks(bizType string, n int) {
	if b := r.buckets[bizType]; b != nil {
		b.list -= float64(n)
	}
}
