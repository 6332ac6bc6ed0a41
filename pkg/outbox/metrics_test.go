package outbox

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/exemplar"
)

func newMeteredLane(tb testing.TB, provider metric.MeterProvider) (*meter, *lane, []pageRow, position) {
	tb.Helper()
	r := &Relay{cfg: RelayConfig{MeterProvider: provider}}
	r.settings.known = map[string]bool{"ORDER_PAYMENT": true}
	m, err := newMeter(r)
	if err != nil {
		tb.Fatal(err)
	}
	now := time.Now()
	l := &lane{laneKey: laneKey{"ORDER_PAYMENT", PriorityLow}, tally: m.of("ORDER_PAYMENT")}
	rows := make([]pageRow, 500)
	for i := range rows {
		rows[i].created = now.Add(-time.Duration(i) * time.Millisecond)
	}
	return m, l, rows, position{at: pgtype.Timestamptz{Time: now, Valid: true}}
}

// What a page of 500 costs, all of its answers included.
func BenchmarkMeterPage(b *testing.B) {
	for name, provider := range map[string]metric.MeterProvider{
		"off": nil, "on": sdk.NewMeterProvider(sdk.WithReader(sdk.NewManualReader()), sdk.WithExemplarFilter(exemplar.AlwaysOffFilter)),
	} {
		b.Run(name, func(b *testing.B) {
			m, l, rows, target := newMeteredLane(b, provider)
			p := &page{}
			b.ReportAllocs()
			for b.Loop() {
				m.polled(true, nil, time.Millisecond)
				m.sent(l, p, rows, target)
				for range rows {
					l.tally.answered(published{verdict: acked})
				}
				m.stored(l, p)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/500, "ns/task")
		})
	}
}

func TestCountingAPageAllocatesNothing(t *testing.T) {
	m, l, rows, target := newMeteredLane(t, sdk.NewMeterProvider(sdk.WithReader(sdk.NewManualReader()), sdk.WithExemplarFilter(exemplar.AlwaysOffFilter)))
	p := &page{}
	n := testing.AllocsPerRun(100, func() {
		m.polled(true, nil, time.Millisecond)
		m.sent(l, p, rows, target)
		l.tally.answered(published{verdict: acked})
		m.stored(l, p)
	})
	if n != 0 {
		t.Errorf("got %v allocations per page, want 0", n)
	}
	if got, want := p.sent.lag, 499*time.Millisecond; got < want || got > want+time.Second {
		t.Errorf("lag of the page: got %v, want that of its oldest task, %v", got, want)
	}
}

// A type that becomes known gets a label of its own, and no counter falls.
func TestATypeThatBecomesKnownKeepsWhatItHadCounted(t *testing.T) {
	m, l, _, _ := newMeteredLane(t, nil)
	l.tally.answered(published{verdict: acked})
	if got := m.sum(nil)[otherType][0]; got != 1 {
		t.Errorf("published of others: got %d, want 1", got)
	}
	l.tally.answered(published{verdict: acked})
	totals := m.sum(map[string]bool{"ORDER_PAYMENT": true})
	if totals[otherType][0] != 1 || totals["ORDER_PAYMENT"][0] != 1 {
		t.Errorf("got %d of others and %d of the type, want 1 and 1", totals[otherType][0], totals["ORDER_PAYMENT"][0])
	}
}

func TestTraceParentOfARow(t *testing.T) {
	for headers, want := range map[string]string{
		`{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}`: "b7ad6b7169203331",
		`{"traceparent": "garbage"}`:      "0000000000000000",
		`{"traceparent": 7}`:              "0000000000000000",
		`{"tenant": "the \"traceparent"}`: "0000000000000000",
		``:                                "0000000000000000",
	} {
		if got := rowTrace([]byte(headers)).SpanID().String(); got != want {
			t.Errorf("%s: got %s, want %s", headers, got, want)
		}
	}
}
