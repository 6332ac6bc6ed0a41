// Command relay publishes committed tasks from Postgres to NATS JetStream. It reads TASKRELAY_ variables: relay -h.
package main

import (
	"context"
	"io"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/connect"
	"github.com/taskrelay/taskrelay/internal/notify"
	"github.com/taskrelay/taskrelay/internal/ops"
	"github.com/taskrelay/taskrelay/internal/proc"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// opsConns is how many operator actions over NATS may be at work.
const opsConns = 2

// version is set by the linker: -X main.version=v1.2.3.
var version string

func main() { os.Exit(proc.Main("relay", run)) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	done, err := proc.Flags(args, stdout, "relay", "publishes committed tasks from Postgres to NATS JetStream", version,
		config.RelayVariables())
	if done || err != nil {
		return err
	}
	cfg, err := config.LoadRelay()
	if err != nil {
		return err
	}
	logger, err := connect.Logger(stderr, cfg.LogLevel, cfg.LogFormat)
	if err != nil {
		return err
	}
	notifiers, err := notify.New(cfg.Notify, logger) // before the servers are waited for: it finds mistakes
	if err != nil {
		return err
	}
	svc, err := proc.Open(ctx, "relay", version, cfg.Servers, cfg.Common, cfg.Process, stderr)
	if err != nil {
		return err
	}
	defer svc.Close()
	relay, err := outbox.NewRelay(svc.Pool, svc.NATS, outbox.RelayConfig{
		Schema:        outbox.Schema(cfg.Schema),
		Namespace:     cfg.Namespace,
		APIPrefix:     cfg.NatsAPIPrefix,
		Replicas:      cfg.StreamReplicas,
		MaxPerSubject: cfg.StreamMaxPerSubject,
		BizTypes:      cfg.RelayBizTypes,
		Disabled:      !cfg.RelayEnabled,
		Batch:         cfg.RelayBatch,
		PollMin:       cfg.RelayPollMin,
		PollMax:       cfg.RelayPollMax,
		Reconcile:     cfg.RelayReconcile,
		Retain:        cfg.Ages(),
		Version:       proc.Version(version),
		MeterProvider: svc.Telemetry.Meters, TracerProvider: svc.Telemetry.Tracers,
		Notifiers: notifiers, DefaultNotifier: cfg.NotifyDefault,
		Logger: svc.Logger,
	})
	if err != nil {
		return err
	}
	run := relay.Run
	if cfg.RelayOps {
		// Connections of their own: actions may wait for rows that somebody holds, and the relay's reads must not wait with them.
		conns := svc.Pool.Config()
		conns.MaxConns, conns.MinConns, conns.MinIdleConns = opsConns, 0, 0
		pool, err := pgxpool.NewWithConfig(ctx, conns)
		if err != nil {
			return err
		}
		defer pool.Close()
		run = ops.New(pool, svc.NATS, ops.Config{
			Schema: outbox.Schema(cfg.Schema), Namespace: cfg.Namespace, Version: proc.Version(version), Wake: relay.Wake, Logger: svc.Logger,
		}).Beside(run)
	}
	return svc.Run(ctx, proc.Runner{Name: "relay", Run: run, Live: relay.Live, Ready: relay.Ready})
}
