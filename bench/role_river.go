package main

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
)

// riverArgs is payload as River wants it.
type riverArgs struct{ payload }

func (riverArgs) Kind() string { return bizType }

// KindAliases registers the idle types: a worker is found by any of these names.
func (riverArgs) KindAliases() []string { return idleTypes }

// idleTypes is set once, before a client is made.
var idleTypes []string

// riverConfig is River tuned: as many slots as our worker, the shortest pause between fetches. Its own benchmark uses
// 2 ms and 20 ms. [500 slots are the best of 100, 500, 1000 and 2000.]
func riverConfig() *river.Config {
	return &river.Config{
		FetchCooldown:     time.Millisecond,
		FetchPollInterval: 5 * time.Millisecond,
		Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
}

type riverRetry struct{}

func (riverRetry) NextRetry(*rivertype.JobRow) time.Time { return time.Now().Add(retryDelay) }

// riverRole is a process with one River client.
func riverRole(ctx context.Context, cfg childConfig) (*role, error) {
	pool, err := riverPool(ctx, cfg.Database)
	if err != nil {
		return nil, err
	}
	count := newCounter(cfg)
	idleTypes = cfg.Idle
	var client *river.Client[pgx.Tx]
	stop := func() error {
		if client == nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		defer func() { client = nil }()
		return client.Stop(ctx)
	}
	return &role{
		counter: count,
		start: func(ctx context.Context) error {
			c := riverConfig()
			c.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: slots}}
			c.RetryPolicy = riverRetry{}
			c.Workers = river.NewWorkers()
			river.AddWorker(c.Workers, river.WorkFunc(func(_ context.Context, j *river.Job[riverArgs]) error {
				return count.handle(j.Args.payload, j.Attempt)
			}))
			var err error
			if client, err = river.NewClient(riverpgxv5.New(pool), c); err != nil {
				return err
			}
			return client.Start(ctx)
		},
		stop:  stop,
		close: func() { _ = stop(); pool.Close() },
	}, nil
}

func riverPool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 20
	cfg.ConnConfig.RuntimeParams["application_name"] = "river"
	return pgxpool.NewWithConfig(ctx, cfg)
}
