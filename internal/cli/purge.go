package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
)

// purgeLine says of the tasks of one type and state what became of them, or would.
type purgeLine struct {
	BizType string `json:"biz_type"`
	Status  string `json:"status"`
	Verdict string `json:"verdict"` // deleted, due (a dry run), or why they stay
	Tasks   int64  `json:"tasks"`
}

const purgeTasksSQL = `-- taskrelay cli: purge
SELECT p.biz_type, p.status, p.verdict, p.tasks, p.last_id
FROM {{schema}}.purge_page($1::bigint, $2::int, $3::int, $4::boolean, $5::text[], $6::text[], $7::bigint * interval '1 microsecond', $8::text) AS p`

const purgeLogsSQL = `-- taskrelay cli: purge attempts
SELECT p.deleted, p.last_task, p.last_token FROM {{schema}}.purge_attempts_page($1::bigint, $2::bigint, $3::int, $4::int, $5::boolean) AS p`

const purgeAuditSQL = `-- taskrelay cli: purge audit
SELECT p.deleted, p.last_id FROM {{schema}}.purge_audit_page($1::bigint, $2::int, $3::int, $4::boolean) AS p`

// Pages of the automatic retention: few rows are deleted by a statement, so that nobody waits for it.
const (
	purgeRows = 500
	purgeScan = 10_000
)

func (a *app) purgeCommand() *cobra.Command {
	var reason, olderThan string
	var types, statuses []string
	var dryRun bool
	c := &cobra.Command{
		Use:   "purge [--dry-run] --reason TEXT",
		Short: "Delete finished tasks whose age is reached, now",
		Long: `purge does at once what relays do by themselves: it deletes succeeded, cancelled and dead tasks by the ages that are set
(taskrelay types list), then old rows of the attempt log and the audit. It counts first with --dry-run, and says why tasks
stay. Unfinished tasks never go, and dead ones only once their letter is out, which goes with them.

--older-than overrules the ages for the states that are named, so it needs --status.`,
		Example: `  taskrelay purge --dry-run
  taskrelay purge --reason 'disk is filling' --yes
  taskrelay purge --older-than 7d --status succeeded --type ORDER_PAYMENT --reason 'disk is filling' --yes`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			if !dryRun && reason == "" {
				return usage("--reason is required: it is kept in the audit for whoever asks later (or --dry-run, which changes nothing)")
			}
			for _, s := range statuses {
				if !slices.Contains([]string{"succeeded", "cancelled", "dead"}, s) {
					return usage("--status %q: expected succeeded, cancelled or dead", s)
				}
			}
			var older *int64
			if olderThan != "" {
				if len(statuses) == 0 {
					return usage("--older-than overrules the ages that are set: say for which states with --status")
				}
				d, err := parseAge(olderThan)
				if err != nil {
					return usage("--older-than %w", err)
				}
				us := d.Microseconds()
				older = &us
			}
			if !dryRun {
				if err := a.confirm("delete tasks for good"); err != nil {
					return err
				}
			}
			ctx, cancel := a.limit(c, 0)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			lines, err := s.purgeTasks(ctx, purgeAsk{types: types, statuses: statuses, older: older, reason: reason, dryRun: dryRun})
			if err == nil && older == nil && len(types) == 0 && len(statuses) == 0 {
				var logs []purgeLine
				logs, err = s.purgeLogs(ctx, dryRun)
				lines = append(lines, logs...)
			}
			if perr := printAll(p, lines, func(l purgeLine) string { return l.BizType }, purgeColumns); perr != nil {
				return perr
			}
			if err != nil {
				return fmt.Errorf("%w (what the lines above say is done; run it again to go on)", err)
			}
			if !p.structured() {
				verdict, word := "deleted", "deleted"
				if dryRun {
					verdict, word = "due", "would be deleted"
				}
				var n int64
				for _, l := range lines {
					if l.Verdict == verdict {
						n += l.Tasks
					}
				}
				fmt.Fprintf(a.err, "%d rows %s\n", n, word)
			}
			return nil
		},
	}
	f := c.Flags()
	reasonFlag(c, &reason, "")
	f.BoolVar(&dryRun, "dry-run", false, "count only")
	f.StringSliceVar(&types, "type", nil, "only these biz types (default all)")
	f.StringSliceVar(&statuses, "status", nil, "only these states: succeeded, cancelled, dead (default all three)")
	f.StringVar(&olderThan, "older-than", "", "age that overrules those that are set, such as 7d or 12h")
	return c
}

func parseAge(s string) (time.Duration, error) {
	var r config.Retention
	if err := r.Set(s); err != nil {
		return 0, fmt.Errorf("%q: expected an age such as 7d or 12h", s)
	}
	return r.After, nil
}

var purgeColumns = []column[purgeLine]{
	{title: "TYPE", cell: func(l purgeLine) string { return l.BizType }},
	{title: "STATUS", cell: func(l purgeLine) string { return l.Status }},
	{title: "VERDICT", cell: func(l purgeLine) string { return l.Verdict }},
	{title: "ROWS", cell: func(l purgeLine) string { return strconv.FormatInt(l.Tasks, 10) }},
}

type purgeAsk struct {
	types, statuses []string
	older           *int64
	reason          string
	dryRun          bool
}

// purgeTasks goes through the table page by page. What it returns with an error is done.
func (s *session) purgeTasks(ctx context.Context, ask purgeAsk) ([]purgeLine, error) {
	counts := map[purgeLine]int64{}
	var reason *string
	if !ask.dryRun {
		reason = &ask.reason
	}
	var after int64
	scan := purgeRows
	for {
		var last *int64
		var deleted int64
		err := s.change(ctx, func(tx pgx.Tx) error {
			rows, err := tx.Query(ctx, s.schema.Render(purgeTasksSQL), after, scan, purgeRows, ask.dryRun, ask.types, ask.statuses, ask.older, reason)
			if err != nil {
				return err
			}
			page := map[purgeLine]int64{}
			var l purgeLine
			var n int64
			_, err = pgx.ForEachRow(rows, []any{&l.BizType, &l.Status, &l.Verdict, &n, &last}, func() error {
				page[l] += n
				if l.Verdict == "deleted" || l.Verdict == "due" {
					deleted += n
				}
				return nil
			})
			if err != nil {
				return err
			}
			for l, n := range page {
				if l.Verdict != "not asked for" {
					counts[l] += n
				}
			}
			return nil
		})
		if err != nil || last == nil {
			return purgeLines(counts), err
		}
		after = *last
		if scan = purgeRows; deleted < purgeRows/10 {
			scan = purgeScan
		}
	}
}

func purgeLines(counts map[purgeLine]int64) []purgeLine {
	lines := slices.Collect(maps.Keys(counts))
	slices.SortFunc(lines, func(a, b purgeLine) int {
		return cmp.Or(cmp.Compare(a.BizType, b.BizType), cmp.Compare(a.Status, b.Status), cmp.Compare(a.Verdict, b.Verdict))
	})
	for i := range lines {
		lines[i].Tasks = counts[lines[i]]
	}
	return lines
}

// purgeLogs does the same for the attempt log and the audit, which go by ages of their own.
func (s *session) purgeLogs(ctx context.Context, dryRun bool) ([]purgeLine, error) {
	verdict := "deleted"
	if dryRun {
		verdict = "due"
	}
	attempts, audit := purgeLine{BizType: "-", Status: "attempt log", Verdict: verdict}, purgeLine{BizType: "-", Status: "audit", Verdict: verdict}
	lines := func() []purgeLine { return []purgeLine{attempts, audit} }
	task, token := int64(0), int64(-1)
	for {
		n, next, nextToken, err := s.purgeLogPage(ctx, purgeLogsSQL, task, token, purgeScan, purgeRows, dryRun)
		attempts.Tasks += n
		if err != nil {
			return lines(), err
		}
		if next == nil {
			break
		}
		task, token = *next, *nextToken
	}
	for after := int64(0); ; {
		n, next, _, err := s.purgeLogPage(ctx, purgeAuditSQL, after, purgeScan, purgeRows, dryRun)
		audit.Tasks += n
		if err != nil || next == nil {
			return lines(), err
		}
		after = *next
	}
}

func (s *session) purgeLogPage(ctx context.Context, sql string, args ...any) (deleted int64, last, token *int64, err error) {
	rows, err := s.pool.Query(ctx, s.schema.Render(sql), args...)
	if err != nil {
		return 0, nil, nil, err
	}
	defer rows.Close()
	for rows.Next() {
		dest := []any{&deleted, &last, &token}[:len(rows.FieldDescriptions())]
		if err := rows.Scan(dest...); err != nil {
			return 0, nil, nil, err
		}
	}
	return deleted, last, token, rows.Err()
}
