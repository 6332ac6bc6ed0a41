package dev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

// Config of an environment. The zero value is a throw-away one.
type Config struct {
	// Optional: where Postgres and JetStream keep their data from one run to the next. By default both are in
	// temporary directories that Stop removes.
	DataDir string
	// Optional: ports on 127.0.0.1. By default free ones.
	PostgresPort, NATSPort int
	Schema                 outbox.Schema
	Namespace              string
	Logger                 zerolog.Logger
}

// Env is a running environment: both servers, migrated, and connections to them.
type Env struct {
	Pool     *pgxpool.Pool
	NC       *nats.Conn
	Postgres *pgtemp.Server
	NATS     *NATS
	// PostgresVersion is such as "15.18".
	PostgresVersion string

	cfg  Config
	temp string
}

// Start starts both servers and migrates the schema.
func Start(ctx context.Context, cfg Config) (_ *Env, err error) {
	e := &Env{cfg: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Stop())
		}
	}()
	// The lock comes with the nats-server, so it is first: two Postgres on one directory refuse each other too, but
	// say it less clearly.
	var natsDir, pgDir string
	settings := map[string]string{}
	if cfg.DataDir == "" {
		if e.temp, err = os.MkdirTemp("", "taskrelay-dev-"); err != nil {
			return nil, err
		}
		natsDir = e.temp
	} else {
		if natsDir, err = filepath.Abs(cfg.DataDir); err != nil {
			return nil, err
		}
		pgDir = filepath.Join(natsDir, "postgres")
		settings["fsync"] = "on"
	}
	if e.NATS, err = StartNATS(natsDir, cfg.NATSPort); err != nil {
		return nil, err
	}
	if e.Postgres, err = pgtemp.Start(ctx, pgDir, pgtemp.Options{Port: cfg.PostgresPort, Settings: settings}); err != nil {
		return nil, fmt.Errorf("start Postgres: %w", err)
	}
	poolConfig, err := pgxpool.ParseConfig(e.Postgres.URL)
	if err != nil {
		return nil, err
	}
	poolConfig.MaxConns = 30 // relay, worker and handlers share it
	if e.Pool, err = pgxpool.NewWithConfig(ctx, poolConfig); err != nil {
		return nil, err
	}
	if err := e.Pool.QueryRow(ctx, `SELECT split_part(current_setting('server_version'), ' ', 1)`).Scan(&e.PostgresVersion); err != nil {
		return nil, err
	}
	if _, err := schema.Migrate(ctx, e.Pool, schema.Options{Schema: cfg.Schema.String()}); err != nil {
		return nil, err
	}
	e.NC, err = nats.Connect(e.NATS.URL(), nats.Name("taskrelay dev"), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
	if err != nil {
		return nil, fmt.Errorf("connect to the embedded nats-server: %w", err)
	}
	return e, nil
}

// Worker is what a worker inside this environment runs.
type Worker struct {
	Registry *command.Registry // Required
	// Optional: the longest delay left to JetStream. By default that of command.WorkerConfig.
	NakMax time.Duration
	// Optional: as in command.WorkerConfig.
	Lease       time.Duration
	Concurrency int
}

// Run runs a relay, and a worker when one is given, until ctx ends or one of them fails.
func (e *Env) Run(ctx context.Context, worker *Worker, version string) error {
	relay, err := outbox.NewRelay(e.Pool, e.NC, outbox.RelayConfig{
		Schema: e.cfg.Schema, Namespace: e.cfg.Namespace, Version: version, Logger: e.cfg.Logger,
	})
	if err != nil {
		return err
	}
	parts := []func(context.Context) error{relay.Run}
	if worker != nil {
		w, err := command.NewWorker(e.Pool, e.NC, worker.Registry, command.WorkerConfig{
			Schema: e.cfg.Schema, Namespace: e.cfg.Namespace, NakMax: worker.NakMax, Lease: worker.Lease,
			Concurrency: worker.Concurrency, Grace: 5 * time.Second,
			Version: version, Logger: e.cfg.Logger,
		})
		if err != nil {
			return err
		}
		parts = append(parts, w.Run)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, len(parts))
	for i, run := range parts {
		wg.Go(func() {
			defer cancel() // one without the other is no environment
			errs[i] = run(ctx)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Stop closes the connections, stops both servers and removes what was temporary.
func (e *Env) Stop() error {
	var errs []error
	if e.NC != nil {
		e.NC.Close()
	}
	if e.Pool != nil {
		e.Pool.Close()
	}
	if e.NATS != nil {
		e.NATS.Stop()
	}
	if e.Postgres != nil {
		errs = append(errs, e.Postgres.Stop())
	}
	if e.temp != "" {
		errs = append(errs, os.RemoveAll(e.temp))
	}
	return errors.Join(errs...)
}
