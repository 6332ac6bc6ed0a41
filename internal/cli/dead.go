package cli

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/taskrelay/taskrelay/internal/natscli"
)

// deadTask is one line of the view dead.
type deadTask struct {
	ID             int64      `json:"id,string"`
	BizType        string     `json:"biz_type"`
	BizID          string     `json:"biz_id,omitempty"`
	DeadAt         time.Time  `json:"dead_at"`
	Reason         string     `json:"reason"`
	Attempts       int        `json:"attempts"`
	ErrorClass     string     `json:"error_class,omitempty"`
	Error          string     `json:"error,omitempty"`
	Compensation   string     `json:"compensation"`
	Title          string     `json:"title,omitempty"`
	RunbookURL     string     `json:"runbook_url,omitempty"`
	DeadLetteredAt *time.Time `json:"dead_lettered_at"`
	Subject        string     `json:"subject"`
}

// deadFilter chooses among dead tasks. All of them are read through the small indexes over dead_at.
type deadFilter struct {
	bizType, reason, errorClass, errorText, group string
	older, newer                                  time.Duration // since the death
}

func (f *deadFilter) flags(fl *pflag.FlagSet) {
	fl.StringVar(&f.bizType, "type", "", "biz type")
	fl.StringVar(&f.reason, "reason", "", "max_attempts, permanent, decode, expired, oversize, refused, compensation_failed, cancelled or lost")
	fl.StringVar(&f.errorClass, "error-class", "", "class of the last error")
	fl.StringVar(&f.errorText, "error", "", "text in the last error")
	fl.StringVar(&f.group, "group", "", "a group of dead groups")
	ageFlags(fl, &f.older, &f.newer, "died")
}

// where reads the view dead, so that a viewer may. An empty value chooses all: the server plans for the values given.
const deadWhereSQL = `
WHERE ($1::text = '' OR d.biz_type >= $1::text AND d.biz_type <= $1::text) -- see orderOfDeath
  AND ($2::text = '' OR d.dead_reason = $2::text)
  AND ($3::text = '' OR d.error_class = $3::text)
  AND ($4::text = '' OR strpos(d.last_error, $4::text) > 0)
  AND ($5::text = '' OR ` + errorGroupSQL + ` = $5::text)
  AND ($6::bigint = 0 OR d.dead_at <= now() - $6::bigint * interval '1 microsecond')
  AND ($7::bigint = 0 OR d.dead_at >= now() - $7::bigint * interval '1 microsecond')`

func (f deadFilter) args() []any {
	return []any{f.bizType, f.reason, f.errorClass, f.errorText, f.group, f.older.Microseconds(), f.newer.Microseconds()}
}

const deadSQL = `-- taskrelay cli: dead list
SELECT d.id, d.biz_type, coalesce(d.biz_id, ''), d.dead_at, coalesce(d.dead_reason, ''), d.attempts,
       coalesce(d.error_class, ''), coalesce(d.last_error, ''), d.compensation,
       coalesce(d.title, ''), coalesce(d.runbook_url, ''), d.dead_lettered_at
FROM {{schema}}.dead AS d` + deadWhereSQL + `
  AND ($8::bigint = 0 OR (d.dead_at, d.id) < ($9::timestamptz, $8::bigint))
ORDER BY %s d.dead_at DESC, d.id DESC
LIMIT $10::bigint`

// orderOfDeath makes the planner take the index over (biz_type, dead_at) for one type. Told that biz_type is equal to a
// value, it drops it from the order, and may walk the index over dead_at through the dead of all types instead [2 s for
// 50,000 dead of other types and none of this one].
func (f deadFilter) orderOfDeath() string {
	if f.bizType == "" {
		return ""
	}
	return "d.biz_type DESC,"
}

const deadAtSQL = `-- taskrelay cli: when did it die
SELECT d.dead_at FROM {{schema}}.dead AS d WHERE d.id = $1::bigint`

// listDead returns at most limit dead tasks behind the one with id after, and whether there are more. limit 0: all.
func (s *session) listDead(ctx context.Context, f deadFilter, after, limit int64) (dead []deadTask, more bool, err error) {
	var diedAt time.Time
	names := names(s.config)
	want := limit + 1
	if limit == 0 {
		want = math.MaxInt64
	}
	err = s.read(ctx, func(tx pgx.Tx) error {
		if after != 0 {
			err := tx.QueryRow(ctx, s.schema.Render(deadAtSQL), after).Scan(&diedAt)
			if errors.Is(err, pgx.ErrNoRows) {
				return &exitError{exitNotFound, fmt.Errorf("--after %d: that task is not dead any more, so there is no place to go on from: list from the start, or by --older-than", after)}
			}
			if err != nil {
				return err
			}
		}
		rows, err := tx.Query(ctx, s.schema.Render(fmt.Sprintf(deadSQL, f.orderOfDeath())), append(f.args(), after, diedAt, want)...)
		if err != nil {
			return err
		}
		dead, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (d deadTask, err error) {
			err = row.Scan(&d.ID, &d.BizType, &d.BizID, &d.DeadAt, &d.Reason, &d.Attempts, &d.ErrorClass, &d.Error,
				&d.Compensation, &d.Title, &d.RunbookURL, &d.DeadLetteredAt)
			d.DeadAt = d.DeadAt.UTC()
			if d.DeadLetteredAt != nil {
				*d.DeadLetteredAt = d.DeadLetteredAt.UTC()
			}
			d.Subject = names.DeadSubject(d.BizType, d.ID)
			return d, err
		})
		return err
	})
	if limit > 0 && int64(len(dead)) > limit {
		return dead[:limit], true, err
	}
	return dead, false, err
}

func (a *app) deadCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "dead",
		Aliases: []string{"dlq"},
		Short:   "Dead tasks: list, show, group, export",
		Example: "  taskrelay dead groups\n  taskrelay dead list",
	}
	group(c)
	c.AddCommand(a.deadListCommand(), a.deadShowCommand(), a.deadGroupsCommand(), a.deadExportCommand(),
		a.deadRequeueCommand(), a.deadDiscardCommand())
	return c
}

func (a *app) deadListCommand() *cobra.Command {
	var f deadFilter
	var limit, after int64
	list := &cobra.Command{
		Use:   "list",
		Short: "List dead tasks, the last one first",
		Long: `list shows the tasks that were given up, why, and what the runbook of their type says. Each also has a dead letter in
a stream, with the payload as its body, which the nats CLI shows.`,
		Example: `  taskrelay dead list --type ACCOUNT_OPEN --reason compensation_failed
  taskrelay dead list --error 'connection refused' --newer-than 2h
  taskrelay dead list --limit 0 -o id | taskrelay requeue - --reason 'bank is back' --yes`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			if limit < 0 {
				return usage("--limit %d: expected 1 or more, or 0 for all", limit)
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			dead, more, err := s.listDead(ctx, f, after, limit)
			if err != nil {
				return err
			}
			id := func(d deadTask) string { return strconv.FormatInt(d.ID, 10) }
			if err := printAll(p, dead, id, deadColumns(id)); err != nil {
				return err
			}
			if more {
				fmt.Fprintf(a.err, "%d shown, there are more: --after %s shows the next ones, --limit 0 all\n", len(dead), id(dead[len(dead)-1]))
			}
			if p.structured() {
				return nil
			}
			if len(dead) == 0 {
				fmt.Fprintln(a.err, "no dead tasks")
				return nil
			}
			fmt.Fprintln(a.err, "\nThe letters themselves:")
			for _, command := range natscli.DeadLetters(natsServer(s.config, urlVariable), names(s.config), dead[0].Subject) {
				fmt.Fprintln(a.err, "  "+natsLine(command))
			}
			fmt.Fprintf(a.err, "More:\n  taskrelay dead show %[1]d\n  taskrelay dead groups\n  taskrelay requeue %[1]d --reason '...'\n", dead[0].ID)
			return nil
		},
	}
	f.flags(list.Flags())
	list.Flags().Int64Var(&limit, "limit", 50, "how many at most, 0 for all")
	list.Flags().Int64Var(&after, "after", 0, "go on after this id: the last one of the page before")
	return list
}

func (a *app) deadShowCommand() *cobra.Command {
	var o showOptions
	c := &cobra.Command{
		Use:   "show ID|TYPE/BIZ_ID",
		Short: "Show one dead task: why it died, its attempts, its letter, how to bring it back",
		Long: `show prints what "taskrelay show" does, of a dead task only: exit code 4 when it is not dead. The letter in the stream
has the payload as its body; the command that shows it is printed.`,
		Example: "  taskrelay dead show 4711\n  taskrelay dead show ORDER_PAYMENT/O-1 --stack",
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			o.dead = true
			return a.showTask(c, argv[0], o)
		},
	}
	c.Flags().BoolVar(&o.payload, "payload", false, "print the payload alone, byte for byte")
	c.Flags().BoolVar(&o.stack, "stack", false, "print the stacks of attempts that panicked")
	return c
}

func deadColumns(id func(deadTask) string) []column[deadTask] {
	return []column[deadTask]{
		{title: "ID", cell: id},
		{title: "TYPE", cell: func(d deadTask) string { return d.BizType }},
		{title: "BIZ ID", cell: func(d deadTask) string { return d.BizID }, cut: 40},
		{title: "DEAD AT", cell: func(d deadTask) string { return stamp(&d.DeadAt) }},
		{title: "REASON", cell: func(d deadTask) string { return d.Reason }},
		{title: "ATTEMPTS", cell: func(d deadTask) string { return strconv.Itoa(d.Attempts) }},
		{title: "COMPENSATION", cell: func(d deadTask) string { return d.Compensation }},
		{title: "ERROR", cell: func(d deadTask) string { return d.Error }, cut: 60},
		{title: "TITLE", cell: func(d deadTask) string { return d.Title }, cut: 40},
		{title: "RUNBOOK", cell: func(d deadTask) string { return d.RunbookURL }},
	}
}
