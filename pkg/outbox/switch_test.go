package outbox

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The view lag is dear: it is asked once a minute, also when that has failed.
func TestRefusedTypesAreAskedForOnceAMinute(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://u@127.0.0.1:1/d") // nobody listens
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	r := &Relay{pool: pool, settings: settings{strict: true}, lanes: map[laneKey]*lane{}}
	now := time.Now()
	if err := r.reportRefusedTypes(t.Context(), now); err != nil || !r.refusedAt.IsZero() {
		t.Errorf("without a type to ask for: %v", err)
	}
	r.lanes[laneKey{"A", PriorityLow}] = &lane{laneKey: laneKey{"A", PriorityLow}}
	if err := r.reportRefusedTypes(t.Context(), now); err == nil {
		t.Error("nobody was asked")
	}
	if err := r.reportRefusedTypes(t.Context(), now.Add(refusedTick-time.Second)); err != nil {
		t.Errorf("asked again within the minute: %v", err)
	}
	if err := r.reportRefusedTypes(t.Context(), now.Add(refusedTick)); err == nil {
		t.Error("not asked after a minute")
	}
}
