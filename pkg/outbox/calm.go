package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/nats-io/nats.go"
)

// Most polls of a quiet night find nothing. A snapshot that reads as the last one did proves that nothing was
// committed since, so such a poll is a single cheap query: no lane is read, and neither are the work list nor the dead
// letters.

// calm is what is known when a read has found nothing.
type calm struct {
	snapshot string             // as of that read; "": not known
	due      pgtype.Timestamptz // when the next scheduled task is due, invalid: none is
	moved    uint64             // counts snapshots that differed from the one before
}

// nothingNew reports whether reading the lanes would find nothing.
func (r *Relay) nothingNew(target position) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen != target.snapshot {
		r.seen = target.snapshot
		r.calm.moved++
	}
	return r.calm.snapshot == target.snapshot && (!r.calm.due.Valid || before(target.at, r.calm.due))
}

// noteCalm is called after a read that found nothing: should the next snapshot be the same, it need not be read again
// before the next scheduled task is due.
func (r *Relay) noteCalm(ctx context.Context, target position) error {
	r.mu.Lock()
	quiet := r.calmSeen == target.snapshot // the second time: a busy database is not asked in vain
	r.calmSeen = target.snapshot
	var types, priorities []string
	var at []pgtype.Timestamptz
	for _, l := range r.lanes {
		types, priorities, at = append(types, l.bizType), append(priorities, l.priority), append(at, l.pos.at)
		// A lane that was not read to its end just now must be read again: its position says so. The answer that ended
		// its round or its wait may have come since.
		quiet = quiet && l.round == nil && len(l.again) == 0 && l.waitUntil.IsZero() &&
			(l.pos.snapshot == target.snapshot || !r.settings.mayPublish(l.laneKey))
	}
	lanes := r.lanesTaken
	r.mu.Unlock()
	if !quiet {
		return nil
	}
	var due pgtype.Timestamptz
	err := r.queryCached(ctx, nextDueSQL, []any{types, priorities, at}, func(rows pgx.Rows) error { return rows.Scan(&due) })
	if err != nil {
		return fmt.Errorf("next due: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if lanes == r.lanesTaken { // a lane taken meanwhile has not been read
		r.calm.snapshot, r.calm.due = target.snapshot, due
	}
	return nil
}

// stir makes the next poll read all lanes whatever the snapshot says; r.mu is held.
func (r *Relay) stir() {
	r.calm.snapshot, r.calmSeen = "", ""
	r.lanesTaken++
}

// moves counts commits, roughly: it has not changed if nothing was committed since it was read last.
func (r *Relay) moves() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calm.moved
}

// WakeUp tells the relays of a namespace that something was committed, by an empty core NATS message, so that they do
// not wait for their next poll. Send it after the commit. It may be lost; nothing depends on it.
// Do not send one for each of thousands of tasks: one after the last is enough.
func WakeUp(nc *nats.Conn, namespace string) error {
	if err := nc.Publish(Names{Namespace: namespace}.Wake(), nil); err != nil {
		return fmt.Errorf("wake up relays: %w", err)
	}
	return nil
}
