// Command bench measures taskrelay beside River on one machine in one run.
//
// Properties:
//   - It starts its own servers: Postgres at full durability and nats-server, each as processes of their own.
//   - What consumes (relay and worker; River's client) runs as child processes of this binary, so that CPU is known
//     per part: all Postgres processes, nats-server, clients. Producers run in the parent and are in no figure.
//   - Systems take turns, each run on a fresh database and an empty nats-server; figures are medians.
//   - A drain is over when every row reads as finished, not when the last handler returns.
//
// It needs Linux: CPU and memory are read from /proc.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	if name := os.Getenv(roleVariable); name != "" {
		if err := runRole(name, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintf(os.Stderr, "bench %s: %v\n", name, err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options say what is measured and how much of it.
type options struct {
	scenarios []string
	systems   []string
	tasks     int           // of a drain
	runs      int           // of each system in each scenario
	window    time.Duration // of a scenario that is measured by time
	profiles  string        // directory of CPU profiles, or ""
	out       string        // JSON file, or ""
}

func parse(args []string, out io.Writer) (options, error) {
	var o options
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(out)
	full := fs.Bool("full", false, "all scenarios, with 100,000 tasks; without it drain, enqueue, latency and the floors, with 30,000")
	only := fs.String("scenarios", "", "comma-separated `list`; by default what -full says: "+strings.Join(scenarioNames(), ", "))
	systems := fs.String("systems", "taskrelay,river", "comma-separated `list`")
	fs.IntVar(&o.tasks, "tasks", 0, "tasks of a drain; by default what -full says")
	fs.IntVar(&o.runs, "runs", 3, "runs of each system in each scenario; the figures are their medians")
	fs.DurationVar(&o.window, "window", 0, "how long latency, enqueue and steady are measured each time; by default 4s, with -full 10s")
	fs.StringVar(&o.profiles, "profiles", "", "write a CPU profile of each client process into this `directory`")
	fs.StringVar(&o.out, "out", "", "write the medians as JSON to this `file`")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if fs.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	tasks, window := 30_000, 4*time.Second
	if *full {
		tasks, window = 100_000, 10*time.Second
	}
	if o.tasks == 0 {
		o.tasks = tasks
	}
	if o.window == 0 {
		o.window = window
	}
	if o.tasks < 1000 || o.runs < 1 || o.window < time.Second {
		return o, fmt.Errorf("want at least 1000 tasks, 1 run and a window of 1s: got %d, %d, %v", o.tasks, o.runs, o.window)
	}
	for _, s := range scenarios {
		if *only == "" && (*full || s.short) || slices.Contains(strings.Split(*only, ","), s.name) {
			o.scenarios = append(o.scenarios, s.name)
		}
	}
	if n := len(strings.Split(*only, ",")); *only != "" && n != len(o.scenarios) {
		return o, fmt.Errorf("scenarios %q: known are %s", *only, strings.Join(scenarioNames(), ", "))
	}
	for name := range strings.SplitSeq(*systems, ",") {
		if _, ok := findSystem(name); !ok {
			return o, fmt.Errorf("system %q: known are taskrelay and river", name)
		}
		o.systems = append(o.systems, name)
	}
	return o, nil
}

func run(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args, out)
	if err != nil {
		return err
	}
	if o.profiles != "" {
		if err := os.MkdirAll(o.profiles, 0o755); err != nil {
			return err
		}
	}
	b, err := newBench(ctx, o, out)
	if err != nil {
		return err
	}
	defer b.close()
	began := time.Now()
	for _, s := range scenarios {
		if !slices.Contains(o.scenarios, s.name) {
			continue
		}
		if err := s.run(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	rows := b.results.medians()
	fmt.Fprintf(out, "\nMedians of %d runs, after %v:\n\n", o.runs, time.Since(began).Round(time.Second))
	printTable(out, rows)
	if o.out == "" {
		return nil
	}
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(o.out, append(text, '\n'), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nWritten to %s.\n", o.out)
	return nil
}
