package outbox

import (
	"testing"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

type countedSpan struct {
	noop.Span
	ended int
	code  codes.Code
}

func (s *countedSpan) End(...trace.SpanEndOption)       { s.ended++ }
func (s *countedSpan) SetStatus(c codes.Code, _ string) { s.code = c }

// What is in flight when its lane goes has no answer that counts: its span ends with the lane, once.
func TestSpanOfADroppedLanesPageEnds(t *testing.T) {
	span := new(countedSpan)
	l := &lane{laneKey: laneKey{"A", PriorityLow}, round: &round{}, tally: new(tally)}
	l.pages = []*page{{left: 1, sent: pageSent{at: time.Now(), span: span}}, {left: 1}}
	r := &Relay{lanes: map[laneKey]*lane{l.laneKey: l}}
	r.dropLane(l, "lease lost")
	r.dropLane(l, "lease lost")
	r.answered(&parcel{lane: l, page: l.pages[0]}, published{verdict: acked})
	if span.ended != 1 || span.code != codes.Error {
		t.Errorf("the span has ended %d times, with status %v", span.ended, span.code)
	}
}
