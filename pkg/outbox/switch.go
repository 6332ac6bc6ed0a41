package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
)

// Operators set switches of a biz type in the table biz_type. A pause stops the relay, which reads its lanes no further,
// and the consumers, so that what is published already is not delivered. Both hold through restarts: the table is asked
// again, and a consumer made anew is made paused.

// settings is what operators say in the tables, read every few seconds.
type settings struct {
	paused      map[string]bool
	known       map[string]bool // types that some worker has registered, or an operator
	rates       map[string]float64
	concurrency map[string]int
	strict      bool
	losses      int
}

// mayPublish reports whether a lane is read at all. A round never passes a row for policy: a lane that may not
// publish does not move.
func (s settings) mayPublish(k laneKey) bool {
	return !s.paused[k.bizType] && (!s.strict || s.known[k.bizType])
}

// sameSwitches reports whether nothing is to be done about the difference.
func (s settings) sameSwitches(o settings) bool {
	return s.strict == o.strict && maps.Equal(s.paused, o.paused) && maps.Equal(s.known, o.known) &&
		maps.Equal(s.rates, o.rates) && maps.Equal(s.concurrency, o.concurrency)
}

const settingsSQL = `-- taskrelay: read settings
SELECT b.biz_type, b.paused_at IS NOT NULL, b.known_by IS NOT NULL, coalesce(b.rate, 0), coalesce(b.concurrency, 0), i.strict_types, i.losses
FROM {{schema}}.installation AS i LEFT JOIN {{schema}}.biz_type AS b ON true`

func (r *Relay) readSettings(ctx context.Context) error {
	s := settings{paused: map[string]bool{}, known: map[string]bool{}, rates: map[string]float64{}, concurrency: map[string]int{}}
	err := r.query(ctx, settingsSQL, nil, func(rows pgx.Rows) error {
		var t *string
		var paused, known bool
		var rate float64
		var concurrency int
		if err := rows.Scan(&t, &paused, &known, &rate, &concurrency, &s.strict, &s.losses); err != nil {
			return err
		}
		if t == nil {
			return nil
		}
		s.paused[*t], s.known[*t] = paused, known
		if rate > 0 {
			s.rates[*t] = rate
		}
		if concurrency > 0 {
			s.concurrency[*t] = concurrency
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	r.mu.Lock()
	if s.losses > r.settings.losses { // what we know of sequences is about what another relay has seen to be lost
		r.rewound, r.highest = false, 0
		select {
		case r.compare <- struct{}{}: // reconcile at once
		default:
		}
	}
	was := r.settings
	r.settings = s
	r.limitRates(s.rates, time.Now())
	if !s.sameSwitches(was) {
		r.calm.moved++ // the work list was looked at without the lanes that may go on now
		for _, l := range r.lanes {
			l.flows = l.flows && s.paused[l.bizType] == was.paused[l.bizType] && s.concurrency[l.bizType] == was.concurrency[l.bizType]
		}
	}
	r.stir() // once in a while
	r.mu.Unlock()
	if was.paused != nil {
		r.reportSwitches(was, s)
	}
	return nil
}

func (r *Relay) reportSwitches(was, is settings) {
	for t, paused := range is.paused {
		switch {
		case paused && !was.paused[t]:
			r.log.Warn().Str("biz_type", t).Msg("biz type paused: nothing is published or delivered, running attempts finish")
		case !paused && was.paused[t]:
			r.log.Info().Str("biz_type", t).Msg("biz type resumed")
		}
		if is.rates[t] != was.rates[t] {
			r.log.Info().Str("biz_type", t).Float64("rate", is.rates[t]).Msg("publish rate changed (0: no limit)")
		}
	}
}

// home is the lane by whose name a lane is given to a relay: its own. Where a type has a rate or a concurrency both its
// lanes go to one relay, which alone can keep them.
func (r *Relay) home(k laneKey) laneKey {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.settings.rates[k.bizType] > 0 || r.settings.concurrency[k.bizType] > 0 {
		k.priority = PriorityLow
	}
	return k
}

// PauseMark is until when the consumers of a paused biz type are paused. It tells them from those that a person has
// paused with the nats CLI, which nobody resumes for them.
var PauseMark = time.Date(2200, time.January, 1, 0, 0, 0, 0, time.UTC)

// PausedByUs reports whether a consumer is paused because its biz type was.
func PausedByUs(c jetstream.ConsumerConfig) bool {
	return c.PauseUntil != nil && c.PauseUntil.Equal(PauseMark)
}

const (
	switchTick  = time.Second
	refusedTick = time.Minute
)

// applySwitches makes the consumers of our lanes follow the table. Those of paused types are looked at each time, for
// they may be made anew; the others once, and again when the reconciler has seen one paused.
func (r *Relay) applySwitches(ctx context.Context) (time.Duration, error) {
	if !r.nc.IsConnected() {
		return switchTick, nil
	}
	held, _, _, _ := r.heldLanes(func(l *lane) bool { return r.settings.paused[l.bizType] || !l.flows })
	var failure error // the first one: a consumer that has no leader must not keep the others from being paused
	for _, l := range held {
		if err := r.switchConsumer(ctx, l); err != nil {
			failure = cmp.Or(failure, fmt.Errorf("consumer of %s.%s: %w", l.bizType, l.priority, err))
		}
		r.turned(loopSwitches)
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
	}
	if failure = cmp.Or(failure, r.shareConcurrency(ctx)); failure != nil {
		return 0, failure
	}
	return switchTick, r.reportRefusedTypes(ctx, time.Now())
}

func (r *Relay) switchConsumer(ctx context.Context, l *lane) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	name := r.names.Consumer(l.bizType, l.priority)
	c, err := r.js.Consumer(ctx, r.names.Stream(), name)
	gone := errors.Is(err, jetstream.ErrConsumerNotFound) || errors.Is(err, jetstream.ErrStreamNotFound)
	if err != nil && !gone {
		return err
	}
	r.mu.Lock()
	paused := r.settings.paused[l.bizType] // as of now, not of before we asked
	shared := r.settings.concurrency[l.bizType] > 0
	l.flows = !paused
	r.mu.Unlock()
	if gone {
		return nil // whoever makes it reads the table
	}
	info := c.CachedInfo()
	switch {
	case paused && !PausedByUs(info.Config):
		_, err = r.js.PauseConsumer(ctx, r.names.Stream(), name, PauseMark)
	case !paused && PausedByUs(info.Config) && shared: // shareConcurrency does
	case !paused && PausedByUs(info.Config):
		_, err = r.js.ResumeConsumer(ctx, r.names.Stream(), name)
	case !paused && info.Paused:
		r.sayPausedByHand(l, info)
	}
	if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		r.mu.Lock()
		l.flows = false
		r.mu.Unlock()
		return err
	}
	return nil
}

// sayPausedByHand reports once for each pause that a person has made with the nats CLI.
func (r *Relay) sayPausedByHand(l *lane, info *jetstream.ConsumerInfo) {
	if info.Config.PauseUntil == nil {
		return
	}
	if _, said := r.said.LoadOrStore(info.Name+" "+info.Config.PauseUntil.String(), true); said {
		return
	}
	r.log.Warn().Str("biz_type", l.bizType).Str("priority", l.priority).Str("consumer", info.Name).
		Time("until", *info.Config.PauseUntil).
		Msg("consumer was paused by hand, left as it is: nats consumer resume lets its tasks go on")
}

const refusedTypesSQL = `-- taskrelay: types not allowed
SELECT g.biz_type, sum(g.backlog)::bigint FROM {{schema}}.lag AS g
WHERE g.biz_type = ANY ($1::text[]) AND g.backlog > 0 GROUP BY g.biz_type`

// reportRefusedTypes names once a minute the types whose tasks are not published because nobody has made them known.
func (r *Relay) reportRefusedTypes(ctx context.Context, now time.Time) error {
	if now.Sub(r.refusedAt) < refusedTick {
		return nil
	}
	_, types, _, _ := r.heldLanes(func(l *lane) bool { return r.settings.strict && !r.settings.known[l.bizType] })
	if len(types) == 0 {
		return nil
	}
	r.refusedAt = now // also should it fail: the view is dear, and more so on a server that is busy
	err := r.query(ctx, refusedTypesSQL, []any{types}, func(rows pgx.Rows) error {
		var t string
		var n int64
		if err := rows.Scan(&t, &n); err != nil {
			return err
		}
		r.log.Error().Str("biz_type", t).Int64("count", n).
			Msg("tasks are not published: strict types are on and nobody has made their type known; start its worker, or: taskrelay types add")
		return nil
	})
	if err != nil {
		return fmt.Errorf("types not allowed: %w", err)
	}
	return nil
}
