// Command taskrelay operates an installation: migrations, tasks, dead letters, and a whole system in one process
// for trying it out (taskrelay dev --demo).
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/taskrelay/taskrelay/internal/cli"
	"github.com/taskrelay/taskrelay/internal/proc"
)

// version is set by the linker: -X main.version=v1.2.3.
var version string

func main() {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // as nohup does
		signals = append(signals, syscall.SIGHUP) // the terminal was closed: dev cleans up all the same
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	// After the first signal the default is back, so a second one ends the process at once.
	context.AfterFunc(ctx, stop)
	os.Exit(cli.Main(ctx, proc.Version(version), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
