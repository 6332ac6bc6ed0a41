// Package proc is what the long-lived binaries have in common: exit codes, signals, flags, and the way from the
// environment to a process that is connected, checked and watched.
package proc

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/taskrelay/taskrelay/internal/config"
)

// Exit codes of the binaries.
const (
	ExitStopped       = 0
	ExitError         = 1   // it may help to start again
	ExitConfiguration = 2   // it does not
	ExitNow           = 130 // second signal: what ran was left as it was
)

// RunFunc is a binary that a test can call. It returns when ctx ends or when it cannot go on.
type RunFunc func(ctx context.Context, args []string, stdout, stderr io.Writer) error

// Main runs a binary until SIGTERM or SIGINT, and returns its exit code. A second signal ends the process at once.
func Main(name string, run RunFunc) int {
	if os.Getenv("GOGC") == "" {
		// The heap is a few MB beside a fast flow of short-lived messages. [400 against the default 100: 13 % less CPU
		// of relay and worker in a drain, 67 MB at the peak instead of 45.]
		debug.SetGCPercent(400)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	go func() {
		<-signals
		cancel()
		<-signals
		fmt.Fprintf(os.Stderr, "%s: second signal: stopped without waiting\n", name)
		os.Exit(ExitNow)
	}()
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	Report(os.Stderr, name, err)
	return ExitCode(err)
}

// Report writes why a process ends as plain text, also where the log is JSON: it is the line that a person looks for.
func Report(w io.Writer, name string, err error) {
	if err == nil {
		return
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintf(w, "%s: %s\n", name, line)
	}
}

// ExitCode tells a supervisor whether to start the process again.
func ExitCode(err error) int {
	if err == nil {
		return ExitStopped
	}
	if _, ok := errors.AsType[*config.Error](err); ok {
		return ExitConfiguration
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		return ExitConfiguration
	}
	return ExitError
}

type usageError struct{ error }

// Flags handles -h and -version; done says that the process has nothing more to do.
func Flags(args []string, stdout io.Writer, name, summary, version string, tables ...[]config.Variable) (done bool, err error) {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	showVersion := fs.Bool("version", false, "")
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintf(stdout, "%s: %s\n\nUsage: %s [-h] [-version]\n\nIt is configured by environment variables:\n", name, summary, name)
		for _, table := range tables {
			fmt.Fprintln(stdout)
			if err := config.Table(stdout, table); err != nil {
				return true, err
			}
		}
		fmt.Fprintln(stdout, "\nExit codes: 0 stopped, 1 error, 2 configuration, 130 second signal.")
		return true, nil
	case err != nil:
		return true, &usageError{fmt.Errorf("%w: run %s -h", err, name)}
	case fs.NArg() > 0:
		return true, &usageError{fmt.Errorf("unexpected argument %q: run %s -h", fs.Arg(0), name)}
	case *showVersion:
		fmt.Fprintln(stdout, name, Version(version))
		return true, nil
	}
	return false, nil
}

// Version is linked (what the linker put in, may be empty), else what Go recorded about the build.
func Version(linked string) string {
	if linked != "" {
		return linked
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return s.Value[:12]
		}
	}
	return "devel"
}
