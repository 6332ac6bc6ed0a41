package cli

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func (a *app) requeueCommand() *cobra.Command {
	var reason string
	var compensated bool
	c := &cobra.Command{
		Use:   "requeue ID... --reason TEXT",
		Short: "Start dead or cancelled tasks anew",
		Long: `requeue starts dead and cancelled tasks anew: attempts are counted from one, and the dead letter goes away. Tasks are
named by id or TYPE/BIZ_ID; "-" reads them from stdin. The reason is kept in the audit.`,
		Example: `  taskrelay requeue 4711 --reason 'bank is back'
  taskrelay dead list --type REFUND_CARD -o id | taskrelay requeue - --reason 'bank is back' --yes`,
		Args: args(cobra.MinimumNArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			var flags []outbox.Flag
			if compensated {
				flags = append(flags, outbox.AllowCompensated)
			}
			return a.change(c, argv, "requeue", reason, func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
				return s.schema.Requeue(ctx, tx, ids, reason, flags...)
			})
		},
	}
	reasonFlag(c, &reason, "")
	c.Flags().BoolVar(&compensated, "allow-compensated", false, "also tasks whose compensation was done; they run under a new idempotency key")
	return c
}

func (a *app) resetCommand() *cobra.Command {
	var reason string
	var compensated, succeeded bool
	c := &cobra.Command{
		Use:   "reset TYPE/BIZ_ID --reason TEXT",
		Short: "Start a task over, whatever its state",
		Long: `reset starts one task over from any state but running. A succeeded task, and one whose compensation was done, need a
flag that says that running it again is meant.`,
		Example: `  taskrelay reset ORDER_PAYMENT/O-1 --reason 'wrong account was charged' --allow-succeeded`,
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			r, err := parseRef(argv[0])
			if err != nil {
				return err
			}
			if r.id != 0 {
				return usage("%q: reset takes TYPE/BIZ_ID, such as ORDER_PAYMENT/O-1", argv[0])
			}
			var flags []outbox.Flag
			if compensated {
				flags = append(flags, outbox.AllowCompensated)
			}
			if succeeded {
				flags = append(flags, outbox.AllowSucceeded)
			}
			return a.change(c, argv, "reset", reason, func(ctx context.Context, s *session, tx pgx.Tx, _ []int64) ([]outbox.Change, error) {
				change, err := s.schema.Reset(ctx, tx, r.bizType, r.bizID, reason, flags...)
				return []outbox.Change{change}, err
			})
		},
	}
	reasonFlag(c, &reason, "")
	c.Flags().BoolVar(&compensated, "allow-compensated", false, "also when its compensation was done")
	c.Flags().BoolVar(&succeeded, "allow-succeeded", false, "also when it has succeeded: it runs again under its first idempotency key")
	return c
}

func (a *app) runCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "run ID...",
		Short: "Make waiting tasks due now",
		Long: `run makes tasks due at once that wait for their time or for a retry. Their attempts go on being counted. Dead and
cancelled tasks need requeue.`,
		Example: "  taskrelay run 4711\n  taskrelay list --status retrying --type REFUND_CARD -o id | taskrelay run - --yes",
		Args:    args(cobra.MinimumNArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			return a.change(c, argv, "run now", reason, func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
				return s.schema.RunNow(ctx, tx, ids, reason)
			})
		},
	}
	reasonFlag(c, &reason, "taskrelay run")
	return c
}

func (a *app) delayCommand() *cobra.Command {
	var reason string
	var by time.Duration
	c := &cobra.Command{
		Use:     "delay ID... --by DURATION",
		Short:   "Make waiting tasks due later",
		Long:    `delay makes tasks due that much later than now, whatever they wait for. Running and finished ones are refused.`,
		Example: "  taskrelay delay 4711 --by 1h30m --reason 'the bank closes early'",
		Args:    args(cobra.MinimumNArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			if by <= 0 || by > 366*24*time.Hour {
				return usage("--by %v: expected more than 0 and at most 8784h (366 days)", by)
			}
			return a.change(c, argv, "delay", reason, func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
				return s.schema.Delay(ctx, tx, ids, by, reason)
			})
		},
	}
	reasonFlag(c, &reason, "taskrelay delay")
	c.Flags().DurationVar(&by, "by", 0, "from now, such as 90s, 1h30m or 24h (required)")
	return c
}

func (a *app) cancelCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "cancel ID...",
		Short: "Cancel unfinished tasks",
		Long: `cancel ends waiting tasks at once. A running one is asked to stop: its handler's context ends, and it is cancelled
unless it finishes first. Nothing is compensated.`,
		Example: "  taskrelay cancel 4711 ORDER_PAYMENT/O-2 --reason 'ordered by mistake' --yes",
		Args:    args(cobra.MinimumNArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			return a.change(c, argv, "cancel", reason, func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
				return s.schema.Cancel(ctx, tx, ids, reason)
			})
		},
	}
	reasonFlag(c, &reason, "taskrelay cancel")
	return c
}

func (a *app) deleteCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "delete ID... --reason TEXT",
		Short: "Delete tasks for good",
		Long: `delete removes tasks with their dead letters; their attempts stay in the log. The biz id is free again at once. A running
task is refused: cancel it first. Dead tasks need no deleting to be out of the way; requeue brings them back, delete does not.`,
		Example: `  taskrelay delete ORDER_PAYMENT/O-1 --reason 'entered twice by hand' --yes`,
		Args:    args(cobra.MinimumNArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			if len(argv) == 1 && argv[0] != "-" { // several are asked for below
				if err := a.confirm("delete task " + argv[0] + " for good"); err != nil {
					return err
				}
			}
			return a.change(c, argv, "delete", reason, func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
				return s.schema.Delete(ctx, tx, ids, reason)
			})
		},
	}
	reasonFlag(c, &reason, "")
	return c
}

func reasonFlag(c *cobra.Command, reason *string, byDefault string) {
	text := "why, for the audit"
	if byDefault == "" {
		text += " (required)"
	}
	c.Flags().StringVar(reason, "reason", byDefault, text)
}

// change runs one of the operations on the tasks named by argv, in one transaction, and prints what became of each.
func (a *app) change(c *cobra.Command, argv []string, what, reason string,
	operate func(context.Context, *session, pgx.Tx, []int64) ([]outbox.Change, error)) error {
	p, err := a.printer()
	if err != nil {
		return err
	}
	if reason == "" {
		return usage("--reason is required: it is kept in the audit for whoever asks later")
	}
	refs, err := a.refs(argv)
	if err != nil {
		return err
	}
	if len(refs) > 1 {
		if err := a.confirm(fmt.Sprintf("%s %d tasks", what, len(refs))); err != nil {
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
	err = s.change(ctx, func(tx pgx.Tx) (err error) {
		changes, err = operate(ctx, s, tx, ids)
		return err
	})
	if err != nil {
		return err
	}
	err = printAll(p, changes, func(c outbox.Change) string { return strconv.FormatInt(c.ID, 10) }, []column[outbox.Change]{
		{title: "ID", cell: func(c outbox.Change) string { return strconv.FormatInt(c.ID, 10) }},
		{title: "CHANGED", cell: func(c outbox.Change) string { return strconv.FormatBool(c.Changed) }},
		{title: "WHY NOT", cell: func(c outbox.Change) string { return c.WhyNot }},
	})
	if err != nil {
		return err
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
