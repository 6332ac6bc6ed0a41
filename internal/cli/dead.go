package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/natscli"
	"github.com/taskrelay/taskrelay/pkg/outbox"
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

const deadSQL = `-- taskrelay cli: dead list
SELECT d.id, d.biz_type, coalesce(d.biz_id, ''), d.dead_at, coalesce(d.dead_reason, ''), d.attempts,
       coalesce(d.error_class, ''), coalesce(d.last_error, ''), d.compensation,
       coalesce(d.title, ''), coalesce(d.runbook_url, ''), d.dead_lettered_at
FROM {{schema}}.dead AS d
WHERE ($1::text = '' OR d.biz_type = $1::text) AND ($2::text = '' OR d.dead_reason = $2::text)
ORDER BY d.dead_at DESC, d.id DESC
LIMIT $3::bigint`

func (a *app) deadCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "dead",
		Aliases: []string{"dlq"},
		Short:   "Look at dead tasks",
		Example: "  taskrelay dead list",
	}
	group(c)
	var bizType, reason string
	var limit int64
	list := &cobra.Command{
		Use:   "list",
		Short: "List dead tasks, the newest first",
		Long: `list shows the tasks that were given up, why, and what the runbook of their type says. Each also has a dead letter in
a stream, with the payload as its body, which the nats CLI shows.`,
		Example: `  taskrelay dead list --type ACCOUNT_OPEN --reason compensation_failed
  taskrelay dead list -o id | taskrelay requeue - --reason 'bank is back' --yes`,
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
			names := outbox.Names{Namespace: s.config.Namespace}
			rows, err := s.pool.Query(ctx, s.schema.Render(deadSQL), bizType, reason, limit)
			if err != nil {
				return err
			}
			dead, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (d deadTask, err error) {
				err = row.Scan(&d.ID, &d.BizType, &d.BizID, &d.DeadAt, &d.Reason, &d.Attempts, &d.ErrorClass, &d.Error,
					&d.Compensation, &d.Title, &d.RunbookURL, &d.DeadLetteredAt)
				d.DeadAt = d.DeadAt.UTC()
				if d.DeadLetteredAt != nil {
					*d.DeadLetteredAt = d.DeadLetteredAt.UTC()
				}
				d.Subject = names.DeadSubject(d.BizType, d.ID)
				return d, err
			})
			if err != nil {
				return err
			}
			id := func(d deadTask) string { return strconv.FormatInt(d.ID, 10) }
			if err := printAll(p, dead, id, deadColumns(id)); err != nil {
				return err
			}
			if p.structured() {
				return nil
			}
			if len(dead) == 0 {
				fmt.Fprintln(a.err, "no dead tasks")
				return nil
			}
			url := string(s.config.NatsURL)
			if s.config.NatsURL.Redacted() != url || url == "" {
				url = "$TASKRELAY_NATS_URL" // not set, or it holds a password
			}
			fmt.Fprintln(a.err, "\nThe letters themselves:")
			for _, command := range natscli.DeadLetters(url, names, dead[0].Subject) {
				fmt.Fprintln(a.err, "  "+strings.ReplaceAll(natscli.Line(command), "'$TASKRELAY_NATS_URL'", `"$TASKRELAY_NATS_URL"`))
			}
			fmt.Fprintf(a.err, "More:\n  taskrelay show %[1]d\n  taskrelay requeue %[1]d --reason '...'\n", dead[0].ID)
			return nil
		},
	}
	list.Flags().StringVar(&bizType, "type", "", "biz type")
	list.Flags().StringVar(&reason, "reason", "", "max_attempts, permanent, decode, expired, oversize, refused, compensation_failed or lost")
	list.Flags().Int64Var(&limit, "limit", 50, "how many at most")
	c.AddCommand(list)
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
