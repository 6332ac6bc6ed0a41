package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// shown is all there is to know about a task.
type shown struct {
	Task     outbox.Task      `json:"task"`
	Delivery string           `json:"delivery,omitempty"`
	Limit    int              `json:"limit,omitempty"` // on attempts, when the row or its type has one
	Next     next             `json:"next"`
	Letter   *letter          `json:"letter,omitempty"` // of a dead task
	Attempts []outbox.Attempt `json:"attempts"`
	Audit    []auditLine      `json:"audit"`
}

// letter is where the dead letter of a task is, and what its type's owner wrote about such tasks.
type letter struct {
	Subject    string     `json:"subject"`
	OutAt      *time.Time `json:"out_at"` // null: not yet published
	Look       string     `json:"look"`   // the command that shows it
	Title      string     `json:"title,omitempty"`
	RunbookURL string     `json:"runbook_url,omitempty"`
}

// auditLine is one change that a person made.
type auditLine struct {
	At     time.Time       `json:"at"`
	Actor  string          `json:"actor"`
	Action string          `json:"action"`
	Reason string          `json:"reason,omitempty"`
	Before json.RawMessage `json:"before,omitempty"`
	After  json.RawMessage `json:"after,omitempty"`
}

func (a *app) showCommand() *cobra.Command {
	var payload, stack bool
	c := &cobra.Command{
		Use:   "show ID|TYPE/BIZ_ID",
		Short: "Show one task: its row, its way, its attempts, and what happens next",
		Long: `show prints the row, where an unfinished task is on its way, what happens next and when, the attempts as a timeline,
and what people changed. --payload prints the payload alone, byte for byte.`,
		Example: `  taskrelay show 4711
  taskrelay show ORDER_PAYMENT/O-1 -o json
  taskrelay show ORDER_PAYMENT/O-1 --payload > payload.json`,
		Args: args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			return a.showTask(c, argv[0], showOptions{payload: payload, stack: stack})
		},
	}
	c.Flags().BoolVar(&payload, "payload", false, "print the payload alone, byte for byte")
	c.Flags().BoolVar(&stack, "stack", false, "print the stacks of attempts that panicked")
	return c
}

type showOptions struct {
	payload, stack bool
	dead           bool // only a dead task
}

func (a *app) showTask(c *cobra.Command, name string, o showOptions) error {
	p, err := a.printer()
	if err != nil {
		return err
	}
	if p.format == "csv" {
		return usage("show has no csv: use -o json")
	}
	r, err := parseRef(name)
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
	ids, err := s.ids(ctx, []ref{r})
	if err != nil {
		return err
	}
	v, err := s.show(ctx, ids[0])
	if err != nil {
		return err
	}
	if o.dead && v.Task.Status != "dead" {
		return &exitError{exitRefused, fmt.Errorf("task %d is not dead, it is %s: taskrelay show %[1]d", v.Task.ID, v.Task.Status)}
	}
	switch {
	case o.payload:
		_, err = a.out.Write(v.Task.Payload)
		return err
	case p.format == "id":
		_, err = fmt.Fprintln(a.out, v.Task.ID)
		return err
	case p.format == "jsonl":
		enc := json.NewEncoder(a.out)
		enc.SetEscapeHTML(false)
		return enc.Encode(v)
	case p.format == "json":
		return p.json(v)
	}
	return v.print(a.out, o.stack)
}

const showViewSQL = `-- taskrelay cli: delivery, limit and who is there
SELECT now(), coalesce(v.delivery, ''), coalesce(v.max_attempts, 0), b.paused_at, coalesce(b.paused_reason, ''),
       coalesce(b.title, ''), coalesce(b.runbook_url, ''), coalesce(k.relay, ''), coalesce(k.live_workers, 0)
FROM {{schema}}.task_view AS v
LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = v.biz_type
LEFT JOIN {{schema}}.known_lane AS k ON k.biz_type = v.biz_type AND k.priority = v.priority
WHERE v.id = $1::bigint`

const auditSQL = `-- taskrelay cli: audit of a task
SELECT u.at, u.actor, u.action, coalesce(u.reason, ''), coalesce(u.before::text, ''), coalesce(u.after::text, '')
FROM {{schema}}.audit AS u
WHERE u.task_id = $1::bigint
ORDER BY u.id`

func (s *session) show(ctx context.Context, id int64) (shown, error) {
	v := shown{Attempts: []outbox.Attempt{}, Audit: []auditLine{}}
	var err error
	if v.Task, err = s.schema.Get(ctx, s.pool, id); err != nil {
		return v, err
	}
	var w surroundings
	var title, runbook string
	err = s.read(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, s.schema.Render(showViewSQL), id).Scan(&w.now, &v.Delivery, &v.Limit, &w.pausedAt, &w.pausedReason,
			&title, &runbook, &w.relay, &w.workers)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return v, fmt.Errorf("%w: %d", outbox.ErrNotFound, id) // deleted in between
	}
	if err != nil {
		return v, err
	}
	v.Next = nextStep(v.Task, v.Delivery, w)
	if v.Task.Status == "dead" {
		names := names(s.config)
		subject := names.DeadSubject(v.Task.BizType, id)
		v.Letter = &letter{Subject: subject, OutAt: v.Task.DeadLetteredAt, Title: title, RunbookURL: runbook,
			Look: natsLine(natsServer(s.config, "").Command(names, "stream", "get", names.DeadStream(), "--last-for", subject))}
	}
	attempts, err := s.schema.Attempts(ctx, s.pool, id)
	if err != nil {
		return v, err
	}
	v.Attempts = append(v.Attempts, attempts...)
	rows, err := s.pool.Query(ctx, s.schema.Render(auditSQL), id)
	if err != nil {
		return v, err
	}
	lines, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l auditLine, err error) {
		var before, after string
		err = row.Scan(&l.At, &l.Actor, &l.Action, &l.Reason, &before, &after)
		l.At = l.At.UTC()
		if before != "" {
			l.Before = json.RawMessage(before)
		}
		if after != "" {
			l.After = json.RawMessage(after)
		}
		return l, err
	})
	v.Audit = append(v.Audit, lines...)
	return v, err
}

// payloadShown is how much of a payload print shows; --payload has all of it.
const payloadShown = 2000

// print writes the task for a person.
func (v shown) print(w io.Writer, stack bool) error {
	t := v.Task
	var b strings.Builder
	line := func(name, format string, args ...any) {
		if text := fmt.Sprintf(format, args...); text != "" {
			fmt.Fprintf(&b, "  %-14s %s\n", name, oneLine(text))
		}
	}
	fmt.Fprintf(&b, "task %d  %s", t.ID, oneLine(t.BizType))
	if t.BizID != "" {
		fmt.Fprintf(&b, "/%s", oneLine(t.BizID))
	}
	fmt.Fprintf(&b, "  %s\n", status(t))
	line("next", "%s", v.Next.What)
	line("", "%s", v.Next.Command)
	line("delivery", "%s", v.Delivery)
	line("priority", "%s", t.Priority)
	limit := ""
	if v.Limit > 0 {
		limit = " of " + strconv.Itoa(v.Limit)
	}
	line("attempt", "%d%s (%s, generation %d)", t.Attempt, limit, t.Phase, t.Generation)
	line("created", "%s", stamp(&t.CreatedAt))
	line("run at", "%s", stamp(t.RunAt))
	line("first started", "%s", stamp(t.FirstStartedAt))
	if t.FinishedAt == nil {
		due := t.Due()
		line("due", "%s", stamp(&due))
	}
	if t.Status == "running" {
		line("lease", "%s until %s", t.LeaseOwner, stamp(t.LeaseUntil))
	}
	line("cancel asked", "%s", stamp(t.CancelRequestedAt))
	line("finished", "%s", stamp(t.FinishedAt))
	if t.DeadReason != "" {
		line("dead reason", "%s", t.DeadReason)
	}
	if t.DeadAt != nil {
		letter := stamp(t.DeadLetteredAt)
		if letter == "" {
			letter = "not out yet"
		}
		line("dead letter", "%s", letter)
	}
	if v.Letter != nil {
		line("", "%s", v.Letter.Look)
		line("title", "%s", v.Letter.Title)
		line("runbook", "%s", v.Letter.RunbookURL)
	}
	if t.Compensation != "none" {
		line("compensation", "%s", t.Compensation)
	}
	line("cause", "%s", t.Cause)
	line("last error", "%s", t.LastError)
	line("error class", "%s", t.ErrorClass)
	if s := string(t.Headers); s != "{}" {
		line("headers", "%s", s)
	}
	line("payload", "%s", shorten(string(t.Payload), payloadShown))
	line("result", "%s", shorten(string(t.Result), payloadShown))

	fmt.Fprintf(&b, "attempts (%d)\n", len(v.Attempts))
	for _, a := range v.Attempts {
		// The clock of the line is the time since the task was written.
		generation := ""
		if t.Generation > 0 {
			generation = fmt.Sprintf(" (generation %d)", a.Generation)
		}
		fmt.Fprintf(&b, "  %s  %8s  %s %d  %s%s  %s  %s  %s\n", stamp(&a.StartedAt), "+"+ago(max(0, a.StartedAt.Sub(t.CreatedAt))),
			a.Phase, a.Attempt, a.Outcome, generation, a.Duration().Round(100*time.Microsecond), oneLine(a.Worker),
			oneLine(strings.TrimSpace(a.ErrorClass+" "+shorten(a.Error, 300))))
		if stack && a.Stack != "" {
			for text := range strings.Lines(a.Stack) {
				fmt.Fprintf(&b, "      %s\n", oneLine(strings.TrimRight(text, "\r\n")))
			}
		}
	}
	if len(v.Audit) > 0 {
		fmt.Fprintf(&b, "changes (%d)\n", len(v.Audit))
		for _, l := range v.Audit {
			fmt.Fprintf(&b, "  %s  %s by %s: %s\n", stamp(&l.At), l.Action, oneLine(l.Actor), oneLine(l.Reason))
			if len(l.Before) > 0 && len(l.After) > 0 {
				fmt.Fprintf(&b, "      %s -> %s\n", oneLine(string(l.Before)), oneLine(string(l.After)))
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
