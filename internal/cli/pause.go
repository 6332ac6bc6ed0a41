package cli

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

func (a *app) pauseCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "pause TYPE --reason TEXT",
		Short: "Hold back all tasks of a biz type",
		Long: `pause stops a whole biz type within seconds: relays publish nothing more of it, and its consumers in NATS are paused, so
that what is published already is not delivered. Attempts that run finish. Producers go on inserting; nothing is lost, and no
attempt is used up. It holds through restarts of everything, until resume.`,
		Example: "  taskrelay pause ORDER_PAYMENT --reason 'the bank is down until 6'",
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			return a.switchType(c, argv[0], reason, pauseTypeSQL,
				"paused: within seconds nothing more is published or delivered; what runs finishes\nOn again:  taskrelay resume "+argv[0]+" --reason '...'")
		},
	}
	reasonFlag(c, &reason, "")
	return c
}

func (a *app) resumeCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:     "resume TYPE --reason TEXT",
		Short:   "Let the tasks of a paused biz type go on",
		Long:    `resume ends a pause: within seconds relays publish what has waited, and workers get what was published before.`,
		Example: "  taskrelay resume ORDER_PAYMENT --reason 'the bank is back'",
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			return a.switchType(c, argv[0], reason, resumeTypeSQL, "resumed: its tasks go on within seconds")
		},
	}
	reasonFlag(c, &reason, "")
	return c
}

const pauseTypeSQL = `-- taskrelay cli: pause
SELECT p.changed, coalesce(p.why_not, '') FROM {{schema}}.pause($1::text, $2::text) AS p`

const resumeTypeSQL = `-- taskrelay cli: resume
SELECT r.changed, coalesce(r.why_not, '') FROM {{schema}}.resume($1::text, $2::text) AS r`

// typeChange says what an operation did to one biz type.
type typeChange struct {
	BizType string `json:"biz_type"`
	Changed bool   `json:"changed"`
	WhyNot  string `json:"why_not,omitempty"`
}

// noSuchType is what the SQL functions answer for a biz type that nobody has named.
const noSuchType = "no such biz type"

// switchType runs one of the functions that take a type, a reason and more, and prints what it did.
func (a *app) switchType(c *cobra.Command, bizType, reason, sql, done string, more ...any) error {
	p, err := a.printer()
	if err != nil {
		return err
	}
	if reason == "" {
		return usage("--reason is required: it is kept in the audit for whoever asks later")
	}
	ctx, cancel := a.limit(c, a.timeout)
	defer cancel()
	s, err := a.connect(ctx, c)
	if err != nil {
		return err
	}
	defer s.close()
	change, err := s.typeChange(ctx, bizType, sql, append([]any{bizType, reason}, more...)...)
	if err != nil {
		return badArgument(err)
	}
	err = printAll(p, []typeChange{change}, func(t typeChange) string { return t.BizType }, []column[typeChange]{
		{title: "TYPE", cell: func(t typeChange) string { return t.BizType }},
		{title: "CHANGED", cell: func(t typeChange) string { return fmt.Sprint(t.Changed) }},
		{title: "WHY NOT", cell: func(t typeChange) string { return t.WhyNot }},
	})
	switch {
	case err != nil:
		return err
	case change.Changed:
		if done != "" && !p.structured() {
			fmt.Fprintln(a.err, done)
		}
		return nil
	case change.WhyNot == noSuchType:
		if !p.structured() {
			fmt.Fprintln(a.err, "taskrelay types list shows those there are; taskrelay types add makes one known")
		}
		return &exitError{code: exitNotFound}
	}
	return &exitError{code: exitRefused}
}

func (s *session) typeChange(ctx context.Context, bizType, sql string, args ...any) (typeChange, error) {
	change := typeChange{BizType: bizType}
	err := s.change(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, s.schema.Render(sql), args...).Scan(&change.Changed, &change.WhyNot)
	})
	return change, err
}
