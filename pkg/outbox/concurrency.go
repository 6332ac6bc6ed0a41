package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"
)

// The concurrency of a biz type, over all workers, is MaxAckPending of its consumers. A type has two, one for each
// priority, and their limits together must not exceed it. So the relay that holds the type shares it out by what is
// there to do: all to the one that has work, a fifth to low when both have. Where only one task may run, they take turns.
// A limit grows only by what the other's consumer has really given up, so the sum holds at every moment.

// MetadataMaxAckPending is the key in a consumer's metadata for the limit that taskrelay has set: another one was set by
// a person, and is left.
const MetadataMaxAckPending = "taskrelay-max-ack-pending"

// FirstShare is what a consumer gets when it is made: almost all for low, which is the usual one. A type that may run
// one task at a time has nothing for high until the relay has shared it out: pause says that it is made paused.
func FirstShare(concurrency int, priority string) (limit int, pause bool) {
	switch {
	case priority == PriorityLow:
		return max(concurrency-1, 1), false
	case concurrency == 1:
		return 1, true
	}
	return 1, false
}

// demand is what a consumer has to do.
type demand struct {
	limit   int // of messages that may be out; 0: it is paused
	out     int // messages that are
	waiting bool
	started uint64 // deliveries so far
}

// A soloist is whose turn it is, of the two consumers of a type that may run one task at a time. High keeps the place for
// four tasks and eight looks, low for one and two: a fifth of the starts is low's, and where tasks are short a fifth of the
// time. [A turn that passes costs a look in which nothing runs.]
type soloist struct {
	low  bool
	held int    // looks at which it had the place
	from uint64 // what its consumer had started when its turn began
}

// next takes note of a look and says whether it is low's turn.
func (s *soloist) next(high, low demand) bool {
	mine, other, tasks, looks := high, low, uint64(4), 8
	if s.low {
		mine, other, tasks, looks = low, high, 1, 2
	}
	if mine.started < s.from { // the consumer was made anew
		s.from = mine.started
	}
	if mine.limit > 0 {
		s.held++
	}
	// One that has had its time and nothing out does not use the place: its workers may be away.
	if s.held >= looks && (mine.started-s.from >= tasks || mine.out == 0) {
		*s = soloist{low: !s.low, from: other.started}
	}
	return s.low
}

// share returns the new limits of high and low. lowNext says whose turn it is where only one task may run. It is called
// again and again, so each step need not be the last one.
func share(concurrency int, high, low demand, lowNext bool) (forHigh, forLow int) {
	want := func() (int, int) {
		switch {
		case high.waiting && low.waiting, high.waiting && low.out > 0, low.waiting && high.out > 0:
			if concurrency == 1 && lowNext {
				return 0, 1
			}
			if concurrency == 1 {
				return 1, 0
			}
			fifth := max(concurrency/5, 1)
			return concurrency - fifth, fifth
		case high.waiting || high.out > 0:
			if concurrency == 1 {
				return 1, 0
			}
			return concurrency - 1, 1
		case concurrency == 1:
			return 0, 1
		}
		return 1, concurrency - 1
	}
	forHigh, forLow = want()
	// What one consumer has out, or may have out until it is told its new limit, the other cannot have. A limit that
	// shrinks counts with what is out; one that grows waits for it.
	if forHigh > high.limit {
		forHigh = max(min(forHigh, concurrency-max(low.limit, low.out)), min(high.limit, forHigh))
	}
	if forLow > low.limit {
		forLow = max(min(forLow, concurrency-max(high.limit, high.out)), min(low.limit, forLow))
	}
	return forHigh, forLow
}

// shareConcurrency does that for each type with a limit whose lanes we hold.
func (r *Relay) shareConcurrency(ctx context.Context) error {
	r.mu.Lock()
	limits := maps.Clone(r.settings.concurrency)
	for t := range limits {
		if r.settings.paused[t] || r.lanes[laneKey{t, PriorityHigh}] == nil || r.lanes[laneKey{t, PriorityLow}] == nil {
			delete(limits, t)
		}
	}
	r.mu.Unlock()
	maps.DeleteFunc(r.soloists, func(t string, _ *soloist) bool { return limits[t] != 1 })
	var failure error // as of switches
	for _, t := range slices.Sorted(maps.Keys(limits)) {
		if err := r.shareType(ctx, t, limits[t]); err != nil {
			failure = cmp.Or(failure, fmt.Errorf("share the concurrency of %s: %w", t, err))
		}
		r.turned(loopSwitches)
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return failure
}

func (r *Relay) shareType(ctx context.Context, bizType string, concurrency int) error {
	ctx, cancel := context.WithTimeout(ctx, 2*publishTimeout)
	defer cancel()
	var infos [2]*jetstream.ConsumerInfo
	var demands [2]demand
	for i, p := range []string{PriorityHigh, PriorityLow} {
		c, err := r.js.Consumer(ctx, r.names.Stream(), r.names.Consumer(bizType, p))
		if errors.Is(err, jetstream.ErrConsumerNotFound) || errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil // no worker yet
		}
		if err != nil {
			return err
		}
		info := c.CachedInfo()
		if info.Config.Metadata[MetadataMaxAckPending] != strconv.Itoa(info.Config.MaxAckPending) ||
			info.Paused && !PausedByUs(info.Config) {
			return nil // a person's own limit; the worker says so
		}
		infos[i] = info
		demands[i] = demand{limit: info.Config.MaxAckPending, out: info.NumAckPending, waiting: info.NumPending > 0,
			started: info.Delivered.Consumer}
		if info.Paused {
			demands[i].limit = 0
		}
	}
	lowNext := false
	if concurrency == 1 {
		s := r.soloists[bizType]
		if s == nil {
			s = &soloist{from: demands[0].started}
			r.soloists[bizType] = s
		}
		lowNext = s.next(demands[0], demands[1])
	}
	high, low := share(concurrency, demands[0], demands[1], lowNext)
	for i, n := range []int{high, low} {
		if n == demands[i].limit {
			continue
		}
		if err := r.setLimit(ctx, infos[i], n); err != nil {
			return err
		}
	}
	return nil
}

// setLimit gives a consumer its share. None is a pause: JetStream takes a limit of 0 for its default.
func (r *Relay) setLimit(ctx context.Context, info *jetstream.ConsumerInfo, n int) error {
	stream := r.names.Stream()
	if n == 0 {
		_, err := r.js.PauseConsumer(ctx, stream, info.Name, PauseMark)
		return err
	}
	c := info.Config
	c.Metadata = maps.Clone(c.Metadata)
	c.MaxAckPending, c.Metadata[MetadataMaxAckPending] = n, strconv.Itoa(n)
	_, err := r.js.UpdateConsumer(ctx, stream, c)
	if err == nil && PausedByUs(c) { // the server takes no pause_until from an update: only a request of its own ends one
		_, err = r.js.ResumeConsumer(ctx, stream, info.Name)
	}
	if errors.Is(err, jetstream.ErrConsumerDoesNotExist) || errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil
	}
	return err
}
