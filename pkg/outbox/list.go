package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Filter chooses tasks for List; its fields narrow each other. The zero value
// chooses the last 50.
//
// An index finds a BizID, a BizIDPrefix, the status dead and the unfinished ones,
// whatever the size of the table. The others read backwards from the newest task
// until Limit is reached: in a large table bound them by NewerThan, From and
// Before.
type Filter struct {
	BizType       string         // Optional.
	Status        string         // Optional, one of Statuses.
	Statuses      []string       // Optional: any of these.
	BizID         string         // Optional.
	BizIDPrefix   string         // Optional: the biz id begins with this.
	Priority      string         // Optional, PriorityHigh or PriorityLow.
	ErrorContains string         // Optional: this text occurs in the last error, letter for letter.
	ErrorClass    string         // Optional.
	Worker        string         // Optional: the name of the worker that holds its lease begins with this.
	OlderThan     time.Duration  // Optional: written at least this long ago, by Postgres's clock.
	NewerThan     time.Duration  // Optional: written at most this long ago.
	Payload       []PayloadValue // Optional: all of these.
	Limit         int            // 1 to 1,000, by default 50.
	From          int64          // Optional: only ids from this one on.
	Before        int64          // Optional: only ids below this one, to read the next page.
}

// PayloadValue is what a payload must have at a path: a text as it reads, a
// number as it was written (12.0 is not 12), true, false, or JSON. A payload with
// text that Postgres cannot hold (\u0000, half a surrogate pair) never matches.
type PayloadValue struct {
	Path  []string // keys of objects, and indexes of arrays from 0
	Value string
}

// The payloads of a list of 1,000 tasks may be half a gigabyte, and viewers may
// not see them.
var listSQL = newStatement(`-- taskrelay: list tasks
SELECT ` + taskColumns + `, '', '', ''
FROM {{schema}}.task AS t
WHERE true`)

// Unfinished rows lie behind their lane's low-water or are on the work list: the
// same places as the view stuck reads. Ids first, as an array, so that the table
// is then read by its primary key.
const unfinishedSQL = `
  AND t.id = ANY (ARRAY(
      SELECT c.id
      FROM {{schema}}.known_lane AS k
      CROSS JOIN LATERAL (
          SELECT u.id FROM {{schema}}.task AS u
          WHERE u.biz_type = k.biz_type AND u.priority = k.priority AND u.xid >= pg_snapshot_xmax(k.low_snapshot) AND u.finished_at IS NULL
          UNION
          SELECT u.id FROM pg_snapshot_xip(k.low_snapshot) AS x (xid)
          JOIN {{schema}}.task AS u ON u.biz_type = k.biz_type AND u.priority = k.priority AND u.xid = x.xid AND u.finished_at IS NULL
          UNION
          SELECT u.id FROM {{schema}}.task AS u
          WHERE u.biz_type = k.biz_type AND u.priority = k.priority AND u.run_at > k.low_at AND u.finished_at IS NULL
          UNION
          SELECT u.id FROM {{schema}}.task AS u
          WHERE u.biz_type = k.biz_type AND u.priority = k.priority AND u.republish_at IS NOT NULL AND u.finished_at IS NULL
      ) AS c))`

// A biz id is unique per type: one probe for each type there is. Without the
// array the planner may walk the primary key instead.
const bizIDSQL = `
  AND t.id = ANY (ARRAY(
      SELECT u.id
      FROM (SELECT DISTINCT k.biz_type FROM {{schema}}.known_lane AS k) AS k
      JOIN {{schema}}.task AS u ON u.biz_type = k.biz_type AND %s))`

// The value is looked for in the text first, which rules out nearly all rows. A
// payload is taken apart only when that cannot fail: json accepts \u0000 and
// halves of surrogate pairs, and #>> raises an error at them anywhere in it, which
// would end the list for one row's sake.
const payloadSQL = `CASE WHEN strpos(t.payload::text, $%[2]d::text) > 0 OR strpos(t.payload::text, '\') > 0 THEN
      CASE WHEN regexp_replace(t.payload::text, '\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}', '', 'g') !~ '\\u(0000|[dD][89a-fA-F])'
          THEN t.payload #>> $%[1]d::text[] = $%[2]d::text ELSE false END
      ELSE false END`

// List returns tasks of the default schema, the newest (highest id) first,
// without payload, headers and result. For the next page set Before to the last
// id. db is a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
func List(ctx context.Context, db querier, f Filter) ([]Task, error) {
	return Schema("").List(ctx, db, f)
}

// List is the function List for this schema.
func (s Schema) List(ctx context.Context, db querier, f Filter) ([]Task, error) {
	where, args, err := f.where()
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", err)
	}
	tasks, err := query(ctx, s, db, func(s Schema) string { return listSQL.in(s) + s.Render(where) }, scanTask, args...)
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", err)
	}
	return tasks, nil
}

// unfinished lists the states that are not final.
var unfinished = []string{"pending", "running", "retrying", "blocked"}

func (f Filter) statuses() []string {
	if f.Status != "" {
		return append([]string{f.Status}, f.Statuses...)
	}
	return f.Statuses
}

// Scans reports that no index finds what the filter asks for: List reads tasks one by one, from the newest back.
func (f Filter) Scans() bool {
	statuses := f.statuses()
	all := func(in []string) bool {
		return len(statuses) > 0 && !slices.ContainsFunc(statuses, func(s string) bool { return !slices.Contains(in, s) })
	}
	switch {
	case f.BizID != "", f.BizIDPrefix != "", all([]string{"dead"}), all(unfinished):
		return false
	}
	return f.BizType != "" || len(statuses) > 0 || f.Priority != "" || f.ErrorContains != "" || f.ErrorClass != "" ||
		f.Worker != "" || len(f.Payload) > 0 || f.OlderThan > 0 || f.NewerThan > 0
}

// Validate returns the error that List would refuse the filter with.
func (f Filter) Validate() error {
	text := f.BizType + f.BizID + f.BizIDPrefix + f.ErrorContains + f.ErrorClass + f.Worker
	for _, v := range f.Payload {
		text += strings.Join(v.Path, "") + v.Value
		if len(v.Path) == 0 {
			return errors.New("a payload value has no path")
		}
	}
	switch {
	case f.Limit < 0 || f.Limit > 1000:
		return fmt.Errorf("limit is %d, want 1 to 1000 (0 means 50): read on with Before", f.Limit)
	case !utf8.ValidString(text), strings.ContainsRune(text, 0):
		return errors.New("the filter has text that Postgres cannot hold (not valid UTF-8, or a NUL)")
	case f.Priority != "" && f.Priority != PriorityHigh && f.Priority != PriorityLow:
		return fmt.Errorf("priority %.40q: want high or low", f.Priority)
	case f.OlderThan < 0 || f.NewerThan < 0:
		return errors.New("an age is negative: want how long ago")
	}
	for _, s := range f.statuses() {
		if !slices.Contains(Statuses(), s) {
			return fmt.Errorf("status %.40q: want one of %s", s, strings.Join(Statuses(), ", "))
		}
	}
	return nil
}

func (f Filter) where() (sql string, args []any, err error) {
	if err := f.Validate(); err != nil {
		return "", nil, err
	}
	var b strings.Builder
	arg := func(v any) int {
		args = append(args, v)
		return len(args)
	}
	add := func(condition string, v any) { fmt.Fprintf(&b, "\n  AND "+condition, arg(v)) }
	if f.BizType != "" {
		add("t.biz_type = $%d::text", f.BizType)
	}
	statuses := f.statuses()
	live := len(statuses) > 0 && !slices.ContainsFunc(statuses, func(s string) bool { return !slices.Contains(unfinished, s) })
	switch {
	case len(statuses) == 0:
	case len(statuses) == 1 && statuses[0] == "dead":
		// Every dead row has dead_at, and dead_at has an index; status has none, to keep updates HOT.
		b.WriteString("\n  AND t.dead_at IS NOT NULL AND t.status = 'dead'")
	case len(statuses) == 1:
		add("t.status = $%d::text", statuses[0])
	default:
		add("t.status = ANY ($%d::text[])", statuses)
	}
	switch named := f.BizID != "" || f.BizIDPrefix != ""; {
	case named && f.BizType == "":
		condition := fmt.Sprintf("u.biz_id = $%d::text", len(args)+1)
		if f.BizID == "" {
			condition = fmt.Sprintf("u.biz_id ^@ $%d::text", len(args)+1)
		}
		arg(cmp.Or(f.BizID, f.BizIDPrefix))
		fmt.Fprintf(&b, bizIDSQL, condition)
	case f.BizID != "":
		add("t.biz_id = $%d::text", f.BizID)
	case named:
		add("t.biz_id ^@ $%d::text", f.BizIDPrefix)
	case live && f.From == 0:
		b.WriteString(unfinishedSQL)
	}
	if f.BizID != "" && f.BizIDPrefix != "" {
		add("t.biz_id ^@ $%d::text", f.BizIDPrefix)
	}
	if f.Priority != "" {
		add("t.priority = $%d::text", f.Priority)
	}
	if f.ErrorContains != "" {
		add("strpos(t.last_error, $%d::text) > 0", f.ErrorContains)
	}
	if f.ErrorClass != "" {
		add("t.error_class = $%d::text", f.ErrorClass)
	}
	if f.Worker != "" {
		add("t.lease_owner ^@ $%d::text", f.Worker)
	}
	if f.OlderThan > 0 {
		add("t.created_at <= now() - $%d::bigint * interval '1 microsecond'", f.OlderThan.Microseconds())
	}
	if f.NewerThan > 0 {
		add("t.created_at >= now() - $%d::bigint * interval '1 microsecond'", f.NewerThan.Microseconds())
	}
	for _, v := range f.Payload {
		path := arg(v.Path)
		fmt.Fprintf(&b, "\n  AND "+payloadSQL, path, arg(v.Value))
	}
	if f.From != 0 {
		add("t.id >= $%d::bigint", f.From)
	}
	if f.Before != 0 {
		add("t.id < $%d::bigint", f.Before)
	}
	fmt.Fprintf(&b, "\nORDER BY t.id DESC\nLIMIT %d", cmp.Or(f.Limit, 50))
	return b.String(), args, nil
}

var getAllSQL = newStatement(`-- taskrelay: get tasks
SELECT ` + taskColumns + `, t.payload::text, t.headers::text, coalesce(t.result::text, '')
FROM {{schema}}.task AS t
WHERE t.id = ANY ($1::bigint[])
ORDER BY t.id`)

// GetAll returns the tasks with these ids in the order of their ids, payload,
// headers and result included; ids that do not exist are left out. A payload may
// be half a megabyte: ask for some tens at once.
func (s Schema) GetAll(ctx context.Context, db querier, ids []int64) ([]Task, error) {
	tasks, err := query(ctx, s, db, getAllSQL.in, scanTask, ids)
	if err != nil {
		return nil, fmt.Errorf("get %d tasks: %w", len(ids), err)
	}
	return tasks, nil
}
