package outbox

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// oddStream has a consumer for each lane, of which some cannot be asked for and some do not know their messages.
type oddStream struct {
	jetstream.Stream
	holds   map[string]uint64 // by subject
	odd     map[string]bool   // consumers that do not answer
	deleted []string
}

type oddConsumer struct {
	jetstream.Consumer
	info *jetstream.ConsumerInfo
}

func (c oddConsumer) CachedInfo() *jetstream.ConsumerInfo { return c.info }

func (s *oddStream) Consumer(_ context.Context, name string) (jetstream.Consumer, error) {
	if s.odd[name] {
		return nil, errors.New("no leader")
	}
	return oddConsumer{info: &jetstream.ConsumerInfo{Name: name, Config: jetstream.ConsumerConfig{AckWait: time.Second}}}, nil
}

func (s *oddStream) Info(context.Context, ...jetstream.StreamInfoOpt) (*jetstream.StreamInfo, error) {
	return &jetstream.StreamInfo{State: jetstream.StreamState{Subjects: s.holds}}, nil
}

func (s *oddStream) DeleteConsumer(_ context.Context, name string) error {
	if name == "C-low" {
		return errors.New("may not be deleted")
	}
	s.deleted = append(s.deleted, name)
	return nil
}

// One lane that cannot be looked at does not keep the others from it.
func TestOneOddLaneDoesNotHideTheOrphansOfOthers(t *testing.T) {
	nc := pretender{func(string) string { return "" }}.connect(t, func(*nats.Conn, *nats.Subscription, error) {})
	r := &Relay{nc: nc, progress: map[string]time.Time{}}
	s := &oddStream{holds: map[string]uint64{}, odd: map[string]bool{"A-low": true}}
	var held []*lane
	for _, bizType := range []string{"A", "B", "C", "D"} {
		held = append(held, &lane{laneKey: laneKey{bizType, PriorityLow}, orphans: time.Now().Add(-time.Hour)})
		s.holds[r.names.Subject(bizType, PriorityLow)] = 3
	}
	err := r.findOrphans(t.Context(), s, held)
	if err == nil || !strings.Contains(err.Error(), "orphans of A.low: no leader") {
		t.Errorf("the error is %v, want that of the first odd lane", err)
	}
	if got := strings.Join(s.deleted, " "); got != "B-low D-low" {
		t.Errorf("deleted %q, want those of B and D", got)
	}
	if _, ok := r.progress[loopReconcile]; !ok {
		t.Error("looking through many lanes passes for a loop that hangs")
	}
}
