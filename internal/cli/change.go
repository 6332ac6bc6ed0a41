package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// operation is one change to tasks: by id in this process, or by a filter as a bulk that a relay works off.
type operation struct {
	action string // the bulk's name for it
	what   string // in a question: "requeue 3 tasks"
	flags  []outbox.Flag
	bulk   outbox.BulkOptions
	do     func(context.Context, *session, pgx.Tx, []int64) ([]outbox.Change, error)
}

func (a *app) requeueCommand() *cobra.Command {
	var reason string
	var compensated bool
	c := &cobra.Command{
		Use:   "requeue ID... | FILTER --reason TEXT",
		Short: "Start dead or cancelled tasks anew",
		Long: `requeue starts dead and cancelled tasks anew: attempts are counted from one, and the dead letter goes away. Tasks are
named by id or TYPE/BIZ_ID; "-" reads them from stdin. The reason is kept in the audit.

` + bulkHelp + ` A filter means dead tasks, unless --status names cancelled ones.`,
		Example: `  taskrelay requeue 4711 --reason 'bank is back'
  taskrelay requeue --type REFUND_CARD --error 'connection refused' --dry-run
  taskrelay requeue --type REFUND_CARD --newer-than 3h --reason 'bank is back'`,
	}
	reasonFlag(c, &reason, "")
	c.Flags().BoolVar(&compensated, "allow-compensated", false, "also tasks whose compensation was done; they run under a new idempotency key")
	return a.changes(c, &reason, func() (operation, error) {
		flags := flagList(compensated, false)
		return operation{action: "requeue", what: "requeue", flags: flags, do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
			return s.schema.Requeue(ctx, tx, ids, reason, flags...)
		}}, nil
	})
}

func (a *app) resetCommand() *cobra.Command {
	var reason string
	var compensated, succeeded bool
	c := &cobra.Command{
		Use:   "reset TYPE/BIZ_ID... | FILTER --reason TEXT",
		Short: "Start tasks over, whatever their state",
		Long: `reset starts tasks over from any state but running. A succeeded task, and one whose compensation was done, need a
flag that says that running it again is meant.

` + bulkHelp + ` It needs --status.`,
		Example: `  taskrelay reset ORDER_PAYMENT/O-1 --reason 'wrong account was charged' --allow-succeeded
  taskrelay reset 4711 --reason 'counted wrong'`,
	}
	reasonFlag(c, &reason, "")
	c.Flags().BoolVar(&compensated, "allow-compensated", false, "also when its compensation was done")
	c.Flags().BoolVar(&succeeded, "allow-succeeded", false, "also when it has succeeded: it runs again under its first idempotency key")
	return a.changes(c, &reason, func() (operation, error) {
		flags := flagList(compensated, succeeded)
		return operation{action: "reset", what: "start over", flags: flags, do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
			return s.schema.ResetIDs(ctx, tx, ids, reason, flags...)
		}}, nil
	})
}

func (a *app) rerunCommand() *cobra.Command {
	var reason string
	var compensated, succeeded bool
	c := &cobra.Command{
		Use:   "rerun ID... | FILTER --reason TEXT",
		Short: "Run finished tasks once more",
		Long: `rerun runs finished tasks once more, from the start: dead, cancelled and, with --allow-succeeded, succeeded ones. These
run under their first idempotency key: a target that honours it answers as it did before.

` + bulkHelp + ` It needs --status.`,
		Example: `  taskrelay rerun 4711 --allow-succeeded --reason 'the report was lost'
  taskrelay rerun --type REPORT --status succeeded --newer-than 2h --allow-succeeded --reason 'the disk was full'`,
	}
	reasonFlag(c, &reason, "")
	c.Flags().BoolVar(&compensated, "allow-compensated", false, "also tasks whose compensation was done; they run under a new idempotency key")
	c.Flags().BoolVar(&succeeded, "allow-succeeded", false, "also succeeded tasks")
	return a.changes(c, &reason, func() (operation, error) {
		flags := flagList(compensated, succeeded)
		return operation{action: "rerun", what: "run once more", flags: flags, do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
			return s.schema.Rerun(ctx, tx, ids, reason, flags...)
		}}, nil
	})
}

func (a *app) runCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "run ID... | FILTER",
		Short: "Make waiting tasks due now",
		Long: `run makes tasks due at once that wait for their time or for a retry. Their attempts go on being counted. Dead and
cancelled tasks need requeue.

` + bulkHelp,
		Example: "  taskrelay run 4711\n  taskrelay run --type REFUND_CARD --status retrying --reason 'bank is back'",
	}
	reasonFlag(c, &reason, "taskrelay run")
	return a.changes(c, &reason, func() (operation, error) {
		return operation{action: "run_now", what: "run now", do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
			return s.schema.RunNow(ctx, tx, ids, reason)
		}}, nil
	})
}

func (a *app) delayCommand() *cobra.Command {
	var reason string
	var by time.Duration
	c := &cobra.Command{
		Use:   "delay ID... | FILTER --by DURATION",
		Short: "Make waiting tasks due later",
		Long: `delay makes tasks due that much later than now, whatever they wait for. Running and finished ones are refused.

` + bulkHelp,
		Example: "  taskrelay delay 4711 --by 1h30m --reason 'the bank closes early'\n  taskrelay delay --type REFUND_CARD --by 8h --reason 'the bank is closed'",
	}
	reasonFlag(c, &reason, "taskrelay delay")
	c.Flags().DurationVar(&by, "by", 0, "from now, such as 90s, 1h30m or 24h (required)")
	return a.changes(c, &reason, func() (operation, error) {
		if by <= 0 || by > 366*24*time.Hour {
			return operation{}, usage("--by %v: expected more than 0 and at most 8784h (366 days)", by)
		}
		return operation{action: "delay", what: "delay", bulk: outbox.BulkOptions{By: by},
			do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
				return s.schema.Delay(ctx, tx, ids, by, reason)
			}}, nil
	})
}

func (a *app) priorityCommand() *cobra.Command {
	var reason, to string
	c := &cobra.Command{
		Use:   "priority ID... | FILTER --to high|low",
		Short: "Move waiting tasks to the other priority",
		Long: `priority moves waiting tasks to the other lane of their type. They are due when they were. Running and finished ones are
refused.

` + bulkHelp,
		Example: "  taskrelay priority ORDER_PAYMENT/O-1 --to high --reason 'the customer waits'\n  taskrelay priority --type REPORT --to low --reason 'payments first'",
	}
	reasonFlag(c, &reason, "taskrelay priority")
	c.Flags().StringVar(&to, "to", "", "high or low (required)")
	c.RegisterFlagCompletionFunc("to", cobra.FixedCompletions([]string{"high", "low"}, cobra.ShellCompDirectiveNoFileComp))
	return a.changes(c, &reason, func() (operation, error) {
		if to != outbox.PriorityHigh && to != outbox.PriorityLow {
			return operation{}, usage("--to %q: expected high or low", to)
		}
		return operation{action: "set_priority", what: "set the priority of", bulk: outbox.BulkOptions{Priority: to},
			do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
				return s.schema.SetPriority(ctx, tx, ids, to, reason)
			}}, nil
	})
}

func (a *app) cancelCommand() *cobra.Command {
	var reason string
	var compensate, uncompensated bool
	c := &cobra.Command{
		Use:   "cancel ID... | FILTER",
		Short: "Cancel unfinished tasks",
		Long: `cancel ends waiting tasks at once. A running one is asked to stop: its handler's context ends, and it is cancelled
unless it finishes first. Nothing is compensated, unless --compensate says so: then what was begun is undone, and the task
ends as dead with reason cancelled. A task that was never started has nothing to undo.

A task that is being compensated already is refused: it would end with what it began not undone. --allow-uncompensated
says that this is meant, because somebody has undone it by hand; the task ends as cancelled, its compensation as failed.

` + bulkHelp,
		Example: `  taskrelay cancel 4711 ORDER_PAYMENT/O-2 --reason 'ordered by mistake' --yes
  taskrelay cancel --type ORDER_PAYMENT --status retrying --compensate --reason 'the shop is closed'`,
	}
	reasonFlag(c, &reason, "taskrelay cancel")
	c.Flags().BoolVar(&compensate, "compensate", false, "undo what was begun")
	c.Flags().BoolVar(&uncompensated, "allow-uncompensated", false, "also tasks that are being compensated: what they began is NOT undone")
	return a.changes(c, &reason, func() (operation, error) {
		if compensate && uncompensated {
			return operation{}, usage("--compensate undoes what was begun, --allow-uncompensated leaves it: give one of them")
		}
		var flags []outbox.Flag
		what := "cancel"
		if compensate {
			flags, what = append(flags, outbox.Compensate), "cancel and compensate"
		}
		if uncompensated {
			flags, what = append(flags, outbox.AllowUncompensated), "cancel without undoing"
		}
		return operation{action: "cancel", what: what, flags: flags, do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
			return s.schema.Cancel(ctx, tx, ids, reason, flags...)
		}}, nil
	})
}

func (a *app) deleteCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "delete ID... | FILTER --reason TEXT",
		Short: "Delete tasks for good",
		Long: `delete removes tasks with their dead letters; their attempts stay in the log. The biz id is free again at once. A running
task is refused: cancel it first. Dead tasks need no deleting to be out of the way; requeue brings them back, delete does not.

` + bulkHelp + ` It needs --status.`,
		Example: `  taskrelay delete ORDER_PAYMENT/O-1 --reason 'entered twice by hand' --yes
  taskrelay delete --type TEST_RUN --status succeeded,cancelled --older-than 24h --reason 'test data'`,
	}
	reasonFlag(c, &reason, "")
	return a.changes(c, &reason, func() (operation, error) {
		return operation{action: "delete", what: "delete for good", do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
			return s.schema.Delete(ctx, tx, ids, reason)
		}}, nil
	})
}

func flagList(compensated, succeeded bool) (flags []outbox.Flag) {
	if compensated {
		flags = append(flags, outbox.AllowCompensated)
	}
	if succeeded {
		flags = append(flags, outbox.AllowSucceeded)
	}
	return flags
}

func reasonFlag(c *cobra.Command, reason *string, byDefault string) {
	text := "why, for the audit"
	if byDefault == "" {
		text += " (required)"
	} else {
		text += " (required with a filter)"
	}
	c.Flags().StringVar(reason, "reason", byDefault, text)
}

// changes makes a command of an operation: on the tasks that are named, or on those that its filter finds. make reads the
// command's own flags.
func (a *app) changes(c *cobra.Command, reason *string, make func() (operation, error)) *cobra.Command {
	b := newBulkFlags(c)
	c.RunE = func(c *cobra.Command, argv []string) error {
		filtered := b.given(c)
		switch {
		case len(argv) == 0 && !filtered:
			return usage("expected tasks (ids, TYPE/BIZ_ID, or - for stdin) or a filter such as --type: %s --help", c.CommandPath())
		case len(argv) > 0 && filtered:
			return usage("give tasks or a filter (%s), not both", b.name(c))
		case *reason == "", filtered && !b.dryRun && !c.Flags().Changed("reason"):
			if !b.dryRun {
				return usage("--reason is required: it is kept in the audit for whoever asks later")
			}
			*reason = "dry run"
		}
		op, err := make()
		if err != nil {
			return err
		}
		if filtered {
			return a.bulk(c, b, op, *reason)
		}
		if c.Flags().Changed("rate") || c.Flags().Changed("detach") {
			return usage("--rate and --detach go with a filter")
		}
		return a.change(c, argv, op, b.dryRun)
	}
	return c
}

// changeBatch is how many tasks one transaction changes: it holds their rows, and workers wait for these.
const changeBatch = 500

var errDryRun = errors.New("dry run")

// change runs an operation on the tasks named by argv, and prints what became of each. Batches are transactions of their
// own: what is printed has happened.
func (a *app) change(c *cobra.Command, argv []string, op operation, dryRun bool) error {
	p, err := a.printer()
	if err != nil {
		return err
	}
	refs, err := a.refs(argv)
	if err != nil {
		return err
	}
	if !dryRun && (len(refs) > 1 || op.action == "delete") {
		question := fmt.Sprintf("%s %d tasks", op.what, len(refs))
		if len(refs) == 1 {
			question = op.what + ": " + argv[0]
		}
		if err := a.confirm(question); err != nil {
			return err
		}
	}
	ctx, cancel := a.limit(c, a.timeout)
	defer cancel()
	s, err := a.connect(ctx, c)
	if err != nil {
		return err
	}
	defer s.close()
	ids, err := s.ids(ctx, refs)
	if err != nil {
		return err
	}
	var changes []outbox.Change
	var failure error
	for rest := ids; len(rest) > 0 && failure == nil; {
		batch := rest[:min(len(rest), changeBatch)]
		rest = rest[len(batch):]
		var done []outbox.Change
		failure = s.change(ctx, func(tx pgx.Tx) (err error) {
			if done, err = op.do(ctx, s, tx, batch); err == nil && dryRun {
				err = errDryRun
			}
			return err
		})
		if failure == nil || errors.Is(failure, errDryRun) {
			changes, failure = append(changes, done...), nil
		}
	}
	if failure != nil && len(changes) == 0 {
		return failure
	}
	title := "CHANGED"
	if dryRun {
		title = "WOULD CHANGE"
	}
	err = printAll(p, changes, func(c outbox.Change) string { return strconv.FormatInt(c.ID, 10) }, []column[outbox.Change]{
		{title: "ID", cell: func(c outbox.Change) string { return strconv.FormatInt(c.ID, 10) }},
		{title: title, cell: func(c outbox.Change) string { return strconv.FormatBool(c.Changed) }},
		{title: "WHY NOT", cell: func(c outbox.Change) string { return c.WhyNot }},
	})
	if err != nil {
		return err
	}
	if failure != nil {
		fmt.Fprintf(a.err, "%d of %d tasks were looked at, then it stopped\n", len(changes), len(ids))
		return failure
	}
	if dryRun {
		fmt.Fprintln(a.err, "dry run: nothing was changed")
	}
	a.nameFlags(c, changes)
	return changeResult(changes)
}

// noSuchTask is what the SQL functions answer for an id that does not exist.
const noSuchTask = "no such task"

// changeResult is the exit code of an operation. The table printed before says why, so the error is silent.
func changeResult(changes []outbox.Change) error {
	changed, missing := 0, 0
	for _, c := range changes {
		switch {
		case c.Changed:
			changed++
		case c.WhyNot == noSuchTask:
			missing++
		}
	}
	switch {
	case changed == len(changes):
		return nil
	case changed > 0:
		return &exitError{code: exitPartly}
	case missing == len(changes):
		return &exitError{code: exitNotFound}
	}
	return &exitError{code: exitRefused}
}
