package cli

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// typeRow is one line of the view types.
type typeRow struct {
	BizType         string          `json:"biz_type"`
	PausedAt        *time.Time      `json:"paused_at"`
	PausedReason    string          `json:"paused_reason,omitempty"`
	PausedBy        string          `json:"paused_by,omitempty"`
	Backlog         int64           `json:"backlog"`
	LiveWorkers     int             `json:"live_workers"`
	Refused         bool            `json:"refused"` // by strict types
	Rate            *float64        `json:"rate"`
	Concurrency     *int            `json:"concurrency"`
	DefaultPriority string          `json:"default_priority,omitempty"`
	MaxAttempts     *int            `json:"max_attempts"`
	Policy          json.RawMessage `json:"policy"`
	RetainSucceeded string          `json:"retain_succeeded"`
	RetainCancelled string          `json:"retain_cancelled"`
	RetainDead      string          `json:"retain_dead"`
	Compensates     bool            `json:"compensates"`
	Notifier        string          `json:"notifier,omitempty"`
	Title           string          `json:"title,omitempty"`
	RunbookURL      string          `json:"runbook_url,omitempty"`
	KnownBy         string          `json:"known_by,omitempty"`
}

const typesSQL = `-- taskrelay cli: types
SELECT v.biz_type, v.paused_at, coalesce(v.paused_reason, ''), coalesce(v.paused_by, ''), coalesce(g.backlog, 0), v.live_workers, coalesce(v.refused, false),
       v.rate, v.concurrency, coalesce(v.default_priority, ''), v.max_attempts, coalesce(v.policy::text, 'null'),
       coalesce(v.retain_succeeded::text, 'kept'), coalesce(v.retain_cancelled::text, 'kept'), coalesce(v.retain_dead::text, 'kept'),
       v.compensates, coalesce(v.notifier, ''), coalesce(v.title, ''), coalesce(v.runbook_url, ''), coalesce(v.known_by, '')
FROM {{schema}}.types AS v
LEFT JOIN (SELECT l.biz_type, sum(l.backlog)::bigint AS backlog FROM {{schema}}.lag AS l GROUP BY l.biz_type) AS g ON g.biz_type = v.biz_type
ORDER BY v.biz_type`

func (a *app) typesCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "types",
		Short:   "Look at biz types and set their switches",
		Example: "  taskrelay types list\n  taskrelay types set ORDER_PAYMENT --rate 50 --reason 'the bank asked for it'",
	}
	group(c)
	c.AddCommand(a.typesListCommand(), a.typesSetCommand("set"), a.typesSetCommand("add"), a.typesStrictCommand())
	return c
}

func (a *app) typesListCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List biz types with their switches, backlog and workers",
		Long:    `list shows every biz type that a task, a worker or an operator has named. -o json has all settings.`,
		Example: "  taskrelay types list\n  taskrelay types list -o json",
		Args:    args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
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
			rows, err := s.pool.Query(ctx, s.schema.Render(typesSQL))
			if err != nil {
				return err
			}
			types, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (t typeRow, err error) {
				var policy string
				err = row.Scan(&t.BizType, &t.PausedAt, &t.PausedReason, &t.PausedBy, &t.Backlog, &t.LiveWorkers, &t.Refused,
					&t.Rate, &t.Concurrency, &t.DefaultPriority, &t.MaxAttempts, &policy,
					&t.RetainSucceeded, &t.RetainCancelled, &t.RetainDead,
					&t.Compensates, &t.Notifier, &t.Title, &t.RunbookURL, &t.KnownBy)
				t.Policy = json.RawMessage(policy)
				if t.PausedAt != nil {
					*t.PausedAt = t.PausedAt.UTC()
				}
				return t, err
			})
			if err != nil {
				return err
			}
			if err := printAll(p, types, func(t typeRow) string { return t.BizType }, typeColumns); err != nil {
				return err
			}
			if len(types) == 0 && !p.structured() {
				fmt.Fprintln(a.err, "no biz types yet: they come with the first task, the first worker, or taskrelay types add")
			}
			return nil
		},
	}
}

var typeColumns = []column[typeRow]{
	{title: "TYPE", cell: func(t typeRow) string { return t.BizType }},
	{title: "STATE", cell: typeState, cut: 60},
	{title: "BACKLOG", cell: func(t typeRow) string { return strconv.FormatInt(t.Backlog, 10) }},
	{title: "WORKERS", cell: func(t typeRow) string { return strconv.Itoa(t.LiveWorkers) }},
	{title: "RATE", cell: func(t typeRow) string { return optional(t.Rate) }},
	{title: "CONCURRENCY", cell: func(t typeRow) string { return optional(t.Concurrency) }},
	{title: "PRIORITY", cell: func(t typeRow) string { return t.DefaultPriority }},
	{title: "ATTEMPTS", cell: func(t typeRow) string { return optional(t.MaxAttempts) }},
	{title: "KEEPS", cell: func(t typeRow) string { return t.RetainSucceeded }},
	{title: "KEEPS DEAD", cell: func(t typeRow) string { return t.RetainDead }},
	{title: "TITLE", cell: func(t typeRow) string { return t.Title }, cut: 40},
}

func typeState(t typeRow) string {
	switch {
	case t.PausedAt != nil:
		return "paused since " + stamp(t.PausedAt) + ": " + t.PausedReason
	case t.Refused:
		return "refused: strict types are on, nobody has made it known"
	case t.LiveWorkers == 0:
		return "no live worker"
	}
	return "on"
}

func optional[T any](v *T) string {
	if v == nil {
		return ""
	}
	return fmt.Sprint(*v)
}

const setTypeSQL = `-- taskrelay cli: set type
SELECT s.changed, coalesce(s.why_not, '') FROM {{schema}}.set_type($1::text, $3::jsonb, $2::text, $4::boolean) AS s`

// typesSetCommand is "types set", or "types add", which makes a type known that no worker has.
func (a *app) typesSetCommand(name string) *cobra.Command {
	var reason string
	var rate, jitter float64
	var concurrency, maxAttempts int
	var priority, strategy, notifier, title, runbook, succeeded, cancelled, dead string
	var base, limit time.Duration
	var compensates, known bool
	var clear []string
	c := &cobra.Command{
		Use:   name + " TYPE --reason TEXT",
		Short: "Set the switches of a biz type",
		Long: `set changes what is named and leaves the rest. It holds within seconds, without a restart. --clear takes a setting away
again, so that the worker's own or the relay's default holds.

Ages are written as 30d, 12h, 0 (delete a task when it succeeds, which frees its biz id) or forever.`,
		Example: `  taskrelay types set ORDER_PAYMENT --rate 50 --concurrency 8 --reason 'the bank asked for it'
  taskrelay types set ORDER_PAYMENT --retain-succeeded 7d --reason 'the auditors have their copy'
  taskrelay types set ORDER_PAYMENT --strategy fixed --base-delay 5m --reason 'the bank is slow tonight'
  taskrelay types set ORDER_PAYMENT --clear rate,policy --reason 'back to normal'`,
		Args: args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, argv []string) error {
			settings := map[string]any{}
			changed := func(flag string) bool { return c.Flags().Changed(flag) }
			put := func(flag, key string, value any) {
				if changed(flag) {
					settings[key] = value
				}
			}
			if changed("rate") && !(rate > 0 && rate <= 1e6) || changed("concurrency") && concurrency < 1 || changed("max-attempts") && (maxAttempts < 1 || maxAttempts > 1000) {
				return usage("--rate and --concurrency must be above 0, --rate at most 1000000, --max-attempts 1 to 1000; --clear takes a setting away")
			}
			if changed("default-priority") && !slices.Contains([]string{outbox.PriorityHigh, outbox.PriorityLow}, priority) {
				return usage("--default-priority %q: expected high or low", priority)
			}
			put("rate", "rate", rate)
			put("concurrency", "concurrency", concurrency)
			put("default-priority", "default_priority", priority)
			put("max-attempts", "max_attempts", maxAttempts)
			put("compensates", "compensates", compensates)
			put("notifier", "notifier", notifier)
			put("title", "title", title)
			put("runbook-url", "runbook_url", runbook)
			put("known", "known", known)
			for flag, value := range map[string]string{"retain-succeeded": succeeded, "retain-cancelled": cancelled, "retain-dead": dead} {
				if !changed(flag) {
					continue
				}
				interval, err := ageText(value)
				if err != nil {
					return usage("--%s: %w", flag, err)
				}
				settings[strings.ReplaceAll(flag, "-", "_")] = interval
			}
			if changed("strategy") || changed("base-delay") || changed("max-delay") || changed("jitter") {
				if !changed("strategy") || !changed("base-delay") {
					return usage("a policy is set as a whole: --strategy and --base-delay, with --max-delay and --jitter where they apply")
				}
				policy := map[string]any{"strategy": strategy, "base_delay": base.String(), "max_delay": max(limit, base).String(), "jitter": jitter}
				settings["policy"] = policy
			}
			for _, s := range clear {
				settings[strings.ReplaceAll(strings.TrimSpace(s), "-", "_")] = nil
			}
			if len(settings) == 0 && name == "set" {
				return usage("nothing to set (%s --help)", c.CommandPath())
			}
			if outbox.ValidateBizType(argv[0]) != nil {
				return usage("%q is no biz type: expected letters, digits, _ and -, at most 63", argv[0])
			}
			body, err := json.Marshal(settings)
			if err != nil {
				return err
			}
			return a.switchType(c, argv[0], reason, setTypeSQL, "set: it holds within seconds", string(body), name == "add")
		},
	}
	if name == "add" {
		c.Short = "Make a biz type known that no worker has registered yet"
		c.Long = "add makes a type known, so that strict types let its tasks in before its worker has run, and sets its switches.\n\n" + c.Long
		c.Example = "  taskrelay types add REFUND_CARD --title 'Refund to a card' --reason 'goes live on Monday'"
	}
	f := c.Flags()
	reasonFlag(c, &reason, "")
	f.Float64Var(&rate, "rate", 0, "messages published a second, over both priorities")
	f.IntVar(&concurrency, "concurrency", 0, "attempts that run at once, over all workers and both priorities")
	f.StringVar(&priority, "default-priority", "", "high or low, for tasks enqueued without one")
	f.IntVar(&maxAttempts, "max-attempts", 0, "attempts of a task that names none; before the worker's own")
	f.StringVar(&strategy, "strategy", "", "retry policy, before the worker's own: fixed, exponential or random")
	f.DurationVar(&base, "base-delay", 0, "of the policy, such as 5s")
	f.DurationVar(&limit, "max-delay", time.Hour, "of the policy")
	f.Float64Var(&jitter, "jitter", 0, "of the policy, 0 to 1")
	f.StringVar(&succeeded, "retain-succeeded", "", "how long succeeded tasks are kept")
	f.StringVar(&cancelled, "retain-cancelled", "", "how long cancelled tasks are kept")
	f.StringVar(&dead, "retain-dead", "", "how long dead tasks are kept, once their letter is out")
	f.BoolVar(&compensates, "compensates", false, "whether some worker compensates tasks of the type; =false once none does any more")
	f.StringVar(&notifier, "notifier", "", "who is told of dead tasks: log, webhook, email, dingtalk, chat, or one that your relay has registered in Go")
	f.StringVar(&title, "title", "", "what people call it")
	f.StringVar(&runbook, "runbook-url", "", "where it says what to do when tasks die")
	f.BoolVar(&known, "known", false, "let strict types take it; =false refuses it again")
	f.StringSliceVar(&clear, "clear", nil, "settings to take away: rate, concurrency, policy, max_attempts, retain_succeeded, ...")
	return c
}

// ageText turns an age as people write it into an interval of Postgres.
func ageText(s string) (string, error) {
	if s == "forever" {
		return s, nil
	}
	var r config.Retention
	if err := r.Set(s); err != nil {
		return "", fmt.Errorf("%q: %w, or forever", s, err)
	}
	if d := 24 * time.Hour; r.After >= d && r.After%d == 0 {
		return strconv.FormatInt(int64(r.After/d), 10) + " days", nil
	}
	return strconv.FormatInt(r.After.Microseconds(), 10) + " microseconds", nil
}

const strictTypesSQL = `-- taskrelay cli: strict types
SELECT s.changed, coalesce(s.why_not, '') FROM {{schema}}.set_strict_types($3::boolean, $2::text) AS s WHERE $1::text <> ''`

func (a *app) typesStrictCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "strict on|off --reason TEXT",
		Short: "Take known types only, or all",
		Long: `strict on makes enqueue refuse tasks of types that no worker and no operator has made known, and relays leave such rows
unpublished and say so. On in production: a misspelled type is found where it is made.`,
		Example:   "  taskrelay types strict on --reason 'production'",
		Args:      args(cobra.ExactArgs(1)),
		ValidArgs: []string{"on", "off"},
		RunE: func(c *cobra.Command, argv []string) error {
			if !slices.Contains([]string{"on", "off"}, argv[0]) {
				return usage("%q: expected on or off", argv[0])
			}
			return a.switchType(c, "(all)", reason, strictTypesSQL, "strict types are "+argv[0], argv[0] == "on")
		},
	}
	reasonFlag(c, &reason, "")
	return c
}
