package cli

import (
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// errorShapeSQL is an error without what differs from task to task, and errorGroupSQL the name of all dead tasks of one
// type, class and shape. Functions of the schema, because a bulk is given such a name too.
const (
	errorShapeSQL = `{{schema}}.error_shape(d.last_error)`
	errorGroupSQL = `{{schema}}.error_group(d.biz_type, d.error_class, d.last_error)`
)

// The shape costs most (some 20 µs): it is made once for each task, and the name once for each group.
const deadGroupsSQL = `-- taskrelay cli: dead groups
SELECT ` + errorGroupSQL + `, g.biz_type, coalesce(g.error_class, ''), g.shape, g.n, g.hour, g.day, g.week, g.compensated, g.first, g.last, g.sample
FROM (
    SELECT s.biz_type, s.error_class, s.shape, count(*) AS n,
           count(*) FILTER (WHERE s.dead_at > now() - interval '1 hour') AS hour,
           count(*) FILTER (WHERE s.dead_at > now() - interval '1 day') AS day,
           count(*) FILTER (WHERE s.dead_at > now() - interval '7 days') AS week,
           count(*) FILTER (WHERE s.compensation = 'done') AS compensated,
           min(s.dead_at) AS first, max(s.dead_at) AS last, max(s.id) AS sample
    FROM (
        SELECT d.id, d.biz_type, d.error_class, d.dead_at, d.compensation, ` + errorShapeSQL + ` AS shape
        FROM {{schema}}.dead AS d` + deadWhereSQL + `
        OFFSET 0
    ) AS s
    GROUP BY s.biz_type, s.error_class, s.shape
    ORDER BY count(*) DESC, max(s.dead_at) DESC
    LIMIT $8::bigint
) AS g
JOIN {{schema}}.dead AS d ON d.id = g.sample
ORDER BY g.n DESC, g.last DESC`

// deadGroup is dead tasks of one type that died of the same error.
type deadGroup struct {
	Group       string    `json:"group"`
	BizType     string    `json:"biz_type"`
	ErrorClass  string    `json:"error_class,omitempty"`
	Error       string    `json:"error,omitempty"` // with # for what differs
	Count       int64     `json:"count"`
	Hour        int64     `json:"last_hour"`
	Day         int64     `json:"last_day"`
	Week        int64     `json:"last_7_days"`
	Compensated int64     `json:"compensated"` // were undone: a requeue of these needs --allow-compensated
	First       time.Time `json:"first_dead_at"`
	Last        time.Time `json:"last_dead_at"`
	Sample      int64     `json:"sample_id,string"`
	Requeue     string    `json:"requeue"` // the command that brings all of this group back
}

func (a *app) deadGroupsCommand() *cobra.Command {
	var f deadFilter
	var limit int64
	c := &cobra.Command{
		Use:   "groups",
		Short: "Dead tasks by what they died of, with counts and the command that brings a group back",
		Long: `groups counts dead tasks by biz type, class of the error, and the error's text with # for ids and numbers; how many of
them died within the last hour, day and 7 days; when the first and the last one did; and one of them as a sample. The name
of a group stands for exactly its tasks, in "dead list", "dead export", "dead requeue" and "dead discard".`,
		Example: `  taskrelay dead groups
  taskrelay dead groups --type ORDER_PAYMENT --newer-than 2d -o json
  taskrelay dead requeue --group 4c1d20aa7e --reason 'bank is back'`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			if limit < 1 {
				return usage("--limit %d: expected 1 or more", limit)
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			var groups []deadGroup
			err = s.read(ctx, func(tx pgx.Tx) error {
				rows, err := tx.Query(ctx, s.schema.Render(deadGroupsSQL), append(f.args(), limit+1)...)
				if err != nil {
					return err
				}
				groups, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (g deadGroup, err error) {
					err = row.Scan(&g.Group, &g.BizType, &g.ErrorClass, &g.Error, &g.Count, &g.Hour, &g.Day, &g.Week, &g.Compensated,
						&g.First, &g.Last, &g.Sample)
					g.First, g.Last = g.First.UTC(), g.Last.UTC()
					g.Requeue = f.requeue(g)
					return g, err
				})
				return err
			})
			if err != nil {
				return err
			}
			more := int64(len(groups)) > limit
			if more {
				groups = groups[:limit]
			}
			if err := printAll(p, groups, func(g deadGroup) string { return g.Group }, deadGroupColumns()); err != nil {
				return err
			}
			if more {
				fmt.Fprintf(a.err, "%d groups shown, there are more: --limit %d\n", limit, 4*limit)
			}
			if p.structured() {
				return nil
			}
			if len(groups) == 0 {
				fmt.Fprintln(a.err, "no dead tasks")
				return nil
			}
			fmt.Fprintf(a.err, "\nThe first group's tasks, and the command that brings back all of them:\n  taskrelay dead list --group %s\n  %s\n",
				groups[0].Group, groups[0].Requeue)
			return nil
		},
	}
	f.flags(c.Flags())
	c.Flags().Int64Var(&limit, "limit", 50, "how many at most")
	return c
}

// requeue is the command for a group. The filter's other conditions are part of it: the count was made under them.
func (f deadFilter) requeue(g deadGroup) string {
	command := "taskrelay dead requeue --group " + g.Group
	if f.reason != "" {
		command += " --reason-of-death " + f.reason
	}
	if f.errorText != "" {
		command += " --error " + shellWord(f.errorText)
	}
	if f.older > 0 {
		command += " --older-than " + f.older.String()
	}
	if f.newer > 0 {
		command += " --newer-than " + f.newer.String()
	}
	if g.Compensated > 0 {
		command += " --allow-compensated"
	}
	return command + " --reason '...'"
}

func deadGroupColumns() []column[deadGroup] {
	number := func(get func(deadGroup) int64) func(deadGroup) string {
		return func(g deadGroup) string { return strconv.FormatInt(get(g), 10) }
	}
	return []column[deadGroup]{
		{title: "GROUP", cell: func(g deadGroup) string { return g.Group }},
		{title: "TYPE", cell: func(g deadGroup) string { return g.BizType }},
		{title: "CLASS", cell: func(g deadGroup) string { return g.ErrorClass }, cut: 30},
		{title: "ERROR", cell: func(g deadGroup) string { return g.Error }, cut: 60},
		{title: "COUNT", cell: number(func(g deadGroup) int64 { return g.Count })},
		{title: "1H", cell: number(func(g deadGroup) int64 { return g.Hour })},
		{title: "24H", cell: number(func(g deadGroup) int64 { return g.Day })},
		{title: "7D", cell: number(func(g deadGroup) int64 { return g.Week })},
		{title: "FIRST", cell: func(g deadGroup) string { return stamp(&g.First) }},
		{title: "LAST", cell: func(g deadGroup) string { return stamp(&g.Last) }},
		{title: "SAMPLE", cell: number(func(g deadGroup) int64 { return g.Sample })},
	}
}
