// Command worker runs tasks by calling HTTP endpoints and NATS services. It reads TASKRELAY_ variables: worker -h.
// Commands written in Go are registered in a program of their own: see pkg/command.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"os"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/proc"
	"github.com/taskrelay/taskrelay/internal/target"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// version is set by the linker: -X main.version=v1.2.3.
var version string

func main() { os.Exit(proc.Main("worker", run)) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	done, err := proc.Flags(args, stdout, "worker", "runs tasks by calling HTTP endpoints and NATS services", version,
		config.WorkerVariables(), config.BizTypeVariables())
	if done || err != nil {
		return err
	}
	cfg, err := config.LoadWorker()
	if err != nil {
		return err
	}
	svc, err := proc.Open(ctx, "worker", version, cfg.Servers, cfg.Common, cfg.Process, stderr)
	if err != nil {
		return err
	}
	defer svc.Close()

	var concurrency int
	for _, t := range cfg.Types {
		concurrency += cmp.Or(t.Concurrency, cfg.WorkerConcurrency)
	}
	maker := target.NewMaker(svc.NATS, concurrency, svc.Logger)
	if err := maker.Count(svc.Telemetry.Meters); err != nil {
		return err
	}
	var reg command.Registry
	for _, t := range cfg.Types {
		c, err := maker.Command(t)
		if err != nil {
			return err
		}
		if err := command.Register[json.RawMessage](&reg, t.Name, c); err != nil {
			return err
		}
	}
	worker, err := command.NewWorker(svc.Pool, svc.NATS, &reg, command.WorkerConfig{
		Schema:        outbox.Schema(cfg.Schema),
		Namespace:     cfg.Namespace,
		APIPrefix:     cfg.NatsAPIPrefix,
		Concurrency:   cfg.WorkerConcurrency,
		Lease:         cfg.WorkerLease,
		Grace:         cfg.WorkerGrace,
		NakMax:        cfg.WorkerNakMax,
		Version:       proc.Version(version),
		MeterProvider: svc.Telemetry.Meters, TracerProvider: svc.Telemetry.Tracers, ChildSpans: cfg.WorkerChildSpans,
		Logger: svc.Logger,
	})
	if err != nil {
		return err
	}
	return svc.Run(ctx, proc.Runner{Name: "worker", Run: worker.Run, Live: worker.Live, Ready: worker.Ready})
}
