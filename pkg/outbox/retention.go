package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Retention says how long finished rows are kept. Types may have ages of their own in biz_type. The relay that deletes
// writes it to the table retention, for workers and people to read.
type Retention struct {
	Succeeded time.Duration // By default 30 days. AtOnce deletes a task when it succeeds and frees its biz id; Forever keeps it
	Cancelled time.Duration // By default 30 days
	Dead      time.Duration // By default Forever: until a person decides. A dead task goes only once its letter is out
	Attempts  time.Duration // of the attempt log. By default 90 days
	Audit     time.Duration // of the audit. By default 365 days
	Every     time.Duration // between two looks at what is due. By default 30 s
}

// Special ages.
const (
	AtOnce  time.Duration = -1 // as soon as the row is final
	Forever time.Duration = -2 // until a person decides
)

const day = 24 * time.Hour

func (k Retention) withDefaults() (Retention, error) {
	for _, f := range []struct {
		name      string
		age       *time.Duration
		byDefault time.Duration
	}{
		{"succeeded", &k.Succeeded, 30 * day}, {"cancelled", &k.Cancelled, 30 * day}, {"dead", &k.Dead, Forever},
		{"attempts", &k.Attempts, 90 * day}, {"audit", &k.Audit, 365 * day}, {"every", &k.Every, 30 * time.Second},
	} {
		if *f.age == 0 {
			*f.age = f.byDefault
		}
		if *f.age < Forever || f.name == "every" && *f.age < 0 {
			return k, fmt.Errorf("retention %s is %v: want a positive time, AtOnce or Forever", f.name, *f.age)
		}
	}
	return k, nil
}

// age is what the table holds: microseconds, null for Forever.
func age(d time.Duration) *int64 {
	us := d.Microseconds()
	switch d {
	case Forever:
		return nil
	case AtOnce:
		us = 0
	}
	return &us
}

// Deleting goes through the tables in the order of their keys, from a low mark that is saved. A look begins at the mark
// and ends at the first row that is only too young: what comes behind it ended later, mostly. A task that is unfinished and
// was written within ten minutes keeps the mark before it, so that it goes by its age and not by the full pass. Rows that
// a look passes because they are unfinished for longer, kept or locked, and types that keep for a shorter time, are left to
// the full pass: once a day, or as often as the shortest age in use asks for.
const (
	purgeBatch = 500   // rows of a statement
	purgeScan  = 2_000 // rows it looks at, once it finds few to delete
	purgeLease = 10 * time.Second
	purgeRenew = 2 * time.Second
	fullPass   = day
	fullEvery  = 20 // looks, at the most often
)

// sweeper is the memory of keepRetention, which alone uses it.
type sweeper struct {
	renewed time.Time
	seen    map[laneKey]openRound // rounds that were open at the last look
	table   int                   // that is swept, of sweeps; -1: none, wait
	full    bool                  // this pass goes through all of it
	low     [3]int64
	key     int64 // where the next page begins
	key2    int64
	end     int64 // where this pass of the table ends; 0: not known
	scan    int
	marked  bool // low is known: the first row to come back for was met
	midway  bool // this pass has not come to its end
	next    time.Time
	deleted int64    // in this pass
	saved   [2]int64 // of counts.Purged and PurgedLog, what the table has
}

type openRound struct {
	target string
	since  time.Time
}

// leasePurgeSQL makes us the relay that deletes, and writes down by which ages. A lease that ends in more than a minute is
// none, as of lanes, and a full pass that ended in the future is none either: the clock was ahead then.
const leasePurgeSQL = `-- taskrelay: lease retention
UPDATE {{schema}}.retention AS r
SET owner = $1::text, owner_until = now() + $2::bigint * interval '1 millisecond',
  succeeded = $3::bigint * interval '1 microsecond', cancelled = $4::bigint * interval '1 microsecond',
  dead = $5::bigint * interval '1 microsecond', attempts = $6::bigint * interval '1 microsecond',
  audit = $7::bigint * interval '1 microsecond'
WHERE r.owner IS NULL OR r.owner = $1::text OR r.owner_until NOT BETWEEN now() AND now() + interval '1 minute'
RETURNING r.task_low, r.attempt_low, r.audit_low,
  coalesce(r.full_at NOT BETWEEN now() - least($8::bigint * interval '1 microsecond', greatest($9::bigint * interval '1 microsecond', (
    SELECT least(r.succeeded, r.cancelled, r.dead, min(least(b.retain_succeeded, b.retain_cancelled, b.retain_dead)))
    FROM {{schema}}.biz_type AS b))) AND now() + interval '1 minute', true)`

const savePurgeSQL = `-- taskrelay: save retention
UPDATE {{schema}}.retention AS r
SET owner_until = now() + $2::bigint * interval '1 millisecond', task_low = $3::bigint, attempt_low = $4::bigint, audit_low = $5::bigint,
  full_at = CASE WHEN $6::boolean THEN now() ELSE r.full_at END, tasks = r.tasks + $7::bigint, log_rows = r.log_rows + $8::bigint
WHERE r.owner = $1::text
RETURNING 1`

const leavePurgeSQL = `-- taskrelay: leave retention
UPDATE {{schema}}.retention AS r SET owner = NULL, owner_until = NULL WHERE r.owner = $1::text`

const purgePageSQL = `-- taskrelay: purge tasks
SELECT p.verdict, p.tasks, p.last_id, p.young_id, p.open_id FROM {{schema}}.purge_page($1::bigint, $2::int, $3::int, false) AS p`

const purgeAttemptsSQL = `-- taskrelay: purge attempts
SELECT p.deleted, p.last_task, p.last_token, p.young_task FROM {{schema}}.purge_attempts_page($1::bigint, $2::bigint, $3::int, $4::int, false) AS p`

const purgeAuditSQL = `-- taskrelay: purge audit
SELECT p.deleted, p.last_id, 0::bigint, p.young_id FROM {{schema}}.purge_audit_page($1::bigint, $2::int, $3::int, false) AS p`

// keepRetention deletes one page of what is too old, if we are the relay that does, and returns when to go on.
func (r *Relay) keepRetention(ctx context.Context) (time.Duration, error) {
	s := &r.sweeper
	now := time.Now()
	if now.Before(s.next) {
		return min(s.next.Sub(now), 5*time.Second), nil
	}
	if s.renewed.IsZero() || now.Sub(s.renewed) >= purgeLease {
		ours, err := r.leasePurge(ctx)
		if err != nil || !ours {
			s.midway = s.midway && err != nil // another relay makes a pass of its own
			s.next = now.Add(min(r.cfg.Retain.Every, purgeLease))
			return 0, err
		}
	}
	began := time.Now()
	done, err := r.purgePage(ctx)
	if err != nil {
		s.renewed = time.Time{} // the low marks may be another relay's by now: ask again
		return 0, err
	}
	if done {
		if err := r.nextSweep(ctx); err != nil {
			return 0, err
		}
		return 0, nil
	}
	if time.Since(s.renewed) > purgeRenew {
		if err := r.savePurge(ctx, false); err != nil {
			return 0, err
		}
	}
	// A fifth of the time where much is to be deleted, a thirtieth where rows are only looked at, a fiftieth while the relay
	// is behind: then publishing needs Postgres more.
	took := time.Since(began)
	rest := 4 * took
	if s.scan == purgeScan {
		rest = 30 * took
	}
	if r.behind() {
		rest = 50 * took
	}
	return min(rest, 5*time.Second), nil
}

// behind reports whether a lane has been reading one and the same round for some seconds: there is a backlog.
func (r *Relay) behind() bool {
	s, now := &r.sweeper, time.Now()
	seen := make(map[laneKey]openRound)
	behind := false
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, l := range r.lanes {
		if l.round == nil || r.settings.paused[k.bizType] || r.settings.rates[k.bizType] > 0 {
			continue
		}
		o, ok := s.seen[k]
		if !ok || o.target != l.round.target.snapshot {
			o = openRound{target: l.round.target.snapshot, since: now}
		}
		seen[k] = o
		behind = behind || now.Sub(o.since) > 2*time.Second
	}
	s.seen = seen
	return behind
}

// leasePurge asks to be the relay that deletes, and begins a pass.
func (r *Relay) leasePurge(ctx context.Context) (ours bool, err error) {
	s, keep := &r.sweeper, r.cfg.Retain
	asked := time.Now()
	var low [3]int64
	var full bool
	err = r.query(ctx, leasePurgeSQL, []any{r.cfg.Name, purgeLease.Milliseconds(), age(keep.Succeeded), age(keep.Cancelled),
		age(keep.Dead), age(keep.Attempts), age(keep.Audit), fullPass.Microseconds(), (fullEvery * keep.Every).Microseconds()},
		func(rows pgx.Rows) error {
			ours = true
			return rows.Scan(&low[0], &low[1], &low[2], &full)
		})
	if err != nil {
		return false, fmt.Errorf("lease retention: %w", err)
	}
	if ours {
		s.renewed = asked
		s.start(low, full)
	}
	return ours, nil
}

// start begins a pass at the low marks of the table retention. A full pass that an error cut off goes on where it was: from
// the start it would never come to its end on a server that answers now and then.
func (s *sweeper) start(low [3]int64, full bool) {
	if s.midway && s.full && full {
		copy(s.low[s.table+1:], low[s.table+1:])
		return
	}
	s.low, s.full, s.midway, s.deleted = low, full, true, 0
	s.begin(0)
}

// begin starts the sweep of a table.
func (s *sweeper) begin(table int) {
	s.table, s.scan, s.marked, s.end = table, purgeBatch, false, 0
	s.key, s.key2 = s.low[table], -1 // tokens begin at 0
	if s.full {
		s.key = 0
	}
}

// sweepEndSQL is where a pass of a table ends: what comes behind it is written while the pass goes on. [A pass to the end
// of a table that grows never ended, and took a fifth of the time of a busy Postgres.] The audit grows slowly.
var sweepEndSQL = map[int]string{
	0: `-- taskrelay: end of tasks
SELECT coalesce(max(t.id), 0) FROM {{schema}}.task AS t`,
	1: `-- taskrelay: end of attempts
SELECT coalesce(max(a.task_id), 0) FROM {{schema}}.task_attempt AS a`,
}

// sweepEnd finds the end of a pass, once for each table.
func (r *Relay) sweepEnd(ctx context.Context) error {
	s := &r.sweeper
	sql, bounded := sweepEndSQL[s.table]
	if !bounded || s.end > 0 {
		return nil
	}
	if err := r.query(ctx, sql, nil, func(rows pgx.Rows) error { return rows.Scan(&s.end) }); err != nil {
		return fmt.Errorf("retention: %w", err)
	}
	return nil
}

// purgePage deletes one page of the table that is swept. done: there is no more to be looked at in this pass.
func (r *Relay) purgePage(ctx context.Context) (done bool, err error) {
	s := &r.sweeper
	keeps := [3]bool{false, r.cfg.Retain.Attempts == Forever, r.cfg.Retain.Audit == Forever}
	if keeps[s.table] {
		return true, nil
	}
	if err := r.sweepEnd(ctx); err != nil {
		return false, err
	}
	var deleted int64
	var last, last2, young, open *int64
	switch s.table {
	case 0:
		err = r.query(ctx, purgePageSQL, []any{s.key, s.scan, purgeBatch}, func(rows pgx.Rows) error {
			var verdict string
			var n int64
			err := rows.Scan(&verdict, &n, &last, &young, &open)
			if verdict == "deleted" {
				deleted += n
			}
			return err
		})
	case 1:
		err = r.query(ctx, purgeAttemptsSQL, []any{s.key, s.key2, s.scan, purgeBatch}, func(rows pgx.Rows) error {
			return rows.Scan(&deleted, &last, &last2, &young)
		})
	default:
		err = r.query(ctx, purgeAuditSQL, []any{s.key, s.scan, purgeBatch}, func(rows pgx.Rows) error {
			return rows.Scan(&deleted, &last, &last2, &young)
		})
	}
	if err != nil {
		return false, fmt.Errorf("retention: %w", err)
	}
	s.deleted += deleted
	r.mu.Lock()
	if s.table == 0 {
		r.counts.Purged += deleted
	} else {
		r.counts.PurgedLog += deleted
	}
	r.mu.Unlock()
	if last == nil {
		return true, nil // the end of the table
	}
	s.key = *last
	if last2 != nil {
		s.key2 = *last2
	}
	s.mark(*last, young, open)
	// Where much is deleted a page is looked at once; where little is, a statement looks further.
	s.scan = purgeBatch
	if deleted < purgeBatch/10 {
		s.scan = purgeScan
	}
	return young != nil && !s.full || s.end > 0 && s.key >= s.end, nil
}

// mark moves the low mark behind a page that ended with last. It stops before the first row that is only too young, and
// before the first that is unfinished and may end soon.
func (s *sweeper) mark(last int64, young, open *int64) {
	if s.marked {
		return
	}
	s.low[s.table] = last
	if s.table == 1 {
		s.low[1]-- // the next pass begins within this task's attempts
	}
	for _, stop := range []*int64{young, open} {
		if stop != nil {
			s.marked, s.low[s.table] = true, min(s.low[s.table], *stop-1)
		}
	}
}

// nextSweep goes on to the next table, or ends the pass.
func (r *Relay) nextSweep(ctx context.Context) error {
	s := &r.sweeper
	if s.table < 2 {
		s.begin(s.table + 1)
		return nil
	}
	if err := r.savePurge(ctx, s.full); err != nil {
		return err
	}
	if s.deleted > 0 {
		r.log.Info().Int64("count", s.deleted).Bool("full", s.full).Msg("old rows deleted")
	}
	s.midway = false
	s.renewed, s.next = time.Time{}, time.Now().Add(r.cfg.Retain.Every)
	return nil
}

// savePurge stores the low marks and keeps the lease. Somebody else's lease ends our pass; what was deleted is deleted.
func (r *Relay) savePurge(ctx context.Context, full bool) error {
	s := &r.sweeper
	r.mu.Lock()
	tasks, logs := r.counts.Purged-s.saved[0], r.counts.PurgedLog-s.saved[1]
	r.mu.Unlock()
	asked, ours := time.Now(), false
	err := r.query(ctx, savePurgeSQL, []any{r.cfg.Name, purgeLease.Milliseconds(), s.low[0], s.low[1], s.low[2], full, tasks, logs},
		func(rows pgx.Rows) error { ours = true; return nil })
	if err != nil {
		s.renewed = time.Time{}
		return fmt.Errorf("save retention: %w", err)
	}
	if !ours {
		s.midway = false
		s.renewed, s.next = time.Time{}, time.Now().Add(r.cfg.Retain.Every)
		return nil
	}
	s.saved[0] += tasks
	s.saved[1] += logs
	s.renewed = asked
	return nil
}
