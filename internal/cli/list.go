package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func (a *app) listCommand() *cobra.Command {
	var f outbox.Filter
	var limit int
	c := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List tasks, the newest first",
		Long: `list shows tasks without their payloads. Filters narrow each other. --type is an index look-up, as is --status dead;
other filters read backwards from the newest task.`,
		Example: `  taskrelay list --status retrying --type REFUND_CARD
  taskrelay list --error 'connection refused' --limit 200 -o id
  taskrelay list --biz-id O-1 -o json`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			if limit < 1 {
				return usage("--limit %d: expected 1 or more", limit)
			}
			if err := validStatus(f.Status); err != nil {
				return err
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			tasks, err := listTasks(ctx, s, f, limit)
			if err != nil {
				return err
			}
			if len(tasks) == limit {
				defer fmt.Fprintf(a.err, "stopped at %d tasks (--limit), there may be more\n", limit)
			}
			delivery, err := s.delivery(ctx, tasks)
			if err != nil {
				return err
			}
			return printAll(p, tasks, taskID, taskColumns(delivery))
		},
	}
	fl := c.Flags()
	fl.StringVar(&f.Status, "status", "", "one of "+strings.Join(outbox.Statuses(), ", "))
	fl.StringVar(&f.BizType, "type", "", "biz type")
	fl.StringVar(&f.BizID, "biz-id", "", "biz id")
	fl.StringVar(&f.ErrorContains, "error", "", "text in the last error")
	fl.IntVar(&limit, "limit", 50, "how many at most")
	c.RegisterFlagCompletionFunc("status", cobra.FixedCompletions(outbox.Statuses(), cobra.ShellCompDirectiveNoFileComp))
	return c
}

func validStatus(status string) error {
	for _, s := range outbox.Statuses() {
		if s == status || status == "" {
			return nil
		}
	}
	return usage("--status %q: expected one of %s", status, strings.Join(outbox.Statuses(), ", "))
}

// listTasks reads page by page: one page has at most 1,000.
func listTasks(ctx context.Context, s *session, f outbox.Filter, limit int) ([]outbox.Task, error) {
	var all []outbox.Task
	for len(all) < limit {
		f.Limit = min(limit-len(all), 1000)
		page, err := s.schema.List(ctx, s.pool, f)
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

const deliverySQL = `-- taskrelay cli: delivery
SELECT v.id, coalesce(v.delivery, '') FROM {{schema}}.task_view AS v WHERE v.id = ANY ($1::bigint[])`

// delivery says of unfinished tasks where they are on their way.
func (s *session) delivery(ctx context.Context, tasks []outbox.Task) (map[int64]string, error) {
	var ids []int64
	for _, t := range tasks {
		if t.FinishedAt == nil {
			ids = append(ids, t.ID)
		}
	}
	found := map[int64]string{}
	if len(ids) == 0 {
		return found, nil
	}
	rows, err := s.pool.Query(ctx, s.schema.Render(deliverySQL), ids)
	if err != nil {
		return nil, err
	}
	var id int64
	var d string
	_, err = pgx.ForEachRow(rows, []any{&id, &d}, func() error {
		found[id] = d
		return nil
	})
	return found, err
}

func taskID(t outbox.Task) string { return strconv.FormatInt(t.ID, 10) }

func taskColumns(delivery map[int64]string) []column[outbox.Task] {
	return []column[outbox.Task]{
		{title: "ID", cell: taskID},
		{title: "TYPE", cell: func(t outbox.Task) string { return t.BizType }},
		{title: "BIZ ID", cell: func(t outbox.Task) string { return t.BizID }, cut: 40},
		{title: "STATUS", cell: status},
		{title: "ATTEMPT", cell: func(t outbox.Task) string { return strconv.Itoa(t.Attempt) }},
		{title: "DUE", cell: func(t outbox.Task) string {
			if t.FinishedAt != nil {
				return ""
			}
			due := t.Due()
			return stamp(&due)
		}},
		{title: "DELIVERY", cell: func(t outbox.Task) string { return delivery[t.ID] }},
		{title: "FINISHED", cell: func(t outbox.Task) string { return stamp(t.FinishedAt) }},
		{title: "ERROR", cell: func(t outbox.Task) string { return t.LastError }, cut: 60},
	}
}

// status with what a reader needs to know beside it.
func status(t outbox.Task) string {
	if t.Phase == "compensate" && t.FinishedAt == nil {
		return t.Status + " (compensating)"
	}
	return t.Status
}
