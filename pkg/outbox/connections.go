package outbox

import (
	"context"
	"time"
)

// A dozen loops share the relay's pool. The one that reads the lanes and the one that keeps leases and saves positions
// find a connection whatever the others do: one is left to each of them. Of the rest one at most is for the loops that
// nobody waits for, whose statements may take long: reconciling, retention, bulks, notices, and the gauges.

// leastConns: two as above, and one for all else.
const leastConns = 3

// Loops by name, and one who is no loop.
const (
	loopLanes     = "lanes"
	loopRead      = "read"
	loopWorkList  = "work list"
	loopLetters   = "dead letters"
	loopStreams   = "streams"
	loopSwitches  = "switches"
	loopReconcile = "reconcile"
	loopRetention = "retention"
	loopBulk      = "bulk"
	loopNotices   = "notices"
	asksGauges    = "gauges"
)

// places are the connections that loops other than those two may use at the same time.
type places struct{ all, background chan struct{} }

func placesOf(pool int32) places {
	return places{all: make(chan struct{}, pool-2), background: make(chan struct{}, 1)}
}

// needed are the places that a statement on behalf of a loop takes. No name: before the loops begin, after they have
// ended, and in RunOnce, which has none.
func (p places) needed(loop string) []chan struct{} {
	switch loop {
	case loopRead, loopLanes, "":
		return nil
	case loopWorkList, loopLetters, loopStreams, loopSwitches:
		return []chan struct{}{p.all}
	}
	return []chan struct{}{p.background, p.all}
}

type loopKey struct{}

// onBehalfOf says which loop runs the statements of ctx.
func onBehalfOf(ctx context.Context, loop string) context.Context {
	return context.WithValue(ctx, loopKey{}, loop)
}

// takePlace waits until the loop of ctx may use a connection. Call leave after that.
func (r *Relay) takePlace(ctx context.Context) (leave func(), err error) {
	loop, _ := ctx.Value(loopKey{}).(string)
	var taken []chan struct{}
	leave = func() {
		for _, p := range taken {
			<-p
		}
	}
	for _, p := range r.places.needed(loop) {
		if err := r.waitForPlace(ctx, p, loop); err != nil {
			leave()
			return nil, err
		}
		taken = append(taken, p)
	}
	return leave, nil
}

func (r *Relay) waitForPlace(ctx context.Context, place chan<- struct{}, loop string) error {
	select {
	case place <- struct{}{}:
		return nil
	default:
	}
	tick := time.NewTicker(stalled / 3)
	defer tick.Stop()
	for {
		select {
		case place <- struct{}{}:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if loop != asksGauges {
				r.turned(loop) // it waits for others, each of which has its time
			}
		}
	}
}
