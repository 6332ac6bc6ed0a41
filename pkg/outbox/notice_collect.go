package outbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	noticeBatch = 500
	noticePull  = 5 * time.Second // how long one request for events waits
	// noticeLinger: many tasks that die at once make one notice, not one and then the rest a minute later.
	noticeLinger = time.Second
	// noticePast is how far back a consumer that is made anew begins. What an older consumer had told of that time is
	// told again; what nobody had told for longer is no news.
	noticePast = time.Hour
)

// addNoticesSQL keeps events until they are told. A type that has been quiet gets its turn in a second; one that was
// told of less than a minute ago keeps its time.
const addNoticesSQL = `-- taskrelay: add notices
WITH news AS (
  INSERT INTO {{schema}}.notice (id, biz_type, event, task_id, biz_id, attempts, reason, error, error_class, compensation, happened_at)
  SELECT n.id, n.biz_type, n.event, n.task_id, nullif(n.biz_id, ''), n.attempts, n.reason, n.error, n.error_class, n.compensation, n.at
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::int[], $7::text[], $8::text[], $9::text[],
    $10::text[], $11::timestamptz[])
    AS n(id, biz_type, event, task_id, biz_id, attempts, reason, error, error_class, compensation, at)
  ORDER BY n.id
  ON CONFLICT (id) DO NOTHING
  RETURNING biz_type
)
INSERT INTO {{schema}}.notice_turn AS t (biz_type, next_at)
SELECT DISTINCT w.biz_type, now() + $12::bigint * interval '1 microsecond' FROM news AS w ORDER BY w.biz_type
ON CONFLICT (biz_type) DO UPDATE SET next_at = excluded.next_at
WHERE t.next_at < now() AND NOT EXISTS (SELECT FROM {{schema}}.notice AS n WHERE n.biz_type = t.biz_type)`

// collector is the memory of collectNotices.
type collector struct {
	consumer jetstream.Consumer // nil: to be looked up
	strange  notices            // events that are none of ours
}

// An eventNotice is an event of a task as it was read from the stream.
type eventNotice struct {
	id, bizType, bizID, event              string
	task                                   int64
	attempts                               int
	reason, lastError, class, compensation string
	at                                     time.Time
}

// collectNotices copies events from the stream to the table notice, and acks them when they are there.
func (r *Relay) collectNotices(ctx context.Context) (time.Duration, error) {
	if !r.nc.IsConnected() {
		return time.Second, nil // readLanes says so
	}
	if r.collector.consumer == nil {
		c, err := r.noticeConsumer(ctx)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return time.Second, nil // watchStreams makes it
		}
		if err != nil {
			return 0, fmt.Errorf("consumer %s of %s: %w", r.names.NoticeConsumer(), r.names.EventStream(), err)
		}
		r.collector.consumer = c
	}
	msgs, err := r.fetchEvents(ctx)
	if err != nil {
		r.collector.consumer = nil // deleted, perhaps: look it up again
	}
	if len(msgs) > 0 {
		if aerr := r.addNotices(ctx, msgs); aerr != nil {
			return 0, aerr // they are delivered again after the ack wait
		}
	}
	if err != nil && ctx.Err() == nil {
		return 0, fmt.Errorf("read %s: %w", r.names.EventStream(), err)
	}
	return 0, nil
}

// noticeConsumer finds the durable consumer that all relays share, or makes it.
func (r *Relay) noticeConsumer(ctx context.Context) (jetstream.Consumer, error) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	stream, err := r.js.Stream(ctx, r.names.EventStream())
	if err != nil {
		return nil, err
	}
	c, err := stream.Consumer(ctx, r.names.NoticeConsumer())
	if !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return c, err
	}
	start := stream.CachedInfo().TimeStamp.Add(-noticePast) // the server's clock, as the messages have
	c, err = stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		Durable:       r.names.NoticeConsumer(),
		Description:   "taskrelay: events that people are told of",
		DeliverPolicy: jetstream.DeliverByStartTimePolicy,
		OptStartTime:  &start,
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       30 * time.Second,
		MaxDeliver:    -1,
		MaxAckPending: 4 * noticeBatch,
	})
	if errors.Is(err, jetstream.ErrConsumerExists) { // another relay, just now, with a start of its own
		return stream.Consumer(ctx, r.names.NoticeConsumer())
	}
	return c, err
}

// fetchEvents waits for one event, and takes with it what else is there.
func (r *Relay) fetchEvents(ctx context.Context) (msgs []jetstream.Msg, err error) {
	pull, cancel := context.WithTimeout(ctx, noticePull)
	defer cancel()
	take := func(batch jetstream.MessageBatch, err error) error {
		if err != nil {
			return err
		}
		for m := range batch.Messages() {
			msgs = append(msgs, m)
		}
		err = batch.Error()
		if errors.Is(err, nats.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, jetstream.ErrNoMessages) {
			return nil
		}
		return err
	}
	if err := take(r.collector.consumer.Fetch(1, jetstream.FetchContext(pull))); err != nil || len(msgs) == 0 {
		return msgs, err
	}
	return msgs, take(r.collector.consumer.FetchNoWait(noticeBatch))
}

func (r *Relay) addNotices(ctx context.Context, msgs []jetstream.Msg) error {
	var (
		ids, types, events, bizIDs, reasons, errs, classes, compensations []string
		tasks                                                             []int64
		attempts                                                          []int32
		ats                                                               []time.Time
	)
	seen := make(map[string]bool, len(msgs))
	for _, m := range msgs {
		n, ok := r.readEvent(m)
		if !ok || seen[n.id] {
			continue
		}
		seen[n.id] = true
		ids, types, events, tasks, bizIDs = append(ids, n.id), append(types, n.bizType), append(events, n.event), append(tasks, n.task), append(bizIDs, n.bizID)
		attempts, reasons, errs = append(attempts, int32(n.attempts)), append(reasons, n.reason), append(errs, n.lastError)
		classes, compensations, ats = append(classes, n.class), append(compensations, n.compensation), append(ats, n.at)
	}
	if len(ids) > 0 {
		if err := r.exec(ctx, addNoticesSQL, ids, types, events, tasks, bizIDs, attempts, reasons, errs, classes, compensations, ats,
			noticeLinger.Microseconds()); err != nil {
			return fmt.Errorf("add notices: %w", err)
		}
	}
	for _, m := range msgs {
		if err := m.Ack(); err != nil {
			return fmt.Errorf("ack an event: %w", err) // it comes again, and its id is known
		}
	}
	return nil
}

// readEvent reads what the relay has written; ok is false for what is not to be told. Anybody who may publish to
// events.> can send anything, so nothing here is trusted.
func (r *Relay) readEvent(m jetstream.Msg) (n eventNotice, ok bool) {
	h := m.Headers()
	text := func(name string) string { return headerText(h.Get(name)) }
	if h.Get(HeaderReplayed) != "" { // made again from the table: no news
		return n, false
	}
	n = eventNotice{id: text(jetstream.MsgIDHeader), bizType: h.Get(HeaderBizType), bizID: text(HeaderBizID), event: h.Get(HeaderEvent),
		reason: text(HeaderReason), lastError: text(HeaderError), class: text(HeaderErrorClass), compensation: text(HeaderCompensation)}
	n.attempts, _ = strconv.Atoi(h.Get(HeaderAttempts))
	n.attempts = min(max(n.attempts, 0), 1000)
	meta, merr := m.Metadata()
	id, err := strconv.ParseInt(h.Get(HeaderID), 10, 64)
	known := n.event == EventFailed || n.event == EventDead || n.event == EventCompensationFailed
	if merr != nil || err != nil || n.id == "" || !known || ValidateBizType(n.bizType) != nil || h.Get(HeaderInstallation) != r.installation {
		if r.collector.strange.due(time.Now()) {
			r.log.Warn().Str("subject", m.Subject()).Msg("event left out of the notices: it is none of this installation's")
		}
		return n, false
	}
	n.task, n.at = id, meta.Timestamp
	// A task that was not undone sends two events. The graver one says it all.
	return n, n.event != EventDead || n.compensation != "failed"
}
