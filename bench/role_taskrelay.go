package main

import (
	"context"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/connect"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// relayRole is cmd/relay: the same connections, default settings.
func relayRole(ctx context.Context, cfg childConfig) (*role, error) {
	pool, nc, log, err := connectAs(ctx, "relay", cfg)
	if err != nil {
		return nil, err
	}
	var r runner
	return &role{
		start: func(ctx context.Context) error {
			relay, err := outbox.NewRelay(pool, nc, outbox.RelayConfig{Logger: log})
			if err != nil {
				return err
			}
			r.start(ctx, relay.Run)
			return nil
		},
		stop:  func() error { return r.stop() },
		close: pool.Close,
	}, nil
}

// workerRole is a worker with commands in Go, the settings by default but for the number of slots. It runs from the
// beginning: without a relay it has nothing to do.
func workerRole(ctx context.Context, cfg childConfig) (*role, error) {
	pool, nc, log, err := connectAs(ctx, "worker", cfg)
	if err != nil {
		return nil, err
	}
	count := newCounter(cfg)
	cmd := command.Command[payload]{
		Execute: func(_ context.Context, t *command.Task[payload]) (any, error) {
			return nil, count.handle(t.Payload, t.Attempt)
		},
		Retry: retry.Fixed{Base: retryDelay},
	}
	var reg command.Registry
	for _, t := range append([]string{bizType}, cfg.Idle...) {
		if err := command.Register(&reg, t, cmd); err != nil {
			return nil, err
		}
	}
	worker, err := command.NewWorker(pool, nc, &reg, command.WorkerConfig{Concurrency: slots, Logger: log, Grace: time.Second})
	if err != nil {
		return nil, err
	}
	var r runner
	r.start(ctx, worker.Run)
	return &role{
		counter: count,
		stop:    func() error { return r.stop() },
		close:   func() { _ = r.stop(); nc.Close(); pool.Close() },
	}, nil
}

// connectAs logs warnings only, as River does by default.
func connectAs(ctx context.Context, name string, cfg childConfig) (*pgxpool.Pool, *nats.Conn, zerolog.Logger, error) {
	log := zerolog.New(os.Stderr).Level(zerolog.WarnLevel)
	pool, err := connect.Postgres(ctx, cfg.Database, "taskrelay-"+name, log)
	if err != nil {
		return nil, nil, log, err
	}
	nc, err := connect.NATS(cfg.NATS, connect.Identity{}, name, log)
	return pool, nc, log, err
}

// runner runs one blocking Run at a time.
type runner struct {
	cancel context.CancelFunc
	done   chan error
}

func (r *runner) start(ctx context.Context, run func(context.Context) error) {
	ctx, r.cancel = context.WithCancel(ctx)
	r.done = make(chan error, 1)
	go func() { r.done <- run(ctx) }()
}

// stop ends Run and returns what it returned. Without a Run it does nothing.
func (r *runner) stop() error {
	if r.cancel == nil {
		return nil
	}
	r.cancel()
	r.cancel = nil
	return <-r.done
}
