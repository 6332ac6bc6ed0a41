package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Config of a demo.
type Config struct {
	Pool      *pgxpool.Pool // Required
	NC        *nats.Conn    // Required
	Schema    outbox.Schema
	Namespace string
	Out       io.Writer // Required
	// Optional: Out is a terminal, so progress is drawn in place. By default it is one line every two seconds.
	Terminal bool
	// Optional: the number of business events. By default 300.
	Events int
	// Optional: how long the producer takes. By default 20s.
	Duration time.Duration
	// Optional: how long the last tasks may take after the producer has ended. By default 60s.
	Patience time.Duration
	// Optional: of the script. By default 1.
	Seed uint64
}

// Demo is a shop with its outside world.
type Demo struct {
	cfg      Config
	names    outbox.Names
	world    *world
	shop     *shop
	producer *producer
	registry command.Registry
	firstID  int64 // tasks of this run have greater ids
	began    time.Time
}

// New makes the shop's tables and starts its outside world.
func New(ctx context.Context, cfg Config) (*Demo, error) {
	cfg.Events = cmp.Or(cfg.Events, 300)
	cfg.Duration = cmp.Or(cfg.Duration, 20*time.Second)
	cfg.Patience = cmp.Or(cfg.Patience, 60*time.Second)
	cfg.Seed = cmp.Or(cfg.Seed, 1)
	if err := createTables(ctx, cfg.Pool); err != nil {
		return nil, err
	}
	w, err := startWorld(cfg.Seed)
	if err != nil {
		return nil, err
	}
	d := &Demo{
		cfg: cfg, names: outbox.Names{Namespace: cfg.Namespace}, world: w,
		shop: &shop{pool: cfg.Pool, world: w},
		producer: &producer{
			pool: cfg.Pool, schema: cfg.Schema, world: w, rand: rand.New(rand.NewPCG(cfg.Seed, cfg.Seed)),
		},
	}
	if err := d.shop.register(&d.registry); err != nil {
		w.stop()
		return nil, err
	}
	if err := cfg.Pool.QueryRow(ctx, cfg.Schema.Render(`SELECT coalesce(max(id), 0) FROM {{schema}}.task`)).Scan(&d.firstID); err != nil {
		w.stop()
		return nil, fmt.Errorf("read the last task: %w", err)
	}
	return d, nil
}

// Registry holds the shop's commands, for a worker.
func (d *Demo) Registry() *command.Registry { return &d.registry }

// NakMax is the longest delay a worker of the demo should leave to JetStream, so that retries through the table are seen.
func (d *Demo) NakMax() time.Duration { return nakMax }

// Close ends the outside world.
func (d *Demo) Close() { d.world.stop() }

// Run lets the business run, shows its progress, waits until every task has its end and every dead letter is
// out, and returns what became of them. A relay and a worker with the demo's registry must run meanwhile.
func (d *Demo) Run(ctx context.Context) (Result, error) {
	d.began = time.Now()
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Duration+d.cfg.Patience)
	defer cancel()
	produced := make(chan error, 1)
	go func() { produced <- d.producer.run(ctx, d.cfg.Events, d.cfg.Duration) }()

	err := d.watch(ctx)
	if err != nil {
		cancel()
	}
	if perr := <-produced; perr != nil && !errors.Is(perr, context.Canceled) && !errors.Is(perr, context.DeadlineExceeded) {
		err = perr
	}
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return Result{}, err
	}
	// Also when time ran out: the check says in words what did not finish.
	return d.check(context.WithoutCancel(ctx))
}
