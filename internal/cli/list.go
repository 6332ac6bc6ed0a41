package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func (a *app) listCommand() *cobra.Command {
	var f outbox.Filter
	var limit int
	var payload []string
	c := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List tasks, the newest first",
		Long: `list shows tasks without their payloads, by the role taskrelay_operator. Filters narrow each other.

An index finds --biz-id, --biz-id-prefix, --status dead, and the unfinished ones (--status pending,running,retrying,blocked),
however large the table. --older-than and --newer-than are found by id, which grows with time. All other filters read tasks
one by one, from the newest back, until --limit are found; when --timeout ends that, what was found is shown, with the
command that goes on (exit code 5). Bound such a search with --newer-than.`,
		Example: `  taskrelay list --status retrying --type REFUND_CARD
  taskrelay list --status pending,retrying --error 'connection refused' --older-than 10m -o id
  taskrelay list --payload order.id=10001 --newer-than 2d
  taskrelay list --biz-id-prefix O-2026-11- --limit 200 -o json
  taskrelay list --status running --worker pay-7f9c`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			if limit < 1 {
				return usage("--limit %d: expected 1 or more", limit)
			}
			for _, s := range f.Statuses {
				if err := validStatus(s); err != nil {
					return err
				}
			}
			if f.Payload, err = payloadValues(payload); err != nil {
				return err
			}
			if err := f.Validate(); err != nil {
				return usage("%w", err)
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			found, err := s.search(ctx, f, limit, func(searched int64) {
				fmt.Fprintf(a.err, "reading back from the newest task, %s so far; --newer-than would bound it\n", count(searched, "id"))
			})
			if err != nil {
				return err
			}
			delivery, err := s.delivery(ctx, found.tasks)
			if err != nil {
				return err
			}
			if err := printAll(p, found.tasks, taskID, taskColumns(delivery)); err != nil {
				return err
			}
			if found.down > 0 {
				return &exitError{exitPartly, fmt.Errorf("ran out of time (--timeout) at task %[1]d, older ones were not looked at: go on with --after %[1]d, or narrow it by --newer-than, --status or --type", found.down)}
			}
			if found.more {
				fmt.Fprintf(a.err, "%d shown, there are more: --after %s shows the next ones\n", len(found.tasks), taskID(found.tasks[len(found.tasks)-1]))
			}
			return nil
		},
	}
	fl := c.Flags()
	fl.StringSliceVar(&f.Statuses, "status", nil, "any of "+strings.Join(outbox.Statuses(), ", "))
	fl.StringVar(&f.BizType, "type", "", "biz type")
	fl.StringVar(&f.BizID, "biz-id", "", "biz id")
	fl.StringVar(&f.BizIDPrefix, "biz-id-prefix", "", "what the biz id begins with")
	fl.StringVar(&f.Priority, "priority", "", "high or low")
	fl.StringVar(&f.ErrorContains, "error", "", "text in the last error")
	fl.StringVar(&f.ErrorClass, "error-class", "", "class of the last error")
	fl.StringVar(&f.Worker, "worker", "", "what the name of the worker that holds the lease begins with: its host, or all of it")
	fl.StringArrayVar(&payload, "payload", nil, "value in the payload, such as order.id=10001; may be repeated")
	ageFlags(fl, &f.OlderThan, &f.NewerThan, "written")
	fl.IntVar(&limit, "limit", 50, "how many at most")
	fl.Int64Var(&f.Before, "after", 0, "go on after this id: the last one of the page before")
	c.RegisterFlagCompletionFunc("status", cobra.FixedCompletions(outbox.Statuses(), cobra.ShellCompDirectiveNoFileComp))
	c.RegisterFlagCompletionFunc("priority", cobra.FixedCompletions([]string{outbox.PriorityHigh, outbox.PriorityLow}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func validStatus(status string) error {
	for _, s := range outbox.Statuses() {
		if s == status {
			return nil
		}
	}
	return usage("--status %q: expected any of %s", status, strings.Join(outbox.Statuses(), ", "))
}

// payloadValues parses path=value, such as order.id=10001.
func payloadValues(texts []string) ([]outbox.PayloadValue, error) {
	var values []outbox.PayloadValue
	for _, s := range texts {
		path, value, ok := strings.Cut(s, "=")
		keys := strings.Split(path, ".")
		for _, k := range keys {
			ok = ok && k != ""
		}
		if !ok {
			return nil, usage("--payload %q: expected path=value, such as order.id=10001", s)
		}
		values = append(values, outbox.PayloadValue{Path: keys, Value: value})
	}
	return values, nil
}

// age is a flag that takes days too: operators think of 2d, which time.ParseDuration does not know.
type age struct{ d *time.Duration }

func (v age) Set(s string) error {
	var r config.Retention
	if err := r.Set(s); err != nil || r.After <= 0 {
		return fmt.Errorf("expected how long ago, such as 10m, 12h or 2d")
	}
	*v.d = r.After
	return nil
}

func (v age) String() string {
	if v.d == nil || *v.d == 0 {
		return ""
	}
	return v.d.String()
}

func (v age) Type() string { return "age" }

// ageFlags adds --older-than and --newer-than.
func ageFlags(fl *pflag.FlagSet, older, newer *time.Duration, what string) {
	fl.Var(age{older}, "older-than", what+" at least this long ago, such as 10m or 2d")
	fl.Var(age{newer}, "newer-than", what+" at most this long ago")
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
