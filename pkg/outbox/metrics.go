package outbox

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
)

// scope names this package to OpenTelemetry.
const scope = "github.com/taskrelay/taskrelay/pkg/outbox"

// otherType stands for every biz type that neither a worker nor an operator has made known: a producer that invents
// types must not invent time series.
const otherType = "other"

func typeLabel(bizType string, known map[string]bool) string {
	if known[bizType] {
		return bizType
	}
	return otherType
}

// meter counts what a relay does. The hot path adds to atomics; they become metrics when somebody asks. Only polls and
// pages, not tasks, give a value to a histogram.
type meter struct {
	r      *Relay
	meter  metric.Meter
	tracer trace.Tracer // nil: no spans

	pollTook, publishTook, lag metric.Float64Histogram
	polls                      [3]atomic.Int64 // by pollResult

	mu      sync.Mutex
	tallies map[string]*tally
	totals  map[string]*[tallied]int64 // by label, for ever growing

	notices map[[2]string]int64 // by notifier and result

	backlog backlogCache
	streams streamCache
}

const (
	pollRows = iota
	pollEmpty
	pollError
)

var pollResults = [...]string{"rows", "empty", "error"}

// tally counts for one biz type.
type tally struct {
	published, duplicates, failed atomic.Int64 // messages of pages
	listed, listedAgain, unlisted atomic.Int64 // messages of the work list
	reconciled                    atomic.Int64
	refused, oversize             atomic.Int64

	seen  [tallied]int64        // guarded by meter.mu: what is in totals already
	known []metric.RecordOption // label of the type
}

const tallied = 9

func (t *tally) read() [tallied]int64 {
	return [tallied]int64{t.published.Load(), t.duplicates.Load(), t.failed.Load(), t.listed.Load(), t.listedAgain.Load(),
		t.unlisted.Load(), t.reconciled.Load(), t.refused.Load(), t.oversize.Load()}
}

// answered counts the stream's answer to a message of a page.
func (t *tally) answered(p published) {
	switch {
	case p.verdict != acked:
		t.failed.Add(1)
	case p.duplicate:
		t.duplicates.Add(1)
	default:
		t.published.Add(1)
	}
}

// looked counts the stream's answer to a message of the work list.
func (t *tally) looked(p published) {
	switch {
	case p.verdict != acked:
		t.unlisted.Add(1)
	case p.duplicate:
		t.listedAgain.Add(1)
	default:
		t.listed.Add(1)
	}
}

// buried counts a task that is dead because nobody takes its message.
func (t *tally) buried(reason string) {
	if reason == "oversize" {
		t.oversize.Add(1)
		return
	}
	t.refused.Add(1)
}

// pageSent is what is remembered of a page until it is stored.
type pageSent struct {
	at   time.Time
	lag  time.Duration // of its oldest task, when it was read
	span trace.Span
}

// Seconds from 1 ms to 5 min: what a relay takes, and what it takes when something is wrong.
var relayBuckets = metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300)

var otherOption = label(attribute.String("biz_type", otherType))

func label(kv ...attribute.KeyValue) []metric.RecordOption {
	return []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}

func newMeter(r *Relay) (*meter, error) {
	m := &meter{r: r, tallies: make(map[string]*tally), notices: make(map[[2]string]int64), totals: make(map[string]*[tallied]int64)}
	provider := r.cfg.MeterProvider
	if provider == nil {
		provider = noop.NewMeterProvider()
	}
	if p := r.cfg.TracerProvider; p != nil {
		m.tracer = p.Tracer(scope)
	}
	m.meter = provider.Meter(scope)
	var err error
	histogram := func(to *metric.Float64Histogram, name, description string) {
		if err == nil {
			*to, err = m.meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description), relayBuckets)
		}
	}
	histogram(&m.pollTook, "taskrelay.relay.poll.duration", "Time a poll of the lanes spent in Postgres.")
	histogram(&m.publishTook, "taskrelay.relay.publish.duration", "Time from sending a batch to the stream's answer to its last message.")
	histogram(&m.lag, "taskrelay.relay.lag", "Time from a task being due to its message being stored: one value per batch, that of its oldest task.")
	return m, err
}

// of returns the tally of a type.
func (m *meter) of(bizType string) *tally {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.tallies[bizType]
	if t == nil {
		t = &tally{known: label(attribute.String("biz_type", bizType))}
		m.tallies[bizType] = t
	}
	return t
}

// noticed counts a notice, by who was to be told and what came of it.
func (m *meter) noticed(notifier, result string) {
	m.mu.Lock()
	m.notices[[2]string{notifier, result}]++
	m.mu.Unlock()
}

// polled counts a poll.
func (m *meter) polled(busy bool, err error, took time.Duration) {
	result := pollEmpty
	switch {
	case err != nil:
		result = pollError
	case busy:
		result = pollRows
	}
	m.polls[result].Add(1)
	m.pollTook.Record(context.Background(), took.Seconds())
}

// sent takes note of a page that goes out; r.mu is held. target is the poll's, so its instant is the newest one known:
// the age of a task is the difference of two instants of Postgres's clock.
func (m *meter) sent(l *lane, p *page, rows []pageRow, target position) {
	if len(rows) == 0 {
		return
	}
	oldest := rows[0].due()
	for i := range rows[1:] {
		if due := rows[1+i].due(); due.Before(oldest) {
			oldest = due
		}
	}
	p.sent = pageSent{at: time.Now(), lag: max(target.at.Time.Sub(oldest), 0), span: m.publishSpan(l, rows)}
}

// due is when the task was to be published first.
func (p *pageRow) due() time.Time {
	if p.runAt.Valid && p.runAt.InfinityModifier == pgtype.Finite && p.runAt.Time.After(p.created) {
		return p.runAt.Time
	}
	return p.created
}

// stored takes note of a page that the stream has answered whole; r.mu is held.
func (m *meter) stored(l *lane, p *page) {
	if p.sent.at.IsZero() {
		return
	}
	took := time.Since(p.sent.at)
	m.publishTook.Record(context.Background(), took.Seconds())
	m.lag.Record(context.Background(), (p.sent.lag + took).Seconds(), m.label(l)...)
	if p.sent.span != nil {
		p.sent.span.End()
	}
}

// label is the type's label, or that of the types nobody knows; r.mu is held.
func (m *meter) label(l *lane) []metric.RecordOption {
	if m.r.settings.known[l.bizType] {
		return l.tally.known
	}
	return otherOption
}

// knownTypes are those that have a label of their own.
func (m *meter) knownTypes() map[string]bool {
	m.r.mu.Lock()
	defer m.r.mu.Unlock()
	return m.r.settings.known // replaced as a whole, never changed
}

// sum adds what the tallies have counted since the last time to the totals of their labels. A type that becomes known
// later gets a label of its own then; what it had counted stays with the others, so that no counter ever falls.
func (m *meter) sum(known map[string]bool) map[string][tallied]int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	for bizType, t := range m.tallies {
		name := typeLabel(bizType, known)
		total := m.totals[name]
		if total == nil {
			total = new([tallied]int64)
			m.totals[name] = total
		}
		now := t.read()
		for i := range now {
			total[i] += now[i] - t.seen[i]
		}
		t.seen = now
	}
	totals := make(map[string][tallied]int64, len(m.totals))
	for name, total := range m.totals {
		totals[name] = *total
	}
	return totals
}

// observe offers the counters and gauges until the function it returns is called.
func (m *meter) observe() (stop func(), err error) {
	o := observer{meter: m.meter}
	polls := o.counter("taskrelay.relay.polls", "{poll}", "Polls of the lanes, by what they found.")
	published := o.counter("taskrelay.relay.published", "{message}",
		"Messages of tasks sent to the stream, by where the task was read (position, work_list) and the answer. error: sent again later.")
	reconciled := o.counter("taskrelay.relay.reconciled", "{task}",
		"Unfinished tasks found without a message and put on the work list: a guess that their message was lost.")
	dead := o.counter("taskrelay.tasks.dead", "{task}", "Tasks that ended dead, by reason.")
	letters := o.counter("taskrelay.relay.dead_letters", "{message}", "Dead letters stored.")
	notices := o.counter("taskrelay.notices", "{notice}", "Notices of dead and failed tasks: sent, or failed and tried again.")
	purged := o.counter("taskrelay.relay.purged", "{row}", "Rows deleted because of their age: finished tasks, and rows of the attempt log and the audit.")
	dropped := o.counter("taskrelay.relay.dropped_headers", "{header}", "Headers of rows that could not be sent: reserved, malformed or no string.")
	losses := o.counter("taskrelay.stream.losses", "{loss}",
		"Times the stream was seen to have lost messages, as counted in Postgres: the same for every relay.")
	lanes := o.gauge("taskrelay.relay.lanes", "{lane}", "Lanes this relay holds. waiting: the stream takes nothing of them at the moment.")
	read := o.floatGauge("taskrelay.relay.last_success.timestamp", "s", "When this relay last read its lanes.")
	o.backlog(&m.backlog)
	o.streams(&m.streams)
	if o.err != nil {
		return nil, o.err
	}
	registration, err := m.meter.RegisterCallback(func(ctx context.Context, to metric.Observer) error {
		for i, name := range pollResults {
			to.ObserveInt64(polls, m.polls[i].Load(), attrs(attribute.String("result", name)))
		}
		known := m.knownTypes()
		totals := m.sum(known)
		for _, bizType := range slices.Sorted(maps.Keys(totals)) {
			n, t := totals[bizType], attribute.String("biz_type", bizType)
			for i, result := range [...]string{"ok", "duplicate", "error"} {
				r := attribute.String("result", result)
				to.ObserveInt64(published, n[i], attrs(t, r, attribute.String("source", "position")))
				to.ObserveInt64(published, n[3+i], attrs(t, r, attribute.String("source", "work_list")))
			}
			to.ObserveInt64(reconciled, n[6], attrs(t))
			to.ObserveInt64(dead, n[7], attrs(t, attribute.String("reason", "refused")))
			to.ObserveInt64(dead, n[8], attrs(t, attribute.String("reason", "oversize")))
		}
		c := m.r.Counts()
		to.ObserveInt64(letters, c.DeadLetters)
		to.ObserveInt64(dropped, c.DroppedHeaders)
		to.ObserveInt64(purged, c.Purged, attrs(attribute.String("kind", "task")))
		to.ObserveInt64(purged, c.PurgedLog, attrs(attribute.String("kind", "log")))
		m.mu.Lock()
		for key, n := range m.notices {
			to.ObserveInt64(notices, n, attrs(attribute.String("notifier", key[0]), attribute.String("result", key[1])))
		}
		m.mu.Unlock()
		to.ObserveInt64(lanes, c.Lanes-c.LanesWaiting, attrs(attribute.String("state", "publishing")))
		to.ObserveInt64(lanes, c.LanesWaiting, attrs(attribute.String("state", "waiting")))
		m.r.mu.Lock()
		at, lost := m.r.lastRead, m.r.settings.losses
		m.r.mu.Unlock()
		to.ObserveInt64(losses, int64(lost))
		if !at.IsZero() {
			to.ObserveFloat64(read, float64(at.UnixMilli())/1000)
		}
		m.observeServers(ctx, to, known)
		return nil
	}, o.all...)
	if err != nil {
		return nil, err
	}
	return func() { _ = registration.Unregister() }, nil
}

func attrs(kv ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(kv...))
}

// observer makes instruments that are asked, and remembers them and the first error.
type observer struct {
	meter metric.Meter
	all   []metric.Observable
	err   error
}

func (o *observer) add(i metric.Observable, err error) {
	o.all = append(o.all, i)
	if o.err == nil {
		o.err = err
	}
}

func (o *observer) counter(name, unit, description string) metric.Int64ObservableCounter {
	i, err := o.meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(description))
	o.add(i, err)
	return i
}

func (o *observer) gauge(name, unit, description string) metric.Int64ObservableGauge {
	i, err := o.meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
	o.add(i, err)
	return i
}

func (o *observer) floatGauge(name, unit, description string) metric.Float64ObservableGauge {
	i, err := o.meter.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
	o.add(i, err)
	return i
}
