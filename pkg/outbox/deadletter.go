package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
)

// Events that the relay publishes from the row to the stream TASKS_EVENTS.
const (
	EventFailed             = "failed"              // execute is over, compensation begins
	EventDead               = "dead"                // the task is dead
	EventCompensationFailed = "compensation_failed" // and was not undone
)

const (
	letterTick  = 250 * time.Millisecond
	letterBatch = 200
)

// letters is the memory of serveDeadLetters.
type letters struct {
	seen     uint64    // moves at the last look that found nothing
	replayed time.Time // the dead stream's creation for which all letters are known to be there
}

// A deadTask is a row that has died.
type deadTask struct {
	record
	attempts     int
	reason       string
	lastError    string
	errorClass   string
	firstAttempt *time.Time
	deadAt       *time.Time
	compensation string
}

const deadColumns = `t.id, t.created_at, t.biz_type, t.priority, t.biz_id, t.generation, t.phase, nullif(t.headers, '{}'), t.payload,
  coalesce(t.execute_attempts, t.attempt), coalesce(t.dead_reason, ''), coalesce(t.last_error, ''), coalesce(t.error_class, ''),
  t.first_started_at, t.dead_at, t.compensation`

const lettersDueSQL = `-- taskrelay: dead letters due
SELECT ` + deadColumns + `
FROM {{schema}}.task AS t JOIN unnest($1::text[], $2::text[]) AS l(biz_type, priority)
  ON l.biz_type = t.biz_type AND l.priority = t.priority
WHERE t.dead_at IS NOT NULL AND t.dead_lettered_at IS NULL
ORDER BY t.dead_at LIMIT $3::int`

const lettersOutSQL = `-- taskrelay: dead letters out
UPDATE {{schema}}.task AS t SET dead_lettered_at = now()
FROM unnest($1::bigint[], $2::int[]) AS c(id, generation)
WHERE t.id = c.id AND t.generation = c.generation AND t.status = 'dead'
RETURNING t.id`

// serveDeadLetters publishes letters and events of tasks that have died, from the table, as tasks are: the outbox again.
func (r *Relay) serveDeadLetters(ctx context.Context) (time.Duration, error) {
	moves := r.moves()
	if !r.nc.IsConnected() || r.halted() || moves == r.letters.seen {
		return letterTick, nil
	}
	_, types, priorities, _ := r.heldLanes(func(*lane) bool { return true })
	if len(types) == 0 {
		return letterTick, nil
	}
	if err := r.purgeLetters(ctx); err != nil {
		return 0, err
	}
	var dead []deadTask
	err := r.query(ctx, lettersDueSQL, []any{types, priorities, letterBatch}, scanDead(&dead))
	if err != nil {
		return 0, fmt.Errorf("read dead letters: %w", err)
	}
	if err := r.publishLetters(ctx, dead, false); err != nil {
		return 0, err
	}
	switch len(dead) {
	case 0:
		r.letters.seen = moves
	case letterBatch:
		return 0, nil
	}
	return letterTick, nil
}

func scanDead(to *[]deadTask) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var d deadTask
		err := rows.Scan(&d.id, &d.created, &d.bizType, &d.priority, &d.bizID, &d.generation, &d.phase, &d.headers, &d.payload,
			&d.attempts, &d.reason, &d.lastError, &d.errorClass, &d.firstAttempt, &d.deadAt, &d.compensation)
		*to = append(*to, d)
		return err
	}
}

// publishLetters publishes letters and events and marks the rows of which all are stored. A row that has moved on
// meanwhile (requeued) must not keep a letter: it is deleted again by its sequence.
func (r *Relay) publishLetters(ctx context.Context, dead []deadTask, replay bool) error {
	if len(dead) == 0 {
		return nil
	}
	type outcome struct {
		letter published
		events []published
	}
	outcomes := make([]outcome, len(dead))
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range dead {
		d, o := &dead[i], &outcomes[i]
		id := messageID(r.installation, d.id, d.created.UnixMicro(), d.generation, 0)
		if replay {
			id += ".replay." + strconv.FormatInt(r.letters.replayed.UnixNano(), 36)
		}
		all.Add(1)
		r.pub.publish(r.letter(d, replay), r.names.DeadStream(), id+".dead", func(p published) {
			o.letter = p
			all.Done()
		})
		if replay {
			continue
		}
		for _, e := range d.events() {
			all.Add(1)
			r.pub.publish(r.event(e, d), r.names.EventStream(), id+"."+e, func(p published) {
				mu.Lock()
				o.events = append(o.events, p)
				mu.Unlock()
				all.Done()
			})
		}
	}
	all.Wait()

	var highest uint64
	for i := range outcomes {
		highest = max(highest, outcomes[i].letter.sequence)
	}
	r.mu.Lock()
	r.deadHighest = max(r.deadHighest, highest)
	r.mu.Unlock()

	var ids []int64
	var gens []int32
	stored := make(map[int64]int)
	var failure error
	for i := range dead {
		err := outcomes[i].letter.err
		for _, e := range outcomes[i].events {
			err = errors.Join(err, e.err)
		}
		if err != nil {
			failure = fmt.Errorf("publish dead letter of task %d (%s): %w", dead[i].id, dead[i].bizType, err)
			continue
		}
		ids, gens = append(ids, dead[i].id), append(gens, int32(dead[i].generation))
		stored[dead[i].id] = i
	}
	if len(ids) == 0 {
		return failure
	}
	sortTogether(ids, gens)
	sql := lettersOutSQL
	if replay {
		sql = lettersStillSQL
	}
	err := r.query(ctx, sql, []any{ids, gens}, func(rows pgx.Rows) error {
		var id int64
		err := rows.Scan(&id)
		delete(stored, id)
		return err
	})
	if err != nil {
		return fmt.Errorf("mark dead letters: %w", err) // they are published again under the same ids
	}
	r.mu.Lock()
	r.counts.DeadLetters += int64(len(ids) - len(stored))
	r.mu.Unlock()
	for _, i := range stored {
		if err := r.deleteMessage(ctx, outcomes[i].letter.sequence); err != nil {
			return err
		}
		r.log.Info().Int64("task_id", dead[i].id).Str("biz_type", dead[i].bizType).Msg("dead letter taken back, the task has moved on")
	}
	return failure
}

func (d *deadTask) events() []string {
	if d.compensation == "failed" {
		return []string{EventDead, EventCompensationFailed}
	}
	return []string{EventDead}
}

// letter makes a dead letter: the payload byte for byte, what happened in the headers. One that would not fit loses
// the row's headers first, then the end of its body, and says so.
func (r *Relay) letter(d *deadTask, replay bool) *nats.Msg {
	m := &nats.Msg{Subject: r.names.DeadSubject(d.bizType, d.id), Header: make(nats.Header, 20), Data: d.payload}
	if d.headers != nil {
		addRowHeaders(m.Header, d.headers)
	}
	r.describeDead(m.Header, d)
	if replay {
		m.Header.Set(HeaderReplayed, "true")
	}
	const headerLimit = 64 << 10 // the server's (10097)
	room := int(r.nc.MaxPayload()) - 256
	if size := headerSize(m.Header); size > headerLimit-1024 || size+len(m.Data) > room {
		m.Header = make(nats.Header, 20)
		r.describeDead(m.Header, d)
		if replay {
			m.Header.Set(HeaderReplayed, "true")
		}
		cut := "headers"
		if rest := room - headerSize(m.Header); rest < len(m.Data) {
			m.Data = m.Data[:max(rest, 0)]
			cut = "headers, body"
		}
		m.Header.Set(HeaderCut, cut)
	}
	return m
}

func (r *Relay) describeDead(h nats.Header, d *deadTask) {
	r.addTaskHeaders(h, new(taskHeaders), &d.record)
	h[HeaderAttempts] = []string{strconv.Itoa(d.attempts)}
	h[HeaderReason] = []string{d.reason}
	h[HeaderError] = []string{headerText(d.lastError)}
	h[HeaderErrorClass] = []string{headerText(d.errorClass)}
	h[HeaderFirstAttemptAt] = []string{headerTime(d.firstAttempt)}
	h[HeaderDeadAt] = []string{headerTime(d.deadAt)}
	h[HeaderCompensation] = []string{d.compensation}
	h[HeaderRequeue] = []string{"taskrelay requeue " + strconv.FormatInt(d.id, 10)}
}

func headerSize(h nats.Header) (n int) {
	for k, v := range h {
		n += len(k) + 4
		for _, s := range v {
			n += len(s)
		}
	}
	return n
}

// event makes the message of an event: no payload, so that notifiers and logs cannot leak it.
func (r *Relay) event(name string, d *deadTask) *nats.Msg {
	m := &nats.Msg{Subject: r.names.EventSubject(d.bizType, name), Header: make(nats.Header, 20)}
	r.describeDead(m.Header, d)
	if name == EventFailed { // it is not dead yet
		m.Header.Del(HeaderRequeue)
		m.Header.Del(HeaderDeadAt)
	}
	m.Header.Set(HeaderEvent, name)
	return m
}

const purgeDueSQL = `-- taskrelay: letters to purge
SELECT p.task_id, p.biz_type, coalesce(p.generation, 2147483647) FROM {{schema}}.letter_purge AS p ORDER BY p.task_id LIMIT $1::int`

const purgedSQL = `-- taskrelay: letters purged
DELETE FROM {{schema}}.letter_purge AS p USING unnest($1::bigint[], $2::int[]) AS d(id, generation)
WHERE p.task_id = d.id AND coalesce(p.generation, 2147483647) = d.generation`

// purgeLetters takes letters out of the stream whose tasks were deleted or discarded.
func (r *Relay) purgeLetters(ctx context.Context) error {
	type deleted struct {
		id         int64
		bizType    string
		generation int // letters from this one on stay: the task was brought back and has died anew
	}
	var due []deleted
	err := r.query(ctx, purgeDueSQL, []any{letterBatch}, func(rows pgx.Rows) error {
		var d deleted
		err := rows.Scan(&d.id, &d.bizType, &d.generation)
		due = append(due, d)
		return err
	})
	if err != nil || len(due) == 0 {
		return err
	}
	ids, generations := make([]int64, len(due)), make([]int32, len(due))
	for i, d := range due {
		if err := r.deleteLetter(ctx, d.bizType, d.id, d.generation); err != nil {
			return err
		}
		ids[i], generations[i] = d.id, int32(d.generation)
	}
	if err := r.exec(ctx, purgedSQL, ids, generations); err != nil {
		return fmt.Errorf("letters purged: %w", err)
	}
	return nil
}

// deleteLetter removes the letter of a task that was requeued, unless a newer one has taken its place.
func (r *Relay) deleteLetter(ctx context.Context, bizType string, id int64, generation int) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	m, err := r.askLeader(ctx, r.names.DeadStream(), map[string]any{"last_by_subj": r.names.DeadSubject(bizType, id)})
	if err != nil {
		return fmt.Errorf("delete dead letter of task %d: %w", id, err)
	}
	if m == nil {
		return nil
	}
	if gen, err := strconv.Atoi(m.header.Get(HeaderGeneration)); err == nil && gen >= generation {
		return nil
	}
	return r.deleteMessage(ctx, m.sequence)
}

func (r *Relay) deleteMessage(ctx context.Context, sequence uint64) error {
	err := r.deleteFromStream(ctx, r.names.DeadStream(), sequence)
	if err != nil {
		return fmt.Errorf("delete dead letter %d: %w", sequence, err)
	}
	return nil
}

func sortTogether(ids []int64, gens []int32) {
	order := make([]int, len(ids))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return int(ids[a] - ids[b]) })
	i2, g2 := slices.Clone(ids), slices.Clone(gens)
	for to, from := range order {
		ids[to], gens[to] = i2[from], g2[from]
	}
}
