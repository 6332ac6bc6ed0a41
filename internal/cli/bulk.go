package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func (a *app) bulkCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "bulk",
		Short: "Bulk work: list, watch, cancel",
		Long: `A bulk is one change to all tasks that a filter finds: requeue, cancel, delete and the other commands start one when they
are given a filter instead of ids. A relay works it off in small batches.`,
		Example: "  taskrelay bulk list\n  taskrelay bulk watch 7",
	}
	group(c)
	c.AddCommand(a.bulkListCommand(), a.bulkWatchCommand(), a.bulkCancelCommand())
	return c
}

func (a *app) bulkListCommand() *cobra.Command {
	var open bool
	var limit int
	c := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List bulks, the newest first",
		Long:    `list shows what each bulk was to do, why, who started it, and how far it has come.`,
		Example: "  taskrelay bulk list --open\n  taskrelay bulk list -o json",
		Args:    args(cobra.NoArgs),
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
			bulks, err := s.schema.Bulks(ctx, s.pool, open, limit)
			if err != nil {
				return err
			}
			return printAll(p, bulks, bulkID, bulkColumns())
		},
	}
	c.Flags().BoolVar(&open, "open", false, "only those that are not finished")
	c.Flags().IntVar(&limit, "limit", 20, "how many at most")
	return c
}

func (a *app) bulkWatchCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "watch ID",
		Short:   "Follow a bulk to its end",
		Long:    `watch shows the progress of a bulk and ends with it. Ctrl-C ends the watching, not the bulk.`,
		Example: "  taskrelay bulk watch 7",
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			id, err := parseBulkID(argv[0])
			if err != nil {
				return err
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			return a.watchBulk(c, s, p, id)
		},
	}
}

func (a *app) bulkCancelCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:     "cancel ID",
		Short:   "End a bulk before its end",
		Long:    `cancel ends a bulk. What it has changed stays changed.`,
		Example: "  taskrelay bulk cancel 7 --reason 'wrong filter'",
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			id, err := parseBulkID(argv[0])
			if err != nil {
				return err
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			if _, err := s.schema.Bulk(ctx, s.pool, id); err != nil {
				return err
			}
			var change outbox.Change
			err = s.change(ctx, func(tx pgx.Tx) (err error) {
				change, err = s.schema.CancelBulk(ctx, tx, id, reason)
				return err
			})
			if err != nil {
				return err
			}
			b, err := s.schema.Bulk(ctx, s.pool, id)
			if err != nil {
				return err
			}
			if err := printAll(p, []outbox.Bulk{b}, bulkID, bulkColumns()); err != nil {
				return err
			}
			if !change.Changed {
				return &exitError{exitRefused, fmt.Errorf("bulk %d was not cancelled: %s", id, change.WhyNot)}
			}
			return nil
		},
	}
	c.Flags().StringVar(&reason, "reason", "taskrelay bulk cancel", "why, for the audit")
	return c
}

func parseBulkID(s string) (int64, error) {
	id, err := strconv.ParseInt(s, 10, 64)
	if err != nil || id <= 0 {
		return 0, usage("%q: expected the number of a bulk, as bulk list shows it", s)
	}
	return id, nil
}

// watchTick is how often the row of a bulk is read, and sayTick how often its progress is written where stderr is no terminal.
const (
	watchTick = 500 * time.Millisecond
	sayTick   = 10 * time.Second
)

// watchBulk shows the progress of a bulk on stderr and, when it has ended, the bulk on stdout. It has no limit of time
// unless --timeout says so; an interrupt detaches.
func (a *app) watchBulk(c *cobra.Command, s *session, p *printer, id int64) error {
	ctx, cancel := a.limit(c, 0)
	defer cancel()
	terminal := isTerminal(a.err)
	tick := time.NewTicker(watchTick)
	defer tick.Stop()
	var said time.Time
	var last string
	for {
		b, err := s.schema.Bulk(ctx, s.pool, id)
		if ctx.Err() == nil && err != nil {
			a.clearLine(terminal)
			if !errors.Is(err, outbox.ErrNotFound) {
				fmt.Fprintf(a.err, "bulk %d goes on in the relay: taskrelay bulk watch %[1]d\n", id)
			}
			return err
		}
		if ctx.Err() == nil && b.State != "open" {
			a.clearLine(terminal)
			return a.endOfBulk(p, b)
		}
		if ctx.Err() == nil && (terminal || time.Since(said) >= sayTick) {
			line := bulkProgress(b)
			if b.StartedAt == nil {
				line = "waiting for a relay" + s.relayHint(ctx)
			}
			if terminal {
				fmt.Fprintf(a.err, "\r\x1b[K%s", line)
			} else if line != last {
				fmt.Fprintln(a.err, line)
			}
			said, last = time.Now(), line
		}
		select {
		case <-ctx.Done():
			a.clearLine(terminal)
			fmt.Fprintf(a.err, "detached: bulk %d goes on in the relay\n  taskrelay bulk watch %[1]d\n  taskrelay bulk cancel %[1]d\n", id)
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

func (a *app) clearLine(terminal bool) {
	if terminal {
		fmt.Fprint(a.err, "\r\x1b[K")
	}
}

const liveRelaysSQL = `-- taskrelay cli: live relays
SELECT count(*) FROM {{schema}}.relay AS r WHERE r.seen_at > now() - interval '1 minute'`

// relayHint says so when there is nobody to do the work.
func (s *session) relayHint(ctx context.Context) string {
	var n int
	if err := s.pool.QueryRow(ctx, s.schema.Render(liveRelaysSQL)).Scan(&n); err != nil || n > 0 {
		return ""
	}
	return ": none has been seen for a minute, start one"
}

// endOfBulk prints a bulk that has ended; its exit code is that of the same change by ids.
func (a *app) endOfBulk(p *printer, b outbox.Bulk) error {
	if err := printAll(p, []outbox.Bulk{b}, bulkID, bulkColumns()); err != nil {
		return err
	}
	for _, why := range slices.SortedFunc(maps.Keys(b.SkippedWhy), func(x, y string) int { return int(b.SkippedWhy[y] - b.SkippedWhy[x]) }) {
		fmt.Fprintf(a.err, "skipped %d: %s\n", b.SkippedWhy[why], oneLine(why))
	}
	if b.State == "cancelled" {
		fmt.Fprintf(a.err, "cancelled by %s: %s\n", oneLine(b.EndedBy), oneLine(b.EndReason))
	}
	switch {
	case b.State == "done" && b.Done == 0:
		return &exitError{exitNotFound, errors.New("no task matched any more")}
	case b.State == "done" && b.Skipped == 0:
		return nil
	case b.Changed > 0:
		return &exitError{code: exitPartly}
	}
	return &exitError{code: exitRefused}
}

// bulkProgress is one line: how far, how fast, how long still.
func bulkProgress(b outbox.Bulk) string {
	var s strings.Builder
	fmt.Fprintf(&s, "bulk %d, %s: ", b.ID, b.Action)
	switch {
	case b.Expected == nil:
		fmt.Fprintf(&s, "%d", b.Done)
	case b.AtLeast:
		fmt.Fprintf(&s, "%d of at least %d", b.Done, max(*b.Expected, b.Done))
	default:
		fmt.Fprintf(&s, "%d of %d", b.Done, *b.Expected)
	}
	fmt.Fprintf(&s, " (%.0f %%), %d changed", 100*b.Passed, b.Changed)
	if b.Skipped > 0 {
		fmt.Fprintf(&s, ", %d skipped", b.Skipped)
	}
	if b.Expected != nil && !b.AtLeast && b.Done > 0 && b.HeldBack == 0 {
		fmt.Fprintf(&s, ", %s left at %g/s", time.Duration(float64(max(*b.Expected-b.Done, 0))/b.Rate*float64(time.Second)).Round(time.Second), b.Rate)
	}
	if b.HeldBack > 0 {
		fmt.Fprintf(&s, ", waiting: no worker has started %d of them yet", b.HeldBack)
	}
	return s.String()
}

func bulkID(b outbox.Bulk) string { return strconv.FormatInt(b.ID, 10) }

func bulkColumns() []column[outbox.Bulk] {
	return []column[outbox.Bulk]{
		{title: "ID", cell: bulkID},
		{title: "ACTION", cell: func(b outbox.Bulk) string { return b.Action }},
		{title: "STATE", cell: func(b outbox.Bulk) string {
			if b.State == "open" && b.StartedAt == nil {
				return "waiting for relay"
			}
			return b.State
		}},
		{title: "PASSED", cell: func(b outbox.Bulk) string { return fmt.Sprintf("%.0f%%", 100*b.Passed) }},
		{title: "CHANGED", cell: func(b outbox.Bulk) string { return strconv.FormatInt(b.Changed, 10) }},
		{title: "SKIPPED", cell: func(b outbox.Bulk) string { return strconv.FormatInt(b.Skipped, 10) }},
		{title: "FILTER", cell: func(b outbox.Bulk) string { return string(b.Filter) }, cut: 60},
		{title: "BY", cell: func(b outbox.Bulk) string { return b.Actor }, cut: 40},
		{title: "REASON", cell: func(b outbox.Bulk) string { return b.Reason }, cut: 40},
		{title: "STARTED", cell: func(b outbox.Bulk) string { return stamp(&b.CreatedAt) }},
		{title: "ENDED", cell: func(b outbox.Bulk) string { return stamp(b.FinishedAt) }},
	}
}
