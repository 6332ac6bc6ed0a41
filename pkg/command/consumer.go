package command

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Keys in a consumer's metadata: what workers want. Of two workers that want different limits the greater wins, and
// a limit that differs from what is written here was changed by an operator.
const (
	metadataAckWait       = "taskrelay-ack-wait"
	metadataMaxAckPending = outbox.MetadataMaxAckPending
)

const minAckPending = 1000

// errForeignStream: the stream belongs to another installation. Going on would take that one's messages.
type errForeignStream struct{ stream, theirs, ours string }

func (e errForeignStream) Error() string {
	return fmt.Sprintf("stream %s belongs to installation %s, this database is %s: one stream serves one installation; use another NATS_URL or set NAMESPACE",
		e.stream, e.theirs, e.ours)
}

// findStream returns the task stream after making sure that it is ours.
func (w *Worker) findStream(ctx context.Context) (jetstream.Stream, error) {
	s, err := w.js.Stream(ctx, w.names.Stream())
	if err != nil {
		return nil, err
	}
	owner, ok := s.CachedInfo().Config.Metadata[outbox.MetadataInstallation]
	if ok && owner != w.installation {
		return nil, errForeignStream{stream: w.names.Stream(), theirs: owner, ours: w.installation}
	}
	return s, nil
}

// ensureConsumer makes sure that the lane's consumer is there and safe to use.
func (l *lane) ensureConsumer(ctx context.Context) error {
	// A few at a time: hundreds of lanes start at once, and again when a server comes back.
	select {
	case l.w.apiCalls <- struct{}{}:
		defer func() { <-l.w.apiCalls }()
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, 4*time.Second) // a leader that has just died does not answer
	defer cancel()
	stream, err := l.w.findStream(ctx)
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", l.w.names.Stream(), err)
	}
	var info *jetstream.ConsumerInfo
	for range 3 { // another worker may create or delete it at the same moment
		var c jetstream.Consumer
		if c, err = stream.Consumer(ctx, l.name()); err == nil {
			info = c.CachedInfo()
			break
		}
		if !errors.Is(err, jetstream.ErrConsumerNotFound) {
			break
		}
		if c, err = stream.CreateConsumer(ctx, l.wanted()); err == nil {
			info = c.CachedInfo()
			l.w.log.Info().Str("consumer", l.name()).Msg("consumer created")
			break
		}
		if !errors.Is(err, jetstream.ErrConsumerExists) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("consumer %s: %w", l.name(), err)
	}
	mended, changed, err := l.mend(info.Config)
	if err != nil {
		return err
	}
	if changed {
		c, err := stream.UpdateConsumer(ctx, mended)
		if err != nil {
			return fmt.Errorf("update consumer %s: %w", l.name(), err)
		}
		mended = c.CachedInfo().Config
	}
	l.born.Store(info.Created.UnixNano())
	l.delivered.Store(0)
	l.ackWait.Store(int64(mended.AckWait))
	l.maxAckPending.Store(int64(mended.MaxAckPending))
	if _, _, exact := l.limits(); exact {
		l.maxAckPending.Store(0) // a parked message would take the place of a running task: retries wait in the table
	}
	return nil
}

// limits are what this worker wants: AckWait, and how many messages may be out at once.
func (l *lane) limits() (ackWait time.Duration, maxAckPending int, exact bool) {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	if n := l.d.set.concurrency; n > 0 {
		return l.w.cfg.Lease, n, true // the limit over all workers
	}
	return l.w.cfg.Lease, max(minAckPending, 4*l.d.slots), false
}

// paused reports whether operators have paused the type.
func (l *lane) paused() bool {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	return l.d.set.paused
}

// wanted is the consumer as this worker would make it. No BackOff: with it a nak's delay is not the one asked for.
// No MaxDeliver: a message that exhausts it stays in the stream for ever; attempts are counted in the row.
func (l *lane) wanted() jetstream.ConsumerConfig {
	ackWait, pending, exact := l.limits()
	var pausedUntil *time.Time
	paused := l.paused()
	if exact {
		first, none := outbox.FirstShare(pending, l.priority)
		pending, paused = first, paused || none
	}
	if paused {
		pausedUntil = &outbox.PauseMark
	}
	return jetstream.ConsumerConfig{
		PauseUntil:    pausedUntil,
		Durable:       l.name(),
		Description:   "taskrelay workers of " + l.bizType + ", " + l.priority,
		FilterSubject: l.w.names.Subject(l.bizType, l.priority),
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       ackWait,
		MaxAckPending: pending,
		MaxDeliver:    -1,
		Metadata: map[string]string{
			metadataAckWait:       ackWait.String(),
			metadataMaxAckPending: strconv.Itoa(pending),
		},
	}
}

// mend compares an existing consumer with what workers want. What an operator changed is reported and left, except
// where it would strand or misdirect messages. Pauses are the relay's: the server takes no pause_until from an update.
func (l *lane) mend(have jetstream.ConsumerConfig) (_ jetstream.ConsumerConfig, changed bool, err error) {
	log := l.w.log.With().Str("consumer", l.name()).Logger()
	if have.AckPolicy != jetstream.AckExplicitPolicy || have.DeliverSubject != "" {
		return have, false, fmt.Errorf("consumer %s is no pull consumer with explicit acks: delete it, workers make it anew", l.name())
	}
	ackWait, pending, exact := l.limits()
	metaWait, _ := time.ParseDuration(have.Metadata[metadataAckWait])
	metaPending, _ := strconv.Atoi(have.Metadata[metadataMaxAckPending])
	want := have
	want.Metadata = maps.Clone(have.Metadata)
	if want.Metadata == nil {
		want.Metadata = make(map[string]string)
	}

	switch {
	case have.AckWait != metaWait:
		log.Warn().Dur("ack_wait", have.AckWait).Dur("wanted", max(ackWait, metaWait)).
			Msg("ack wait was changed by hand, left as it is")
	case ackWait > have.AckWait:
		want.AckWait, want.Metadata[metadataAckWait] = ackWait, ackWait.String()
		changed = true
	}
	switch {
	case have.MaxAckPending != metaPending:
		log.Warn().Int("max_ack_pending", have.MaxAckPending).Int("wanted", max(pending, metaPending)).
			Msg("max ack pending was changed by hand, left as it is")
	case exact && have.MaxAckPending <= pending: // its share of the limit, by the relay
	case exact, pending > have.MaxAckPending:
		if exact {
			pending, _ = outbox.FirstShare(pending, l.priority)
		}
		want.MaxAckPending, want.Metadata[metadataMaxAckPending] = pending, strconv.Itoa(pending)
		changed = true
	}
	if have.MaxDeliver != -1 {
		log.Warn().Int("max_deliver", have.MaxDeliver).
			Msg("max deliver put back to -1: a message that reaches it would stay in the stream for ever")
		want.MaxDeliver, changed = -1, true
	}
	if subject := l.w.names.Subject(l.bizType, l.priority); have.FilterSubject != subject || len(have.FilterSubjects) > 0 {
		log.Warn().Str("filter_subject", have.FilterSubject).Msg("filter subject put back: the lane would get nothing")
		want.FilterSubject, want.FilterSubjects, changed = subject, nil, true
	}
	if len(have.BackOff) > 0 || have.InactiveThreshold > 0 || have.RateLimit > 0 {
		log.Warn().Msg("back off, inactive threshold or rate limit was set by hand, left as it is: delays of retries may be longer")
	}
	return want, changed, nil
}
