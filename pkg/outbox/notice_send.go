package outbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/text"
)

const (
	noticeTick = time.Second
	// noticeTimeout is what one notifier may take. Afterwards its context ends, and what is still running is left alone.
	// Shorter than what a loop may take without being held for dead.
	noticeTimeout = 25 * time.Second
	// noticeTaken is how long a turn belongs to a relay: longer than a notifier may take. A relay that is killed in
	// between keeps the notice back for as long.
	noticeTaken = noticeTimeout + 15*time.Second
	// noticeMost is how many tasks one notice counts: a statement about a million would take longer than it may.
	noticeMost = 50_000
	// noticePauseMost is the longest pause between two tries, but for a fifth.
	noticePauseMost = 5 * time.Minute
	// noticeKept is how long a notice that nobody takes is tried: as long as its event stays in the stream.
	noticeKept = 7 * 24 * time.Hour
)

// takeTurnSQL takes the type that has waited longest for this notifier, and all that is to be told of it. The marks
// say what this notice covers: what is added meanwhile waits for the next one. A type whose notifier this relay does
// not have is told of by the log. No turn waits for longer than $7, and none belongs to a relay for longer than a minute: a
// time behind that was written before Postgres's clock was set back.
const takeTurnSQL = `-- taskrelay: take notice turn
WITH turn AS (
  UPDATE {{schema}}.notice_turn AS t
  SET fence = t.fence + 1, taken_by = $4::text, taken_until = now() + $5::bigint * interval '1 microsecond'
  WHERE t.biz_type = (
    SELECT q.biz_type FROM {{schema}}.notice_turn AS q
    WHERE q.next_at NOT BETWEEN now() AND now() + $7::bigint * interval '1 microsecond'
      AND (q.taken_until IS NULL OR q.taken_until NOT BETWEEN now() AND now() + interval '1 minute')
      AND EXISTS (SELECT FROM {{schema}}.notice AS n WHERE n.biz_type = q.biz_type)
      AND coalesce((SELECT k FROM {{schema}}.biz_type AS b, unnest($2::text[]) AS k
        WHERE b.biz_type = q.biz_type AND k = b.notifier),
        CASE WHEN (SELECT nullif(b.notifier, '') FROM {{schema}}.biz_type AS b WHERE b.biz_type = q.biz_type) IS NULL THEN $3::text ELSE 'log' END)
        = $1::text
    ORDER BY q.next_at LIMIT 1 FOR UPDATE OF q SKIP LOCKED)
  RETURNING t.biz_type, t.fence, t.tries
), marked AS (
  UPDATE {{schema}}.notice AS n SET fence = turn.fence
  FROM turn CROSS JOIN LATERAL (
    SELECT k.id FROM {{schema}}.notice AS k WHERE k.biz_type = turn.biz_type ORDER BY k.biz_type, k.happened_at, k.id LIMIT $6::int) AS k
  WHERE n.id = k.id
  RETURNING n.id, n.event, n.happened_at
)
SELECT turn.biz_type, turn.fence, turn.tries, coalesce(b.title, ''), coalesce(b.runbook_url, ''), coalesce(b.notifier, ''), m.n,
  m.failed, m.dead, m.compensation_failed, m.first_at, m.last_at, m.ids
FROM turn
LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = turn.biz_type
CROSS JOIN LATERAL (
  SELECT count(*) AS n, count(*) FILTER (WHERE k.event = 'failed') AS failed, count(*) FILTER (WHERE k.event = 'dead') AS dead,
    count(*) FILTER (WHERE k.event = 'compensation_failed') AS compensation_failed,
    min(k.happened_at) AS first_at, max(k.happened_at) AS last_at, min(k.id) || ' ' || max(k.id) AS ids
  FROM marked AS k) AS m`

// noticeTasksSQL reads the tasks that a notice names.
const noticeTasksSQL = `-- taskrelay: notice tasks
SELECT n.task_id, coalesce(n.biz_id, ''), n.event, n.attempts, n.reason, n.error, n.error_class, n.compensation, n.happened_at
FROM {{schema}}.notice AS n
WHERE n.biz_type = $1::text AND n.fence = $2::bigint
ORDER BY array_position(ARRAY['compensation_failed', 'dead', 'failed'], n.event), n.happened_at, n.id LIMIT $3::int`

const noticeToldSQL = `-- taskrelay: notice told
WITH turn AS (
  UPDATE {{schema}}.notice_turn AS t
  SET taken_by = NULL, taken_until = NULL, tries = 0, last_error = NULL, sent_at = now(), notifier = $3::text,
    next_at = now() + $4::bigint * interval '1 microsecond'
  WHERE t.biz_type = $1::text AND t.fence = $2::bigint
  RETURNING t.biz_type
)
DELETE FROM {{schema}}.notice AS n USING turn WHERE n.biz_type = turn.biz_type AND n.fence = $2::bigint`

// noticeFailedSQL keeps a notice for later. What has been tried for a week is given up, and counted.
const noticeFailedSQL = `-- taskrelay: notice failed
WITH turn AS (
  UPDATE {{schema}}.notice_turn AS t
  SET taken_by = NULL, taken_until = NULL, tries = t.tries + 1, last_error = $4::text, notifier = $3::text,
    next_at = now() + $5::bigint * interval '1 microsecond'
  WHERE t.biz_type = $1::text AND t.fence = $2::bigint
  RETURNING t.biz_type
), gone AS (
  DELETE FROM {{schema}}.notice AS n USING turn
  WHERE n.biz_type = turn.biz_type AND n.added_at < now() - $6::bigint * interval '1 microsecond'
  RETURNING n.id
)
SELECT count(*) FROM gone`

const noticeLeftSQL = `-- taskrelay: leave notice turn
UPDATE {{schema}}.notice_turn AS t SET taken_by = NULL, taken_until = NULL
WHERE t.biz_type = $1::text AND t.fence = $2::bigint`

// A turn is a notice that is being told, and how often it was tried before.
type turn struct {
	Notice
	fence  int64
	tries  int
	wanted string // the notifier that the type names
}

// noticeLoops are the loops of notices: one collects, and each notifier has its own, so that one that is slow or down
// stops no other.
func (r *Relay) noticeLoops() map[string]func(context.Context) (time.Duration, error) {
	loops := map[string]func(context.Context) (time.Duration, error){loopNotices: r.collectNotices}
	for _, name := range r.cfg.notifierNames() {
		n := &notifying{name: name, notify: r.cfg.Notifiers[name]}
		if n.notify == nil {
			n.notify = func(_ context.Context, n Notice) error { r.logNotice(n); return nil }
		}
		loops["notify by "+name] = func(ctx context.Context) (time.Duration, error) { return r.tell(ctx, n) }
	}
	return loops
}

// notifying is the memory of one notifier's loop.
type notifying struct {
	name    string
	notify  Notifier
	running chan error // of a call that did not end in time
	notice  notices
}

// tell tells one type's notice.
func (r *Relay) tell(ctx context.Context, n *notifying) (time.Duration, error) {
	if n.running != nil {
		select {
		case <-n.running:
			n.running = nil
		default:
			if n.notice.due(time.Now()) {
				r.log.Error().Str("notifier", n.name).Msg("notifier does not return, its notices wait")
			}
			return noticeTick, nil
		}
	}
	t, err := r.takeTurn(ctx, n.name)
	if err != nil || t == nil {
		return noticeTick, err
	}
	if t.wanted != "" && t.wanted != n.name {
		r.log.Warn().Str("biz_type", t.BizType).Str("notifier", t.wanted).Msg("notifier is not configured in this relay, logged instead")
	}
	r.turned("notify by " + n.name)
	began := time.Now()
	err = n.call(ctx, t.Notice)
	r.turned("notify by " + n.name)
	if ctx.Err() != nil { // stopping: another relay, or the next start, need not wait until the turn ends
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if err == nil {
			return 0, r.exec(ctx, noticeToldSQL, t.BizType, t.fence, n.name, r.cfg.NoticeInterval.Microseconds())
		}
		return 0, r.exec(ctx, noticeLeftSQL, t.BizType, t.fence)
	}
	if err != nil {
		return 0, r.keepNotice(ctx, n, t, err)
	}
	if err := r.exec(ctx, noticeToldSQL, t.BizType, t.fence, n.name, r.cfg.NoticeInterval.Microseconds()); err != nil {
		return 0, fmt.Errorf("notice told: %w", err) // it is told again
	}
	r.meter.noticed(n.name, "sent")
	r.log.Debug().Str("biz_type", t.BizType).Str("notifier", n.name).Int("count", t.Count).Dur("elapsed", time.Since(began)).Msg("notice told")
	return 0, nil
}

// takeTurn returns nil when nothing is due for this notifier.
func (r *Relay) takeTurn(ctx context.Context, name string) (*turn, error) {
	var t *turn
	err := r.query(ctx, takeTurnSQL, []any{name, r.cfg.notifierNames(), r.cfg.DefaultNotifier, r.cfg.Name, noticeTaken.Microseconds(), noticeMost,
		(max(r.cfg.NoticeInterval, 2*noticePauseMost) + time.Minute).Microseconds()},
		func(rows pgx.Rows) error {
			t = &turn{Notice: Notice{Installation: r.installation, Counts: map[string]int{}}}
			var failed, dead, notUndone int
			var from, to *time.Time
			var ids *string
			if err := rows.Scan(&t.BizType, &t.fence, &t.tries, &t.Title, &t.RunbookURL, &t.wanted, &t.Count,
				&failed, &dead, &notUndone, &from, &to, &ids); err != nil {
				return err
			}
			if t.Count == 0 {
				t = nil // another relay has told it since we looked
				return nil
			}
			t.From, t.To = from.UTC(), to.UTC()
			for event, n := range map[string]int{EventFailed: failed, EventDead: dead, EventCompensationFailed: notUndone} {
				if n > 0 {
					t.Counts[event] = n
				}
			}
			for _, event := range eventsByGravity {
				if t.Counts[event] > 0 {
					t.Event = event
					break
				}
			}
			// The same set of tasks has the same id, whoever sends it and how often.
			sum := sha256.Sum256([]byte(strconv.Itoa(t.Count) + " " + t.BizType + " " + *ids))
			t.ID = "notice_" + hex.EncodeToString(sum[:16])
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("take notice turn: %w", err)
	}
	if t == nil {
		return nil, nil
	}
	err = r.query(ctx, noticeTasksSQL, []any{t.BizType, t.fence, noticeTasks}, func(rows pgx.Rows) error {
		var k NoticeTask
		err := rows.Scan(&k.ID, &k.BizID, &k.Event, &k.Attempts, &k.Reason, &k.Error, &k.ErrorClass, &k.Compensation, &k.At)
		k.At = k.At.UTC()
		t.Tasks = append(t.Tasks, k)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("notice tasks: %w", err)
	}
	return t, nil
}

// keepNotice writes down why a notice was not told, and when it is tried again.
func (r *Relay) keepNotice(ctx context.Context, n *notifying, t *turn, failure error) error {
	pause := noticePause(t.tries)
	var gone int64
	err := r.query(ctx, noticeFailedSQL, []any{t.BizType, t.fence, n.name, text.Storable(failure.Error(), 1024), pause.Microseconds(),
		noticeKept.Microseconds()}, func(rows pgx.Rows) error { return rows.Scan(&gone) })
	if err != nil {
		return fmt.Errorf("keep notice: %w", err)
	}
	r.meter.noticed(n.name, "failed")
	r.log.Warn().Err(failure).Str("biz_type", t.BizType).Str("notifier", n.name).Int("count", t.Count).Int("attempt", t.tries+1).
		Dur("delay", pause).Msg("notice not told, trying again")
	if gone > 0 {
		r.log.Error().Str("biz_type", t.BizType).Str("notifier", n.name).Int64("count", gone).
			Msg("notices given up: nobody took them for a week")
	}
	return nil
}

// noticePause grows from 2 s to 5 minutes, each up to a fifth longer or shorter.
func noticePause(tries int) time.Duration {
	b := backoff.NewExponentialBackOff(backoff.WithInitialInterval(2*time.Second), backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(0.2), backoff.WithMaxInterval(noticePauseMost), backoff.WithMaxElapsedTime(0))
	pause := b.NextBackOff()
	for range min(tries, 16) {
		pause = b.NextBackOff()
	}
	return pause
}

// call runs the notifier in a goroutine of its own: one that ignores its context must not stop the relay, which has a
// loop to turn and an end to reach.
func (n *notifying) call(ctx context.Context, notice Notice) error {
	ctx, cancel := context.WithTimeout(ctx, noticeTimeout)
	ended := make(chan error, 1)
	go func() {
		defer cancel()
		defer func() {
			if p := recover(); p != nil {
				ended <- fmt.Errorf("%w: %v\n%s", errNotifierPanic, p, debug.Stack())
			}
		}()
		ended <- n.notify(ctx, notice)
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	grace := time.NewTimer(time.Second) // most return as soon as their context ends, with a better error
	defer grace.Stop()
	select {
	case err := <-ended:
		return err
	case <-grace.C:
		n.running = ended
		return errors.New("notifier did not return in time")
	}
}
