package demo

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jedib0t/go-pretty/v6/table"
)

// statuses in the order of a task's life.
var statuses = []string{"pending", "running", "retrying", "compensating", "succeeded", "dead", "cancelled"}

// progress is one look at the tasks of this run.
type progress struct {
	types     []string
	counts    map[string]map[string]int // biz type, status
	committed int
	finished  int
	dead      int
	attempts  int
	letters   int           // dead letters that are out
	oldest    time.Duration // for how long the oldest due task has waited
}

const progressSQL = `-- taskrelay demo: progress
SELECT biz_type, CASE WHEN phase = 'compensate' AND finished_at IS NULL THEN 'compensating' ELSE status END, count(*)::bigint, count(dead_lettered_at)::bigint,
       coalesce(extract(epoch FROM max(now() - coalesce(next_attempt_at, run_at, created_at))
           FILTER (WHERE status IN ('pending', 'retrying'))), 0)::float8
FROM {{schema}}.task
WHERE id > $1
GROUP BY 1, 2
ORDER BY 1, 2`

const attemptCountSQL = `-- taskrelay demo: count attempts
SELECT count(*)::bigint FROM {{schema}}.task_attempt WHERE task_id > $1`

func (d *Demo) look(ctx context.Context) (progress, error) {
	p := progress{counts: map[string]map[string]int{}}
	rows, err := d.cfg.Pool.Query(ctx, d.cfg.Schema.Render(progressSQL), d.firstID)
	if err != nil {
		return p, err
	}
	var (
		bizType, status string
		n, letters      int
		oldest          float64
	)
	_, err = pgx.ForEachRow(rows, []any{&bizType, &status, &n, &letters, &oldest}, func() error {
		if p.counts[bizType] == nil {
			p.counts[bizType] = map[string]int{}
			p.types = append(p.types, bizType)
		}
		p.counts[bizType][status] = n
		p.committed += n
		switch status {
		case "dead":
			p.dead += n
			p.letters += letters
			p.finished += n
		case "succeeded", "cancelled":
			p.finished += n
		}
		p.oldest = max(p.oldest, time.Duration(oldest*float64(time.Second)))
		return nil
	})
	if err != nil {
		return p, err
	}
	err = d.cfg.Pool.QueryRow(ctx, d.cfg.Schema.Render(attemptCountSQL), d.firstID).Scan(&p.attempts)
	return p, err
}

// watch shows progress until the producer has ended, every task is final, and every dead letter is out.
func (d *Demo) watch(ctx context.Context) error {
	show := time.NewTicker(250 * time.Millisecond)
	defer show.Stop()
	draw := d.line
	if d.cfg.Terminal {
		draw = (&screen{out: d.cfg.Out}).draw
	}
	var last progress
	lastAt, every := d.began, 2*time.Second
	if d.cfg.Terminal {
		every = 250 * time.Millisecond
	}
	shown := time.Time{}
	var attemptRate, finishRate float64
	for {
		state := d.producer.state()
		p, err := d.look(ctx)
		if err != nil {
			return fmt.Errorf("look at the tasks: %w", err)
		}
		now := time.Now()
		if s := now.Sub(lastAt).Seconds(); s >= 1 {
			attemptRate, finishRate = float64(p.attempts-last.attempts)/s, float64(p.finished-last.finished)/s
			last, lastAt = p, now
		}
		end := state.done && p.finished == p.committed && p.letters == p.dead
		if end || now.Sub(shown) >= every {
			draw(view{now.Sub(d.began), p, state, attemptRate, finishRate, d.world.bankDown.Load()})
			shown = now
		}
		if end {
			return nil
		}
		select {
		case <-show.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// view is what is shown at one moment.
type view struct {
	elapsed                 time.Duration
	progress                progress
	state                   produced
	attemptRate, finishRate float64
	bankDown                bool
}

func (v view) summary() string {
	p := v.progress
	bank := ""
	if v.bankDown {
		bank = "   (the bank is down)"
	}
	waiting := p.committed - p.finished
	return fmt.Sprintf("%5.1fs  tasks %d (%d rolled back)  finished %d  waiting %d  dead %d  attempts %d  %.0f attempts/s  %.0f finished/s  oldest due %.1fs%s",
		v.elapsed.Seconds(), p.committed, len(v.state.rolledBack), p.finished, waiting, p.dead, p.attempts, v.attemptRate, v.finishRate,
		max(p.oldest, 0).Seconds(), bank)
}

func (d *Demo) line(v view) {
	var byStatus []string
	for _, s := range statuses {
		n := 0
		for _, c := range v.progress.counts {
			n += c[s]
		}
		if n > 0 && s != "succeeded" && s != "dead" {
			byStatus = append(byStatus, fmt.Sprintf("%s %d", s, n))
		}
	}
	rest := ""
	if len(byStatus) > 0 {
		rest = "  [" + strings.Join(byStatus, ", ") + "]"
	}
	fmt.Fprintln(d.cfg.Out, v.summary()+rest)
}

// screen redraws a table in place.
type screen struct {
	out   io.Writer
	lines int
}

func (s *screen) draw(v view) {
	text := v.progress.table() + "\n" + v.summary() + "\n"
	if s.lines > 0 {
		fmt.Fprintf(s.out, "\x1b[%dA\x1b[J", s.lines) // up to where the last one began, and clear from there
	}
	fmt.Fprint(s.out, text)
	s.lines = strings.Count(text, "\n")
}

// table is one line per biz type, one column per status.
func (p progress) table() string {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Options.SeparateRows = false
	header := table.Row{"biz type"}
	for _, s := range statuses {
		header = append(header, s)
	}
	t.AppendHeader(header)
	var align []table.ColumnConfig
	for i := range statuses {
		align = append(align, table.ColumnConfig{Number: i + 2, Align: 2}) // text.AlignRight
	}
	t.SetColumnConfigs(align)
	for _, bizType := range p.types {
		row := table.Row{bizType}
		for _, s := range statuses {
			if n := p.counts[bizType][s]; n > 0 {
				row = append(row, n)
			} else {
				row = append(row, "")
			}
		}
		t.AppendRow(row)
	}
	return t.Render()
}
