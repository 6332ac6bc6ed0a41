package command

import (
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/exemplar"
)

func newMeteredAttempt(tb testing.TB, provider metric.MeterProvider) (*meter, *settlement) {
	tb.Helper()
	w := &Worker{epoch: time.Now(), cfg: WorkerConfig{MeterProvider: provider}}
	m, err := newMeter(w)
	if err != nil {
		tb.Fatal(err)
	}
	a := &attempt{lane: &lane{d: &dispatcher{tally: newTally("ORDER_PAYMENT")}}, phase: PhaseExecute, number: 1, started: 1}
	return m, &settlement{a: a, outcome: outcomeSucceeded, logged: true, counted: true, elapsed: 3 * time.Millisecond}
}

// A first attempt that succeeds is the most expensive one: three histograms.
func BenchmarkMeter(b *testing.B) {
	for name, provider := range map[string]metric.MeterProvider{
		"off": nil, "on": sdk.NewMeterProvider(sdk.WithReader(sdk.NewManualReader()), sdk.WithExemplarFilter(exemplar.AlwaysOffFilter)),
	} {
		b.Run(name, func(b *testing.B) {
			m, s := newMeteredAttempt(b, provider)
			b.ReportAllocs()
			for b.Loop() {
				m.report(s, actSucceeded)
			}
		})
	}
}

func TestCountingAnAttemptAllocatesNothing(t *testing.T) {
	m, s := newMeteredAttempt(t, sdk.NewMeterProvider(sdk.WithReader(sdk.NewManualReader()), sdk.WithExemplarFilter(exemplar.AlwaysOffFilter)))
	if n := testing.AllocsPerRun(1000, func() { m.report(s, actSucceeded) }); n != 0 {
		t.Errorf("got %v allocations per attempt, want 0", n)
	}
}

// A new outcome or reason that the counters do not know would vanish.
func TestEveryOutcomeAndReasonIsCounted(t *testing.T) {
	for _, outcome := range outcomes {
		y := newTally("A")
		y.attempt(PhaseCompensate, outcome)
		var n int64
		for i := range y.attempts[1] {
			n += y.attempts[1][i].Load()
		}
		if n != 1 {
			t.Errorf("outcome %s: counted %d times, want once", outcome, n)
		}
	}
	m, s := newMeteredAttempt(t, nil)
	s.outcome = outcomeFailed
	for _, reason := range []string{reasonMaxAttempts, reasonPermanent, reasonDecode, reasonLost, reasonCancelled, reasonCompensationFailed} {
		s.reason = reason
		m.report(s, actDead)
	}
	s.outcome, s.a.phase, s.reason = outcomeSucceeded, PhaseCompensate, ""
	m.report(s, actDead)
	for i := range deadReasons {
		if n := s.a.lane.d.tally.dead[i].Load(); n != 1 {
			t.Errorf("reason %s: counted %d times, want once", deadReasons[i], n)
		}
	}
}
