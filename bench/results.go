package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// row is one run, or the medians of several. A field that a scenario does not measure is 0.
type row struct {
	Scenario    string  `json:"scenario"`
	System      string  `json:"system"`
	Rate        float64 `json:"tasks_per_s"`
	CPU         float64 `json:"cpu_us_per_task"`
	CPUPostgres float64 `json:"cpu_pg_us"`
	CPUNATS     float64 `json:"cpu_nats_us"`
	CPUClient   float64 `json:"cpu_client_us"`
	WAL         float64 `json:"wal_bytes_per_task"`
	HOT         float64 `json:"hot_ratio"`
	Dead        float64 `json:"dead_tuples"`
	P50         float64 `json:"p50_ms"`
	P95         float64 `json:"p95_ms"`
	P99         float64 `json:"p99_ms"`
	Slowdown    float64 `json:"slowdown"`
	Memory      float64 `json:"rss_mb"`
	// Min and Max of the runs: of p50_ms in latency, of slowdown in enqueue, else of tasks_per_s.
	Min float64 `json:"min"`
	Max float64 `json:"max"`
}

// main is the figure that the scenario is about, and whether more of it is better.
func (r row) main() (value float64, more bool) {
	switch {
	case r.Slowdown > 0:
		return r.Slowdown, false
	case r.P50 > 0 && r.Scenario != "steady":
		return r.P50, false
	}
	return r.Rate, true
}

// results collects the runs and tells the terminal about each.
type results struct {
	out  io.Writer
	runs []row
	at   time.Time
}

func (s *results) begin(scenario, system string, run, of int) {
	s.at = time.Now()
	fmt.Fprintf(s.out, "%-18s %-9s %d/%d  ", scenario, system, run, of)
}

func (s *results) add(r row) {
	s.runs = append(s.runs, r)
	text := fmt.Sprintf("%.0f/s", r.Rate)
	if r.CPU > 0 {
		text += fmt.Sprintf(", %.1f µs (Postgres %.1f, NATS %.1f, client %.1f), %.0f B WAL", r.CPU, r.CPUPostgres, r.CPUNATS, r.CPUClient, r.WAL)
	}
	if r.HOT > 0 {
		text += fmt.Sprintf(", HOT %.2f", r.HOT)
	}
	if r.P50 > 0 {
		text += fmt.Sprintf(", p50 %.2f p95 %.2f p99 %.2f ms", r.P50, r.P95, r.P99)
	}
	if r.Slowdown > 0 {
		text += fmt.Sprintf(", slowdown %.2f", r.Slowdown)
	}
	fmt.Fprintf(s.out, "%s (%.1f s)\n", text, time.Since(s.at).Seconds())
}

// medians makes one row of the runs of each scenario and system, in the order of their first run.
func (s *results) medians() []row {
	type key struct{ scenario, system string }
	var order []key
	runs := make(map[key][]row)
	for _, r := range s.runs {
		k := key{r.Scenario, r.System}
		if runs[k] == nil {
			order = append(order, k)
		}
		runs[k] = append(runs[k], r)
	}
	var all []row
	for _, k := range order {
		all = append(all, medianRow(runs[k]))
	}
	return all
}

func medianRow(runs []row) row {
	r := row{Scenario: runs[0].Scenario, System: runs[0].System}
	for _, get := range []func(*row) *float64{
		func(r *row) *float64 { return &r.Rate }, func(r *row) *float64 { return &r.CPU },
		func(r *row) *float64 { return &r.CPUPostgres }, func(r *row) *float64 { return &r.CPUNATS },
		func(r *row) *float64 { return &r.CPUClient }, func(r *row) *float64 { return &r.WAL },
		func(r *row) *float64 { return &r.HOT }, func(r *row) *float64 { return &r.Dead },
		func(r *row) *float64 { return &r.P50 }, func(r *row) *float64 { return &r.P95 },
		func(r *row) *float64 { return &r.P99 }, func(r *row) *float64 { return &r.Slowdown },
		func(r *row) *float64 { return &r.Memory },
	} {
		var values []float64
		for i := range runs {
			values = append(values, *get(&runs[i]))
		}
		*get(&r) = median(values)
	}
	for i, one := range runs {
		v, _ := one.main()
		if i == 0 {
			r.Min, r.Max = v, v
		}
		r.Min, r.Max = min(r.Min, v), max(r.Max, v)
	}
	return r
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

// percentile of sorted values, by the nearest rank.
func percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(p/100*float64(len(sorted)) + 0.999999)
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// printTable shows the medians, and how the scenario's main figure compares with River's.
func printTable(out io.Writer, rows []row) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "scenario\tsystem\ttasks/s\tCPU µs\tPostgres\tNATS\tclient\tWAL B\tHOT\tdead\tp50 ms\tp95 ms\tp99 ms\tslowdown\tMB\tmin\tmax\t× River\t")
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", r.Scenario, r.System,
			figure(r.Rate, 0), figure(r.CPU, 1), figure(r.CPUPostgres, 1), figure(r.CPUNATS, 1), figure(r.CPUClient, 1),
			figure(r.WAL, 0), figure(r.HOT, 2), figure(r.Dead, 0), figure(r.P50, 2), figure(r.P95, 2), figure(r.P99, 2),
			figure(r.Slowdown, 2), figure(r.Memory, 0), mainFigure(r, r.Min), mainFigure(r, r.Max), ratioToRiver(rows, r))
	}
	_ = w.Flush()
	fmt.Fprintln(out, "\n× River: tasks/s (more is better); p50 in latency and slowdown in enqueue (less is better). min and max are of that figure.")
}

func figure(v float64, digits int) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.*f", digits, v)
}

func mainFigure(r row, v float64) string {
	if _, more := r.main(); more {
		return figure(v, 0)
	}
	return figure(v, 2)
}

// riverScenario names the scenario of River's that one of ours is compared with, where the names differ.
var riverScenario = map[string]string{"latency-wake": "latency", "enqueue-outbox": "enqueue", "enqueue-function": "enqueue"}

func ratioToRiver(rows []row, r row) string {
	if r.System != "taskrelay" {
		return "-"
	}
	scenario := cmp.Or(riverScenario[r.Scenario], r.Scenario)
	i := slices.IndexFunc(rows, func(o row) bool { return o.System == "river" && o.Scenario == scenario })
	if i < 0 {
		return "-"
	}
	ours, _ := r.main()
	theirs, _ := rows[i].main()
	if theirs == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", ours/theirs)
}
