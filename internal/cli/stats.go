package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// stats is the state of an installation at one moment.
type stats struct {
	At    time.Time   `json:"at"` // by Postgres's clock
	Types []typeStats `json:"types"`
	Dead  int64       `json:"dead_24h"`
	// Alive within the last 30 s.
	Workers []process `json:"workers"`
	Relays  []process `json:"relays"`
}

// typeStats counts the tasks of one biz type. Finished ones are not counted, there may be millions: what finished within
// the last minute is, by the attempt log.
type typeStats struct {
	BizType   string     `json:"biz_type"`
	Pending   int64      `json:"pending"`
	Running   int64      `json:"running"`
	Retrying  int64      `json:"retrying"`
	Blocked   int64      `json:"blocked"`
	Capped    bool       `json:"capped"`  // there are more than were counted
	Backlog   int64      `json:"backlog"` // due, and not yet handed on by the relay
	OldestDue float64    `json:"oldest_due_seconds"`
	Succeeded int64      `json:"succeeded_last_minute"`
	Failed    int64      `json:"failed_last_minute"` // attempts
	Dead      int64      `json:"dead_24h"`
	Workers   int64      `json:"workers"` // alive, that know it
	PausedAt  *time.Time `json:"paused_at,omitempty"`
}

// process is a worker or a relay.
type process struct {
	Name    string    `json:"name"`
	Host    string    `json:"host"`
	Version string    `json:"version"`
	Load    int64     `json:"load"` // a worker's running attempts, a relay's lanes
	SeenAt  time.Time `json:"seen_at"`
}

// statsLane is how many unfinished tasks of a lane and source are counted at most.
const statsLane = 100_000

// lagLimit is how far the view lag counts.
const lagLimit = 10_000

// Unfinished rows are behind their lane's low-water, or on the work list: what is finished is not read. A lane's sources
// overlap, hence UNION.
const statsTypesSQL = `-- taskrelay cli: stats per type
WITH live AS (
    SELECT k.biz_type, c.status, c.capped
    FROM {{schema}}.known_lane AS k
    CROSS JOIN LATERAL (
        SELECT u.id, u.status, count(*) OVER () >= $1::bigint AS capped
        FROM (
            (SELECT t.id, t.status FROM {{schema}}.task AS t
             WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.xid >= pg_snapshot_xmax(k.low_snapshot) AND t.finished_at IS NULL
             ORDER BY t.xid, t.id LIMIT $1::bigint)
            UNION
            SELECT t.id, t.status FROM pg_snapshot_xip(k.low_snapshot) AS x (xid)
            JOIN {{schema}}.task AS t ON t.biz_type = k.biz_type AND t.priority = k.priority AND t.xid = x.xid AND t.finished_at IS NULL
            UNION
            (SELECT t.id, t.status FROM {{schema}}.task AS t
             WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.run_at > k.low_at AND t.finished_at IS NULL
             ORDER BY t.run_at, t.id LIMIT $1::bigint)
            UNION
            (SELECT t.id, t.status FROM {{schema}}.task AS t
             WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.republish_at IS NOT NULL AND t.finished_at IS NULL
             ORDER BY t.republish_at LIMIT $1::bigint)
        ) AS u
    ) AS c
), states AS (
    SELECT biz_type, count(*) FILTER (WHERE status = 'pending') AS pending, count(*) FILTER (WHERE status = 'running') AS running,
           count(*) FILTER (WHERE status = 'retrying') AS retrying, count(*) FILTER (WHERE status = 'blocked') AS blocked, bool_or(capped) AS capped
    FROM live GROUP BY biz_type
), late AS (
    SELECT l.biz_type, sum(l.backlog)::bigint AS backlog, max(l.oldest_due_age) AS oldest, max(l.live_workers) AS workers, max(l.paused_at) AS paused_at
    FROM {{schema}}.lag AS l GROUP BY l.biz_type
), minute AS (
    SELECT a.biz_type, count(*) FILTER (WHERE a.outcome = 'succeeded') AS succeeded,
           count(*) FILTER (WHERE a.outcome IN ('failed', 'timeout', 'panic', 'lost')) AS failed
    FROM {{schema}}.task_attempt AS a
    WHERE a.finished_at > now() - interval '1 minute'
    GROUP BY a.biz_type
), dead AS (
    SELECT d.biz_type, count(*) AS n FROM {{schema}}.dead AS d WHERE d.dead_at > now() - interval '1 day' GROUP BY d.biz_type
)
SELECT biz_type, coalesce(s.pending, 0), coalesce(s.running, 0), coalesce(s.retrying, 0), coalesce(s.blocked, 0), coalesce(s.capped, false),
       coalesce(l.backlog, 0), coalesce(extract(epoch FROM l.oldest), 0)::float8, coalesce(m.succeeded, 0), coalesce(m.failed, 0),
       coalesce(d.n, 0), coalesce(l.workers, 0), l.paused_at
FROM late AS l
FULL JOIN states AS s USING (biz_type)
FULL JOIN minute AS m USING (biz_type)
FULL JOIN dead AS d USING (biz_type)
ORDER BY biz_type`

const statsProcessesSQL = `-- taskrelay cli: who is alive
SELECT now(), p.relay, p.name, p.host, p.version, p.load, p.seen_at
FROM (
    SELECT false AS relay, w.name, w.host, w.version, w.running AS load, w.seen_at FROM {{schema}}.worker AS w
    UNION ALL
    SELECT true, r.name, r.host, r.version, r.lanes, r.seen_at FROM {{schema}}.relay AS r
) AS p
WHERE p.seen_at > now() - interval '30 seconds'
ORDER BY p.relay, p.name`

func (a *app) statsCommand() *cobra.Command {
	var watch bool
	var interval time.Duration
	c := &cobra.Command{
		Use:   "stats",
		Short: "Count tasks by type and state, with rates, lateness, deaths, workers and relays",
		Long: `stats shows per biz type how many tasks are in each unfinished state, how many are due and not yet handed on (BACKLOG)
and for how long the oldest (OLDEST DUE), how many attempts succeeded and failed within the last minute, how many tasks died
within 24 h, and how many live workers know the type. Finished tasks are not counted: they are not read at all. A number with
a + is at least that many. --watch shows it again and again until Ctrl-C.`,
		Example: `  taskrelay stats
  taskrelay stats --watch
  taskrelay stats --watch --interval 10s -o jsonl >> stats.jsonl`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			if interval < 100*time.Millisecond {
				return usage("--interval %v: expected at least 100ms", interval)
			}
			if watch && p.format != "table" && p.format != "jsonl" {
				return usage("--watch prints as table or jsonl, not %s", p.format)
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			if !watch {
				st, err := s.stats(ctx)
				if err != nil {
					return err
				}
				return st.print(p)
			}
			return a.watchStats(c, s, p, interval)
		},
	}
	c.Flags().BoolVarP(&watch, "watch", "w", false, "again and again until Ctrl-C")
	c.Flags().DurationVar(&interval, "interval", 2*time.Second, "with --watch: how often")
	return c
}

// watchStats ends with Ctrl-C, which is how it is meant to end. A look that fails is told, and the next one is made: the
// screen is watched most while servers restart.
func (a *app) watchStats(c *cobra.Command, s *session, p *printer, interval time.Duration) error {
	for ctx := c.Context(); ; {
		limited, cancel := a.limit(c, a.timeout)
		st, err := s.stats(limited)
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if p.terminal && p.format == "table" {
			fmt.Fprint(p.out, "\x1b[H\x1b[2J") // to the top, and clear
		}
		if err == nil {
			err = st.print(p)
		} else {
			fmt.Fprintln(a.err, "taskrelay:", explain(err))
			err = nil
		}
		if err != nil {
			return err // stdout is gone
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(interval):
		}
	}
}

func (s *session) stats(ctx context.Context) (stats, error) {
	st := stats{Types: []typeStats{}, Workers: []process{}, Relays: []process{}}
	err := s.read(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, s.schema.Render(statsProcessesSQL))
		if err != nil {
			return err
		}
		var relay bool
		var p process
		_, err = pgx.ForEachRow(rows, []any{&st.At, &relay, &p.Name, &p.Host, &p.Version, &p.Load, &p.SeenAt}, func() error {
			p.SeenAt = p.SeenAt.UTC()
			if relay {
				st.Relays = append(st.Relays, p)
			} else {
				st.Workers = append(st.Workers, p)
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, "SELECT now()").Scan(&st.At); err != nil {
			return err
		}
		rows, err = tx.Query(ctx, s.schema.Render(statsTypesSQL), statsLane)
		if err != nil {
			return err
		}
		types, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (t typeStats, err error) {
			err = row.Scan(&t.BizType, &t.Pending, &t.Running, &t.Retrying, &t.Blocked, &t.Capped, &t.Backlog, &t.OldestDue,
				&t.Succeeded, &t.Failed, &t.Dead, &t.Workers, &t.PausedAt)
			if t.PausedAt != nil {
				*t.PausedAt = t.PausedAt.UTC()
			}
			st.Dead += t.Dead
			return t, err
		})
		st.Types = append(st.Types, types...)
		return err
	})
	st.At = st.At.UTC()
	return st, err
}

func (st stats) print(p *printer) error {
	switch p.format {
	case "json":
		return p.json(st)
	case "jsonl": // one line per look
		enc := json.NewEncoder(p.out)
		enc.SetEscapeHTML(false)
		return enc.Encode(st)
	}
	number := func(get func(typeStats) int64) func(typeStats) string {
		return func(t typeStats) string { return strconv.FormatInt(get(t), 10) }
	}
	err := printAll(p, st.Types, func(t typeStats) string { return t.BizType }, []column[typeStats]{
		{title: "TYPE", cell: func(t typeStats) string { return t.BizType }},
		{title: "PENDING", cell: func(t typeStats) string {
			if t.Capped {
				return strconv.FormatInt(t.Pending, 10) + "+"
			}
			return strconv.FormatInt(t.Pending, 10)
		}},
		{title: "RUNNING", cell: number(func(t typeStats) int64 { return t.Running })},
		{title: "RETRYING", cell: number(func(t typeStats) int64 { return t.Retrying })},
		{title: "BLOCKED", cell: number(func(t typeStats) int64 { return t.Blocked })},
		{title: "BACKLOG", cell: func(t typeStats) string {
			if t.Backlog >= lagLimit {
				return strconv.FormatInt(t.Backlog, 10) + "+"
			}
			return strconv.FormatInt(t.Backlog, 10)
		}},
		{title: "OLDEST DUE", cell: func(t typeStats) string {
			if t.OldestDue == 0 {
				return ""
			}
			return ago(time.Duration(t.OldestDue * float64(time.Second)))
		}},
		{title: "DONE/MIN", cell: number(func(t typeStats) int64 { return t.Succeeded })},
		{title: "FAILED/MIN", cell: number(func(t typeStats) int64 { return t.Failed })},
		{title: "DEAD 24H", cell: number(func(t typeStats) int64 { return t.Dead })},
		{title: "WORKERS", cell: number(func(t typeStats) int64 { return t.Workers })},
		{title: "NOTE", cell: typeStats.note},
	})
	if err != nil || p.format != "table" {
		return err
	}
	return st.printProcesses(p.out)
}

// note says what is wrong with a type at first sight.
func (t typeStats) note() string {
	var notes []string
	if t.PausedAt != nil {
		notes = append(notes, "paused since "+stamp(t.PausedAt))
	}
	if t.Workers == 0 && t.Pending+t.Running+t.Retrying > 0 {
		notes = append(notes, "no live worker")
	}
	return strings.Join(notes, ", ")
}

func (st stats) printProcesses(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s  dead within 24 h: %d\n", stamp(&st.At), st.Dead)
	for _, kind := range []struct {
		what, load string
		list       []process
	}{{"workers", "running", st.Workers}, {"relays", "lanes", st.Relays}} {
		if len(kind.list) == 0 {
			fmt.Fprintf(&b, "%s: none alive\n", kind.what)
			continue
		}
		fmt.Fprintf(&b, "%s: %d alive\n", kind.what, len(kind.list))
		for _, p := range kind.list {
			fmt.Fprintf(&b, "  %s  %s  %s %d  seen %s ago\n", oneLine(p.Name), oneLine(p.Version), kind.load, p.Load, ago(max(0, st.At.Sub(p.SeenAt))))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
