package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// Bulk is one action on all tasks that a filter finds, worked off by a relay in
// small batches: see StartBulk. Times are in UTC, by Postgres's clock.
type Bulk struct {
	ID         int64            `json:"id,string"`
	Action     string           `json:"action"`
	Filter     json.RawMessage  `json:"filter"`
	Options    json.RawMessage  `json:"options"`
	Reason     string           `json:"reason"`
	Actor      string           `json:"actor"`
	Rate       float64          `json:"rate"`  // tasks a second
	State      string           `json:"state"` // open, done or cancelled
	CreatedAt  time.Time        `json:"created_at"`
	StartedAt  *time.Time       `json:"started_at,omitempty"` // nil: no relay has begun yet
	FinishedAt *time.Time       `json:"finished_at,omitempty"`
	Expected   *int64           `json:"expected,omitempty"` // counted when it began; nil: not known
	AtLeast    bool             `json:"at_least,omitempty"` // there are more than Expected: counting all would have taken too long
	Done       int64            `json:"done"`               // Changed + Skipped
	Changed    int64            `json:"changed"`
	Skipped    int64            `json:"skipped"`
	SkippedWhy map[string]int64 `json:"skipped_why"`          // why_not, and how many
	Passed     float64          `json:"passed"`               // how much of its range it has gone through, 0 to 1
	HeldBack   int              `json:"held_back,omitempty"`  // tasks it brought back that wait for a worker; it waits for them
	Relay      string           `json:"relay,omitempty"`      // that works on it
	EndedBy    string           `json:"ended_by,omitempty"`   // who cancelled it
	EndReason  string           `json:"end_reason,omitempty"` // and why
}

// BulkActions lists the actions of a bulk; each does what the operation of its
// name does.
func BulkActions() []string {
	return []string{"requeue", "reset", "rerun", "run_now", "delay", "set_priority", "cancel", "delete", "discard"}
}

// BulkFilter chooses the tasks of a bulk; its fields narrow each other. At least
// one beside Statuses is required, or All.
type BulkFilter struct {
	BizType    string        // Optional.
	Statuses   []string      // Optional for most actions: which states are meant. By default those that the action is for; requeue: dead alone.
	Error      string        // Optional: this text occurs in the last error, letter for letter.
	ErrorClass string        // Optional.
	Group      string        // Optional: a group of dead tasks, as "taskrelay dead groups" names it.
	DeadReason string        // Optional.
	OlderThan  time.Duration // Optional: finished (dead, cancelled) at least this long ago; unfinished: written.
	NewerThan  time.Duration // Optional: at most this long ago.
	All        bool          // Optional: says that no other field is meant to narrow it.
}

func (f BulkFilter) json() (string, error) {
	m := map[string]any{}
	for key, text := range map[string]string{"type": f.BizType, "error": f.Error, "error_class": f.ErrorClass, "group": f.Group, "dead_reason": f.DeadReason} {
		if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			return "", errors.New("the filter has text that Postgres cannot hold (not valid UTF-8, or a NUL)")
		}
		if text != "" {
			m[key] = text
		}
	}
	for key, age := range map[string]time.Duration{"older_than": f.OlderThan, "newer_than": f.NewerThan} {
		if age < 0 {
			return "", fmt.Errorf("%s is %v, want more than 0", key, age)
		}
		if age > 0 {
			m[key] = fmt.Sprintf("%d microseconds", age.Microseconds())
		}
	}
	if len(f.Statuses) > 0 {
		m["status"] = f.Statuses
	}
	if f.All {
		m["all"] = true
	}
	b, err := json.Marshal(m)
	return string(b), err
}

// BulkOptions are what an action needs beside its tasks.
type BulkOptions struct {
	By       time.Duration // Required for delay.
	Priority string        // Required for set_priority.
	Flags    []Flag        // Optional, as for the operation.
	Rate     float64       // Tasks a second. By default 500.
}

func (o BulkOptions) json() (string, error) {
	f, err := allowed(o.Flags, AllowCompensated, AllowSucceeded, Compensate, AllowUncompensated)
	if err != nil {
		return "", err
	}
	m := map[string]any{}
	if o.By != 0 {
		m["by"] = fmt.Sprintf("%d microseconds", o.By.Microseconds())
	}
	if o.Priority != "" {
		m["priority"] = o.Priority
	}
	for key, set := range map[string]bool{"allow_compensated": f.compensated, "allow_succeeded": f.succeeded, "compensate": f.compensate,
		"allow_uncompensated": f.uncompensated} {
		if set {
			m[key] = true
		}
	}
	b, err := json.Marshal(m)
	return string(b), err
}

var (
	startBulkSQL = newStatement(`-- taskrelay: start bulk
SELECT s.id, s.is_new FROM {{schema}}.start_bulk($1::text, $2::text::jsonb, $3::text, $4::text::jsonb, coalesce(nullif($5::float8, 0), 500)) AS s`)
	previewBulkSQL = newStatement(`-- taskrelay: preview bulk
SELECT p.matching, coalesce(p.sample, '{}'), p.normal::text, NOT p.complete FROM {{schema}}.preview_bulk($1::text, $2::text::jsonb, $3::int) AS p`)
	cancelBulkSQL = newStatement(`-- taskrelay: cancel bulk
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.cancel_bulk($1::bigint, $2::text) AS f`)
	bulksSQL = newStatement(`-- taskrelay: list bulks
SELECT b.id, b.action, b.filter::text, b.options::text, b.reason, b.actor, b.rate, b.state, b.created_at, b.started_at, b.finished_at,
       b.expected, b.at_least, b.done, b.changed, b.skipped, b.skipped_why::text,
       CASE WHEN b.state = 'done' THEN 1
            WHEN b.expected IS NOT NULL THEN least(b.done / greatest(b.expected, b.done, 1)::float8, CASE WHEN b.at_least THEN 0.99 ELSE 1 END)
            ELSE b.cursor_id / greatest(b.last_id, b.cursor_id, 1)::float8 END,
       b.held_back, CASE WHEN b.owner_until > now() THEN b.owner ELSE '' END, coalesce(b.ended_by, ''), coalesce(b.end_reason, '')
FROM {{schema}}.bulk AS b
WHERE ($1::bigint = 0 OR b.id = $1::bigint) AND ($2::boolean IS FALSE OR b.state = 'open')
ORDER BY b.id DESC
LIMIT $3::bigint`)
)

// StartBulk writes a bulk into the table, or finds the open one of the same
// action, filter and options: a second press is harmless. A relay works it off:
// its tasks are those of the time of the call, each is guarded by its state and
// audited in the transaction of its change, and a relay that dies in the middle
// loses and doubles nothing. An action that brings tasks back waits for the
// workers to start them, so that other tasks of the type do not wait behind all
// of them.
func StartBulk(ctx context.Context, db querier, action string, f BulkFilter, reason string, o BulkOptions) (ref Ref, err error) {
	return Schema("").StartBulk(ctx, db, action, f, reason, o)
}

// StartBulk is the function StartBulk for this schema.
func (s Schema) StartBulk(ctx context.Context, db querier, action string, f BulkFilter, reason string, o BulkOptions) (ref Ref, err error) {
	filter, err := bulkRequest(action, f)
	if err != nil {
		return Ref{}, fmt.Errorf("start bulk: %w", err)
	}
	options, err := o.json()
	if err == nil {
		err = validateReason(reason)
	}
	if err == nil && o.Rate < 0 {
		err = fmt.Errorf("rate is %v, want more than 0 tasks a second", o.Rate)
	}
	if err != nil {
		return Ref{}, fmt.Errorf("start bulk: %w", err)
	}
	refs, err := query(ctx, s, db, startBulkSQL.in, func(row pgx.CollectableRow) (ref Ref, err error) {
		err = row.Scan(&ref.ID, &ref.New)
		return ref, err
	}, action, filter, reason, options, o.Rate)
	if err != nil {
		return Ref{}, fmt.Errorf("start bulk: %w", err)
	}
	return refs[0], nil
}

// BulkPreview says what a bulk would find now.
type BulkPreview struct {
	Action string          `json:"action"`
	Filter json.RawMessage `json:"filter"` // as it would be kept
	// Found is counted up to the limit that was asked for, and for two seconds.
	Found  int64   `json:"found"`
	More   bool    `json:"more"` // there may be more than were counted
	Sample []int64 `json:"-"`    // the first of them
}

// PreviewBulk counts what a bulk would find now, up to atMost and for two seconds, and changes nothing.
func (s Schema) PreviewBulk(ctx context.Context, db querier, action string, f BulkFilter, atMost int) (BulkPreview, error) {
	filter, err := bulkRequest(action, f)
	if err != nil {
		return BulkPreview{}, fmt.Errorf("preview bulk: %w", err)
	}
	found, err := query(ctx, s, db, previewBulkSQL.in, func(row pgx.CollectableRow) (BulkPreview, error) {
		p := BulkPreview{Action: action}
		var normal string
		err := row.Scan(&p.Found, &p.Sample, &normal, &p.More)
		p.Filter = json.RawMessage(normal)
		return p, err
	}, action, filter, atMost)
	if err != nil {
		return BulkPreview{}, fmt.Errorf("preview bulk: %w", err)
	}
	return found[0], nil
}

func bulkRequest(action string, f BulkFilter) (filter string, err error) {
	if !slices.Contains(BulkActions(), action) {
		return "", fmt.Errorf("action %.40q: want one of %s", action, strings.Join(BulkActions(), ", "))
	}
	return f.json()
}

// CancelBulk ends a bulk before its end. What it has changed stays changed.
func CancelBulk(ctx context.Context, db querier, id int64, reason string) (Change, error) {
	return Schema("").CancelBulk(ctx, db, id, reason)
}

// CancelBulk is the function CancelBulk for this schema.
func (s Schema) CancelBulk(ctx context.Context, db querier, id int64, reason string) (Change, error) {
	changes, err := s.operate(ctx, db, "cancel bulk", cancelBulkSQL, reason, id, reason)
	if err != nil {
		return Change{}, err
	}
	return changes[0], nil
}

// Bulk returns the bulk with this id; ErrNotFound when there is none.
func (s Schema) Bulk(ctx context.Context, db querier, id int64) (Bulk, error) {
	found, err := query(ctx, s, db, bulksSQL.in, scanBulk, id, false, 1)
	if err != nil {
		return Bulk{}, fmt.Errorf("get bulk %d: %w", id, err)
	}
	if len(found) == 0 {
		return Bulk{}, fmt.Errorf("bulk %d: %w", id, ErrNotFound)
	}
	return found[0], nil
}

// Bulks returns the newest bulks first, of all or of the open ones.
func (s Schema) Bulks(ctx context.Context, db querier, openOnly bool, limit int) ([]Bulk, error) {
	found, err := query(ctx, s, db, bulksSQL.in, scanBulk, 0, openOnly, limit)
	if err != nil {
		return nil, fmt.Errorf("list bulks: %w", err)
	}
	return found, nil
}

func scanBulk(row pgx.CollectableRow) (b Bulk, err error) {
	var filter, options, why string
	err = row.Scan(&b.ID, &b.Action, &filter, &options, &b.Reason, &b.Actor, &b.Rate, &b.State, &b.CreatedAt, &b.StartedAt, &b.FinishedAt,
		&b.Expected, &b.AtLeast, &b.Done, &b.Changed, &b.Skipped, &why, &b.Passed, &b.HeldBack, &b.Relay, &b.EndedBy, &b.EndReason)
	if err != nil {
		return b, err
	}
	b.Filter, b.Options = json.RawMessage(filter), json.RawMessage(options)
	b.CreatedAt = b.CreatedAt.UTC()
	for _, at := range []*time.Time{b.StartedAt, b.FinishedAt} {
		if at != nil {
			*at = at.UTC()
		}
	}
	return b, json.Unmarshal([]byte(why), &b.SkippedWhy)
}
