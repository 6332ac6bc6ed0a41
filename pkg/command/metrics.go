package command

import (
	"context"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// scope names this package to OpenTelemetry.
const scope = "github.com/taskrelay/taskrelay/pkg/command"

// meter counts what a worker does. An attempt adds to atomics, which become metrics when somebody asks, and gives a
// value to one to three histograms under labels made beforehand. [BenchmarkMeter: ns and no allocation.]
type meter struct {
	w     *Worker
	meter metric.Meter

	duration, wait, endToEnd metric.Float64Histogram

	settled, failedTries atomic.Int64 // write-backs
}

// tally counts for one biz type.
type tally struct {
	attempts [2][len(outcomes)]atomic.Int64 // by phase and outcome
	dead     [len(deadReasons)]atomic.Int64
	phases   [2][]metric.RecordOption // labels: type and phase
	bizType  []metric.RecordOption    // label: type
}

// outcomes as task_attempt has them.
var outcomes = [...]string{outcomeSucceeded, outcomeFailed, outcomeTimeout, outcomePanic, outcomeLost, outcomeSnoozed,
	outcomeReleased, outcomeCancelled, outcomeStale}

// deadReasons are those of a worker. compensated: given up and undone, whatever the reason was.
var deadReasons = [...]string{reasonMaxAttempts, reasonPermanent, reasonDecode, reasonLost, reasonCancelled, reasonCompensationFailed, "compensated"}

var phases = [...]string{PhaseExecute, PhaseCompensate}

func newTally(bizType string) *tally {
	t := attribute.String("biz_type", bizType)
	y := &tally{bizType: label(t)}
	for i, phase := range phases {
		y.phases[i] = label(t, attribute.String("phase", phase))
	}
	return y
}

func label(kv ...attribute.KeyValue) []metric.RecordOption {
	return []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}

// index of a word in a short list of constants. The usual word, succeeded, comes first.
func index(list []string, word string) int {
	for i := range list {
		if list[i] == word {
			return i
		}
	}
	return -1
}

// attempt counts one row of task_attempt.
func (y *tally) attempt(phase, outcome string) {
	if i := index(outcomes[:], outcome); i >= 0 {
		y.attempts[phaseIndex(phase)][i].Add(1)
	}
}

func phaseIndex(phase string) int {
	if phase == PhaseCompensate {
		return 1
	}
	return 0
}

// What handlers take, in seconds: HTTP calls mostly, up to their timeout and beyond.
var handlerBuckets = metric.WithExplicitBucketBoundaries(.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300)

// What tasks wait for and take in all, in seconds: up to a day of retries.
var waitBuckets = metric.WithExplicitBucketBoundaries(.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 86400)

func newMeter(w *Worker) (*meter, error) {
	m := &meter{w: w}
	provider := w.cfg.MeterProvider
	if provider == nil {
		provider = noop.NewMeterProvider()
	}
	m.meter = provider.Meter(scope)
	var err error
	histogram := func(to *metric.Float64Histogram, name, description string, buckets metric.HistogramOption) {
		if err == nil {
			*to, err = m.meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description), buckets)
		}
	}
	histogram(&m.duration, "taskrelay.task.duration", "Time a handler ran, one value per attempt that is settled.", handlerBuckets)
	histogram(&m.wait, "taskrelay.task.wait", "Time from a task being due to the call of its handler, for first attempts of tasks nobody handed back.", waitBuckets)
	histogram(&m.endToEnd, "taskrelay.task.end_to_end", "Time from a task being due to its success, retries included.", waitBuckets)
	return m, err
}

// report counts a settled attempt.
func (m *meter) report(s *settlement, act string) {
	a, ctx := s.a, context.Background()
	y := a.lane.d.tally
	m.settled.Add(1)
	if s.logged {
		y.attempt(a.phase, s.outcome)
	}
	if a.started > 0 {
		m.duration.Record(ctx, s.elapsed.Seconds(), y.phases[phaseIndex(a.phase)]...)
		if a.number == 1 && a.generation == 0 && a.phase == PhaseExecute && s.counted {
			m.wait.Record(ctx, max(a.age+(a.started-a.claimed).Seconds(), 0), y.bizType...)
		}
	}
	compensating := a.phase == PhaseCompensate
	switch {
	case act == actSucceeded && !compensating:
		m.endToEnd.Record(ctx, max(a.age+(m.w.now()-a.claimed).Seconds(), 0), y.bizType...)
	case s.outcome == outcomeSucceeded && compensating:
		y.dead[len(deadReasons)-1].Add(1)
	case act == actDead || act == actFail:
		if i := index(deadReasons[:], s.reason); i >= 0 {
			y.dead[i].Add(1)
		}
	}
}

// observe offers the counters and gauges until the function it returns is called.
func (m *meter) observe() (stop func(), err error) {
	var all []metric.Observable
	counter := func(name, unit, description string) metric.Int64ObservableCounter {
		i, e := m.meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(description))
		if all = append(all, i); err == nil {
			err = e
		}
		return i
	}
	attempts := counter("taskrelay.task.attempts", "{attempt}", "Attempts by outcome: the rows of task_attempt.")
	dead := counter("taskrelay.tasks.dead", "{task}", "Tasks that ended dead, by reason.")
	writebacks := counter("taskrelay.writeback", "{writeback}",
		"Outcomes written back (ok), too late (stale), refused by Postgres, and statements that failed and were tried again (error).")
	claimed := counter("taskrelay.worker.claimed", "{attempt}", "Attempts claimed.")
	lost := counter("taskrelay.worker.lost_leases", "{lease}", "Leases of earlier attempts found ended: their worker died, was paused or cut off.")
	leaked := counter("taskrelay.worker.leaked_handlers", "{handler}", "Handlers that ignored their timeout for one more lease. They may run still.")
	late := counter("taskrelay.worker.late_handlers", "{handler}", "Handlers that returned after their attempt had been settled for them.")
	foreign := counter("taskrelay.worker.foreign_messages", "{message}", "Messages of another installation, left alone.")
	dropped := counter("taskrelay.worker.dropped_messages", "{message}",
		"Messages that stand for no row (no_row), or are newer than their row (newer): the database has lost its end.")
	slots, e := m.meter.Int64ObservableGauge("taskrelay.worker.slots", metric.WithUnit("{slot}"),
		metric.WithDescription("Slots for handlers of this worker, by type."))
	if all = append(all, slots); err == nil {
		err = e
	}
	if err != nil {
		return nil, err
	}
	registration, err := m.meter.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		for _, d := range m.w.dispatchers {
			t, y := attribute.String("biz_type", d.b.bizType), d.tally
			for p, phase := range phases {
				for o, outcome := range outcomes {
					// A counter that is first seen when it has risen has not risen yet for rate(). These two are there from
					// the start; the others would be 18 series a type for nothing.
					n, usual := y.attempts[p][o].Load(), p == 0 && (outcome == outcomeSucceeded || outcome == outcomeFailed)
					if n > 0 || usual {
						to.ObserveInt64(attempts, n, attrs(t, attribute.String("phase", phase), attribute.String("outcome", outcome)))
					}
				}
			}
			for i, reason := range deadReasons {
				to.ObserveInt64(dead, y.dead[i].Load(), attrs(t, attribute.String("reason", reason)))
			}
			busy := int64(d.busy())
			to.ObserveInt64(slots, busy, attrs(t, attribute.String("state", "busy")))
			to.ObserveInt64(slots, max(int64(d.slots)-busy, 0), attrs(t, attribute.String("state", "free")))
		}
		s := &m.w.stats
		for result, n := range map[string]int64{"ok": m.settled.Load(), "stale": s.Stale.Load(), "refused": s.Refused.Load(), "error": m.failedTries.Load()} {
			to.ObserveInt64(writebacks, n, attrs(attribute.String("result", result)))
		}
		to.ObserveInt64(claimed, s.Claimed.Load())
		to.ObserveInt64(lost, s.Lost.Load())
		to.ObserveInt64(leaked, s.Leaked.Load())
		to.ObserveInt64(late, s.Late.Load())
		to.ObserveInt64(foreign, s.Foreign.Load())
		to.ObserveInt64(dropped, s.Terminated.Load(), attrs(attribute.String("reason", "no_row")))
		to.ObserveInt64(dropped, s.Newer.Load(), attrs(attribute.String("reason", "newer")))
		return nil
	}, all...)
	if err != nil {
		return nil, err
	}
	return func() { _ = registration.Unregister() }, nil
}

func attrs(kv ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(kv...))
}
