package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// found is what a search brought.
type found struct {
	tasks []outbox.Task
	more  bool  // there are more than were asked for
	down  int64 // when time ran out: ids below this one were not looked at
}

const (
	firstWindow = 20_000
	lastWindow  = 4_000_000
	fewOfAType  = 100_000
	// Ids follow created_at, but for transactions that overlap and a clock that a failover set back: a search by age
	// looks at the tasks of this long beside its bounds too.
	ageSlack = 10 * time.Minute
)

// search lists at most limit tasks. What no index finds is read in windows of ids, from the newest back, so that
// whatever time allows is shown: one statement over 10 M rows would end with nothing. slow is called each few seconds.
func (s *session) search(ctx context.Context, f outbox.Filter, limit int, slow func(searched int64)) (found, error) {
	want := limit + 1 // one more than asked for tells whether there are more
	first, last, err := s.idRange(ctx)
	if err != nil {
		return found{}, err
	}
	if f.OlderThan > ageSlack {
		bound, err := s.idAt(ctx, first, last+1, f.OlderThan-ageSlack)
		if err != nil {
			return found{}, err
		}
		if f.Before == 0 || bound < f.Before {
			f.Before = max(bound, 1)
		}
	}
	if f.NewerThan > 0 {
		if first, err = s.idAt(ctx, first, last+1, f.NewerThan+ageSlack); err != nil {
			return found{}, err
		}
	}
	top := last + 1
	if f.Before > 0 {
		top = min(top, f.Before)
	}
	window := f
	window.From, window.Before = max(first, top-firstWindow, 1), max(top, 1)
	tasks, err := s.pages(ctx, window, want)
	if err != nil && !timedOut(err) || len(tasks) >= want || window.From <= first {
		return trimmed(tasks, limit), err
	}
	index := !f.Scans()
	if !index && f.BizType != "" {
		if index, err = s.few(ctx, f.BizType); err != nil {
			return found{}, err
		}
	}
	if index {
		f.From = 0
		tasks, err := s.pages(ctx, f, want)
		return trimmed(tasks, limit), err
	}
	size, spoken := int64(firstWindow), time.Now()
	for len(tasks) < want && window.From > first {
		window.From, window.Before = max(first, window.From-size, 1), window.From
		start := time.Now()
		page, err := s.pages(ctx, window, want-len(tasks))
		if timedOut(err) {
			r := trimmed(tasks, limit)
			r.down = window.Before
			return r, nil
		}
		if err != nil {
			return found{}, err
		}
		tasks = append(tasks, page...)
		switch took := time.Since(start); {
		case took < 250*time.Millisecond:
			size = min(2*size, lastWindow)
		case took > time.Second:
			size = max(size/2, firstWindow)
		}
		if time.Since(spoken) > 3*time.Second {
			spoken = time.Now()
			slow(last - window.From)
		}
	}
	return trimmed(tasks, limit), nil
}

func trimmed(tasks []outbox.Task, limit int) found {
	if len(tasks) > limit {
		return found{tasks: tasks[:limit], more: true}
	}
	return found{tasks: tasks}
}

// pages lists up to limit tasks, at most 1,000 a statement.
func (s *session) pages(ctx context.Context, f outbox.Filter, limit int) ([]outbox.Task, error) {
	var all []outbox.Task
	for len(all) < limit {
		f.Limit = min(limit-len(all), 1000)
		var page []outbox.Task
		err := s.read(ctx, func(tx pgx.Tx) (err error) {
			page, err = s.schema.List(ctx, tx, f)
			return err
		})
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if len(page) < f.Limit {
			break
		}
		f.Before = page[len(page)-1].ID
	}
	return all, nil
}

// read runs f in a transaction that only reads, whose statements the server itself ends a second before --timeout does: a
// client that has given up would leave them running. Without sequential scans, because a plan made for a table that
// was small when it was last analyzed reads all of it; without JIT, which compiles for longer than these run.
func (s *session) read(ctx context.Context, f func(pgx.Tx) error) error {
	settings := "SET LOCAL jit = off; SET LOCAL enable_seqscan = off"
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		settings += fmt.Sprintf("; SET LOCAL statement_timeout = %d", max(1, left.Milliseconds()-min(1000, left.Milliseconds()/10)))
	}
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}
	return pgx.BeginTxFunc(ctx, s.pool, options, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, settings); err != nil {
			return err
		}
		return f(tx)
	})
}

const queryCanceled = "57014"

// timedOut says that the server has ended a statement, or the context has.
func timedOut(err error) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return ok && e.Code == queryCanceled || errors.Is(err, context.DeadlineExceeded)
}

const idRangeSQL = `-- taskrelay cli: first and last id
SELECT coalesce((SELECT min(t.id) FROM {{schema}}.task AS t), 1), coalesce((SELECT max(t.id) FROM {{schema}}.task AS t), 0)`

func (s *session) idRange(ctx context.Context) (first, last int64, err error) {
	err = s.read(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, s.schema.Render(idRangeSQL)).Scan(&first, &last)
	})
	return first, last, err
}

const idAtSQL = `-- taskrelay cli: was this id written before
SELECT t.id, t.created_at < now() - $2::bigint * interval '1 microsecond'
FROM {{schema}}.task AS t
WHERE t.id >= $1::bigint
ORDER BY t.id
LIMIT 1`

// idAt finds the first id from low on that was written within the last age; high if there is none. created_at has no
// index, so it halves the range of ids: some thirty probes.
func (s *session) idAt(ctx context.Context, low, high int64, age time.Duration) (int64, error) {
	err := s.read(ctx, func(tx pgx.Tx) error {
		for low < high {
			middle := low + (high-low)/2
			var id int64
			var before bool
			err := tx.QueryRow(ctx, s.schema.Render(idAtSQL), middle, age.Microseconds()).Scan(&id, &before)
			switch {
			case errors.Is(err, pgx.ErrNoRows):
				high = middle
			case err != nil:
				return err
			case before:
				low = id + 1
			default:
				high = middle
			}
		}
		return nil
	})
	return high, err
}

const fewSQL = `-- taskrelay cli: has the type few tasks
SELECT count(*) < $2::bigint FROM (SELECT FROM {{schema}}.task AS t WHERE t.biz_type = $1::text LIMIT $2::bigint) AS s`

// few says that a type has so few tasks that its index is read faster than the table from its end.
func (s *session) few(ctx context.Context, bizType string) (few bool, err error) {
	err = s.read(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, s.schema.Render(fewSQL), bizType, fewOfAType).Scan(&few)
	})
	return few, err
}

// count writes a number with its noun.
func count(n int64, noun string) string {
	digits := fmt.Sprint(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = string(slices.Insert([]byte(digits), i, ','))
	}
	if n == 1 {
		return digits + " " + noun
	}
	return digits + " " + noun + "s"
}
