package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

const bulkHelp = `With a filter (--type, --error, ... or --all) it works in bulk: it counts, asks, and a relay does it in small batches, also
when this command ends. Ctrl-C detaches; "taskrelay bulk" shows and cancels. The same command again finds the open bulk.`

// previewLimit is how far a preview counts.
const previewLimit = 100_000

// bulkFlags choose the tasks of a bulk.
type bulkFlags struct {
	filter         outbox.BulkFilter
	rate           float64
	dryRun, detach bool
	dead           bool // the command is for dead tasks alone
}

// filterFlags are those that make a bulk of a command.
var filterFlags = []string{"type", "status", "error", "error-class", "group", "reason-of-death", "older-than", "newer-than", "all"}

func newBulkFlags(c *cobra.Command) *bulkFlags {
	b := &bulkFlags{}
	f := c.Flags()
	f.StringVar(&b.filter.BizType, "type", "", "filter: biz type")
	f.StringSliceVar(&b.filter.Statuses, "status", nil, "filter: one or more of "+strings.Join(outbox.Statuses(), ", "))
	f.StringVar(&b.filter.Error, "error", "", "filter: text in the last error")
	f.StringVar(&b.filter.ErrorClass, "error-class", "", "filter: class of the last error")
	f.StringVar(&b.filter.Group, "group", "", "filter: a group of dead groups")
	f.StringVar(&b.filter.DeadReason, "reason-of-death", "", "filter: max_attempts, permanent, decode, lost, compensation_failed, ...")
	ageFlags(f, &b.filter.OlderThan, &b.filter.NewerThan, "filter: died or ended (unfinished ones: written)")
	f.BoolVar(&b.filter.All, "all", false, "filter: all there are")
	f.BoolVar(&b.dryRun, "dry-run", false, "say what would be changed, change nothing")
	f.Float64Var(&b.rate, "rate", 500, "with a filter: tasks a second")
	f.BoolVar(&b.detach, "detach", false, "with a filter: start it and do not wait")
	c.RegisterFlagCompletionFunc("status", cobra.FixedCompletions(outbox.Statuses(), cobra.ShellCompDirectiveNoFileComp))
	return b
}

// given says that a filter is meant.
func (b *bulkFlags) given(c *cobra.Command) bool { return b.name(c) != "" }

// name is the first flag of the filter that was given.
func (b *bulkFlags) name(c *cobra.Command) string {
	for _, name := range filterFlags {
		if c.Flags().Changed(name) {
			return "--" + name
		}
	}
	return ""
}

// check refuses what a typing error makes: an empty value would not narrow the filter at all.
func (b *bulkFlags) check(c *cobra.Command) error {
	for _, name := range filterFlags {
		if f := c.Flags().Lookup(name); f.Changed && (f.Value.String() == "" || f.Value.String() == "[]") {
			return usage("--%s is empty", name)
		}
	}
	if b.rate <= 0 {
		return usage("--rate %v: expected more than 0 tasks a second", b.rate)
	}
	return nil
}

// bulk counts what the filter finds, asks, starts the bulk or finds the open one, and watches it to its end.
func (a *app) bulk(c *cobra.Command, b *bulkFlags, op operation, reason string) error {
	p, err := a.printer()
	if err != nil {
		return err
	}
	if err := b.check(c); err != nil {
		return err
	}
	if b.dead {
		b.filter.Statuses = []string{"dead"}
	}
	op.bulk.Flags, op.bulk.Rate = op.flags, b.rate
	ctx, cancel := a.limit(c, a.timeout)
	defer cancel()
	s, err := a.connect(ctx, c)
	if err != nil {
		return err
	}
	defer s.close()
	preview, err := s.schema.PreviewBulk(ctx, s.pool, op.action, b.filter, previewLimit)
	if err != nil {
		return badArgument(err)
	}
	if b.dryRun {
		return a.showPreview(ctx, s, p, op, preview)
	}
	if preview.Found == 0 && !preview.More {
		fmt.Fprintln(a.err, "no task matches")
		return &exitError{code: exitNotFound}
	}
	if err := a.confirm(fmt.Sprintf("%s %s (filter %s)", op.what, taskCount(preview), preview.Filter)); err != nil {
		return err
	}
	ctx, cancel = a.limit(c, a.timeout) // the person's time to answer does not count
	defer cancel()
	var ref outbox.Ref
	err = s.change(ctx, func(tx pgx.Tx) (err error) {
		ref, err = s.schema.StartBulk(ctx, tx, op.action, b.filter, reason, op.bulk)
		return err
	})
	if err != nil {
		return badArgument(err)
	}
	if ref.New {
		fmt.Fprintf(a.err, "bulk %d started\n", ref.ID)
	} else {
		fmt.Fprintf(a.err, "bulk %d is doing this already\n", ref.ID)
	}
	if b.detach {
		fmt.Fprintf(a.err, "to watch it: taskrelay bulk watch %d\n", ref.ID)
		started, err := s.schema.Bulk(ctx, s.pool, ref.ID)
		if err != nil {
			return err
		}
		return printAll(p, []outbox.Bulk{started}, bulkID, bulkColumns())
	}
	return a.watchBulk(c, s, p, ref.ID)
}

// preview is what --dry-run prints.
type preview struct {
	outbox.BulkPreview
	Sample []outbox.Task `json:"sample"`
}

func (a *app) showPreview(ctx context.Context, s *session, p *printer, op operation, found outbox.BulkPreview) error {
	v := preview{BulkPreview: found, Sample: []outbox.Task{}}
	for _, id := range found.Sample {
		t, err := s.schema.Get(ctx, s.pool, id)
		if errors.Is(err, outbox.ErrNotFound) {
			continue // deleted meanwhile
		}
		if err != nil {
			return err
		}
		t.Payload, t.Headers, t.Result = nil, nil, nil
		v.Sample = append(v.Sample, t)
	}
	switch p.format {
	case "json":
		return p.json(v)
	case "jsonl":
		return json.NewEncoder(a.out).Encode(v)
	}
	err := printAll(p, v.Sample, taskID, []column[outbox.Task]{
		{title: "ID", cell: taskID},
		{title: "TYPE", cell: func(t outbox.Task) string { return t.BizType }},
		{title: "BIZ ID", cell: func(t outbox.Task) string { return t.BizID }, cut: 40},
		{title: "STATUS", cell: status},
		{title: "FINISHED", cell: func(t outbox.Task) string { return stamp(t.FinishedAt) }},
		{title: "ERROR", cell: func(t outbox.Task) string { return t.LastError }, cut: 60},
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(a.err, "dry run: would %s %s, of which the first are shown; filter %s\n", op.what, taskCount(found), found.Filter)
	return nil
}

// taskCount of a preview, in words.
func taskCount(p outbox.BulkPreview) string {
	switch {
	case p.More && p.Found == 0:
		return "tasks, of which it found none while it counted,"
	case p.More:
		return strconv.FormatInt(p.Found, 10) + " or more tasks"
	case p.Found == 1:
		return "1 task"
	}
	return strconv.FormatInt(p.Found, 10) + " tasks"
}

// badArgument makes wrong usage of what the SQL functions refuse, with their hint.
func badArgument(err error) error {
	e, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || !refused(err) {
		return err
	}
	text := strings.NewReplacer(`{"all": true}`, "--all", `{"status": "`, "--status ", `"}`, "").Replace(e.Message + ". " + e.Hint)
	return usage("%s", strings.TrimSuffix(strings.TrimSpace(text), "."))
}
