package outbox

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
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

const backlogSQL = `-- taskrelay: backlog for metrics
SELECT l.biz_type, l.backlog, l.on_work_list, coalesce(extract(epoch FROM l.oldest_due_age), 0)::float8,
  l.paused_at IS NOT NULL, l.live_workers
FROM {{schema}}.lag AS l`

// backlogCache is the view lag, added up by type.
type backlogCache struct {
	tasks, workers, paused metric.Int64ObservableGauge
	orphans                metric.Int64ObservableGauge
	oldest                 metric.Float64ObservableGauge

	mu     sync.Mutex
	readAt time.Time
	types  map[string]typeBacklog // nil: could not be read
}

type typeBacklog struct {
	backlog, onList int64
	oldest          float64
	paused          bool
	workers         int64
}

func (o *observer) backlog(c *backlogCache) {
	c.tasks = o.gauge("taskrelay.outbox.tasks", "{task}",
		"Due tasks that are not on their way to a worker, by where they are: waiting (for the relay) or work_list. Counted up to 10000 per lane and place.")
	c.oldest = o.floatGauge("taskrelay.outbox.oldest_due.age", "s", "How long the oldest of these has been due.")
	c.workers = o.gauge("taskrelay.biz_type.workers", "{worker}", "Live workers that know the type.")
	c.paused = o.gauge("taskrelay.biz_type.paused", "", "1 while an operator has paused the type.")
	c.orphans = o.gauge("taskrelay.tasks.without_worker", "{task}",
		"Tasks that wait, published or not, although no live worker knows their type.")
}

// read returns the backlog by type; r.mu must not be held.
func (c *backlogCache) read(ctx context.Context, r *Relay) map[string]typeBacklog {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.readAt.IsZero() && time.Since(c.readAt) < gaugeEvery {
		return c.types
	}
	ctx, cancel := context.WithTimeout(ctx, gaugeWait)
	defer cancel()
	types := map[string]typeBacklog{}
	err := r.query(ctx, backlogSQL, nil, func(rows pgx.Rows) error {
		var bizType string
		var t typeBacklog
		if err := rows.Scan(&bizType, &t.backlog, &t.onList, &t.oldest, &t.paused, &t.workers); err != nil {
			return err
		}
		types[bizType] = types[bizType].plus(t)
		return nil
	})
	if err != nil {
		r.log.Debug().Err(err).Msg("backlog not read for metrics")
		types = nil
	}
	c.types, c.readAt = types, time.Now()
	return types
}

func (b typeBacklog) plus(o typeBacklog) typeBacklog {
	return typeBacklog{backlog: b.backlog + o.backlog, onList: b.onList + o.onList, oldest: max(b.oldest, o.oldest),
		paused: b.paused || o.paused, workers: max(b.workers, o.workers)}
}

// streamCache is what JetStream says of our streams and of the consumers of tasks and notices.
type streamCache struct {
	messages, bytes, limit                  metric.Int64ObservableGauge
	pending, ackPending, redelivered, pulls metric.Int64ObservableGauge

	mu       sync.Mutex
	readAt   time.Time
	state    []streamState
	subjects map[string]uint64 // messages by subject of the task stream
}

type streamState struct {
	name      string
	info      *jetstream.StreamInfo
	consumers []*jetstream.ConsumerInfo
}

func (o *observer) streams(c *streamCache) {
	c.messages = o.gauge("taskrelay.stream.messages", "{message}", "Messages in the stream.")
	c.bytes = o.gauge("taskrelay.stream.bytes", "By", "Bytes the stream takes.")
	c.limit = o.gauge("taskrelay.stream.limit", "By", "Bytes the stream may take, where it has a limit (max_bytes).")
	c.pending = o.gauge("taskrelay.stream.pending_messages", "{message}", "Messages the consumer has not delivered yet.")
	c.ackPending = o.gauge("taskrelay.stream.ack_pending_messages", "{message}", "Messages delivered and not acknowledged: running, or parked for a retry.")
	c.redelivered = o.gauge("taskrelay.stream.redelivered_messages", "{message}", "Of these, messages that were delivered more than once.")
	c.pulls = o.gauge("taskrelay.stream.waiting_pulls", "{request}", "Requests of workers that wait for messages: 0 when no worker has a free slot, or there is none.")
}

// read returns nil when NATS does not answer.
func (c *streamCache) read(ctx context.Context, r *Relay) ([]streamState, map[string]uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.readAt.IsZero() && time.Since(c.readAt) < gaugeEvery {
		return c.state, c.subjects
	}
	c.state, c.subjects = nil, nil
	if r.nc.IsConnected() {
		ctx, cancel := context.WithTimeout(ctx, gaugeWait)
		defer cancel()
		var err error
		if c.state, c.subjects, err = r.streamStates(ctx); err != nil {
			c.state, c.subjects = nil, nil
			r.log.Debug().Err(err).Msg("streams not read for metrics")
		}
	}
	c.readAt = time.Now()
	return c.state, c.subjects
}

func (r *Relay) streamStates(ctx context.Context) (states []streamState, subjects map[string]uint64, err error) {
	for _, name := range []string{r.names.Stream(), r.names.DeadStream(), r.names.EventStream()} {
		s, err := r.js.Stream(ctx, name)
		if err != nil {
			return nil, nil, err
		}
		state := streamState{name: name, info: s.CachedInfo()}
		if name == r.names.Stream() {
			if state.info, err = s.Info(ctx, jetstream.WithSubjectFilter(r.names.subject("tasks.>"))); err != nil {
				return nil, nil, err
			}
			subjects = state.info.State.Subjects
		}
		if name != r.names.DeadStream() { // anybody may look at letters, with a consumer that lives for a minute
			list := s.ListConsumers(ctx)
			for i := range list.Info() {
				state.consumers = append(state.consumers, i)
			}
			if err := list.Err(); err != nil {
				return nil, nil, err
			}
		}
		states = append(states, state)
	}
	return states, subjects, nil
}

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
