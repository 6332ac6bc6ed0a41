package outbox

import (
	"context"
	"maps"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Gauges that are read from Postgres and the stream. Every relay offers them and all say the same, so take the max over
// relays, never the sum. They are read when somebody asks, at most every gaugeEvery, however many ask: without anybody
// who asks they cost nothing. What cannot be read is left out: an old number would look like a fresh one.
const (
	gaugeEvery = 10 * time.Second
	// gaugeWait is how long one who asks waits for Postgres, and then for NATS. Prometheus gives up after 10 s.
	gaugeWait = 3 * time.Second
)

// observeServers gives the gauges.
func (m *meter) observeServers(ctx context.Context, to metric.Observer, known map[string]bool) {
	states, subjects := m.streams.read(ctx, m.r)
	for _, s := range states {
		stream := attribute.String("stream", s.name)
		to.ObserveInt64(m.streams.messages, int64(s.info.State.Msgs), attrs(stream))
		to.ObserveInt64(m.streams.bytes, int64(s.info.State.Bytes), attrs(stream))
		if limit := s.info.Config.MaxBytes; limit > 0 {
			to.ObserveInt64(m.streams.limit, limit, attrs(stream))
		}
		for _, c := range s.consumers {
			if c.Config.Durable == "" {
				continue // somebody is looking
			}
			a := attrs(stream, attribute.String("consumer", c.Name))
			to.ObserveInt64(m.streams.pending, int64(c.NumPending), a)
			to.ObserveInt64(m.streams.ackPending, int64(c.NumAckPending), a)
			to.ObserveInt64(m.streams.redelivered, int64(c.NumRedelivered), a)
			to.ObserveInt64(m.streams.pulls, int64(c.NumWaiting), a)
		}
	}

	types := m.backlog.read(ctx, m.r)
	byLabel := map[string]typeBacklog{}
	orphans := map[string]int64{otherType: 0}
	for bizType, t := range types {
		name := typeLabel(bizType, known)
		byLabel[name] = byLabel[name].plus(t)
		if t.workers == 0 {
			waits := t.backlog
			for _, priority := range [...]string{PriorityHigh, PriorityLow} {
				waits += int64(subjects[m.r.names.Subject(bizType, priority)])
			}
			orphans[name] += waits
		}
	}
	if types == nil {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(byLabel)) {
		t, a := byLabel[name], attribute.String("biz_type", name)
		to.ObserveInt64(m.backlog.tasks, t.backlog-t.onList, attrs(a, attribute.String("state", "waiting")))
		to.ObserveInt64(m.backlog.tasks, t.onList, attrs(a, attribute.String("state", "work_list")))
		to.ObserveFloat64(m.backlog.oldest, t.oldest, attrs(a))
		if name == otherType {
			continue
		}
		to.ObserveInt64(m.backlog.workers, t.workers, attrs(a))
		paused := int64(0)
		if t.paused {
			paused = 1
		}
		to.ObserveInt64(m.backlog.paused, paused, attrs(a))
		orphans[name] += 0 // a counter that first shows up when it rises is seen late
	}
	for _, name := range slices.Sorted(maps.Keys(orphans)) {
		to.ObserveInt64(m.backlog.orphans, orphans[name], attrs(attribute.String("biz_type", name)))
	}
}
