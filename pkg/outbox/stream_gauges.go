package outbox

import (
	"context"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"
)

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
