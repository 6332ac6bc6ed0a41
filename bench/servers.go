package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
)

// postgresSettings is full durability and memory as on a small production server; the rest are Postgres's defaults,
// but for a checkpoint_timeout of 30 minutes: no checkpoint falls by chance into one run and not into another.
var postgresSettings = map[string]string{
	"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on",
	"shared_buffers": "1GB", "max_wal_size": "8GB", "max_connections": "300",
}

var shownSettings = []string{"server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers",
	"max_wal_size", "wal_compression", "autovacuum", "checkpoint_timeout", "max_connections"}

// bench is the servers and what has been measured on them.
type bench struct {
	options
	out       io.Writer
	pg        *pgtemp.Server
	admin     *pgxpool.Pool
	databases int
	results   results
}

func newBench(ctx context.Context, o options, out io.Writer) (*bench, error) {
	fmt.Fprintln(out, "starting Postgres")
	pg, err := pgtemp.Start(ctx, "", pgtemp.Options{Settings: postgresSettings})
	if err != nil {
		return nil, err
	}
	b := &bench{options: o, out: out, pg: pg, results: results{out: out}}
	if b.admin, err = pgxpool.New(ctx, pg.URL); err != nil {
		b.close()
		return nil, err
	}
	if err := b.printSettings(ctx); err != nil {
		b.close()
		return nil, err
	}
	for _, s := range systems {
		if err := b.makeTemplate(ctx, s); err != nil {
			b.close()
			return nil, fmt.Errorf("schema of %s: %w", s.name, err)
		}
	}
	return b, nil
}

func (b *bench) close() {
	if b.admin != nil {
		b.admin.Close()
	}
	_ = b.pg.Stop()
}

func (b *bench) printSettings(ctx context.Context) error {
	rows, err := b.admin.Query(ctx, `SELECT name || '=' || current_setting(name) FROM unnest($1::text[]) WITH ORDINALITY AS s(name, i) ORDER BY i`, shownSettings)
	if err != nil {
		return err
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Fprintf(b.out, "machine: %d cores, %s, load %s\nPostgres: %s\nnats-server: JetStream on file, defaults\n", runtime.NumCPU(),
		runtime.Version(), strings.TrimSpace(string(load)), strings.Join(lines, " "))
	fmt.Fprintf(b.out, "taskrelay: %d slots, defaults; River: MaxWorkers %d, FetchCooldown 1ms, FetchPollInterval 5ms, 20 connections\n", slots, slots)
	fmt.Fprintf(b.out, "tasks: %d in a drain, %d B of payload; %d runs; %v a window\n\n", b.tasks, payloadSize(), b.runs, b.window)
	return nil
}

func payloadSize() int {
	text, _ := json.Marshal(payload{N: 10_000, Pad: pad})
	return len(text)
}

func (b *bench) makeTemplate(ctx context.Context, s system) error {
	name := "template_" + s.name
	if _, err := b.admin.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, b.pg.DatabaseURL(name))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := s.migrate(ctx, pool); err != nil {
		return err
	}
	_, err = pool.Exec(ctx, "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, amount numeric NOT NULL, created_at timestamptz NOT NULL DEFAULT now())")
	return err
}

// place is one run's own database and nats-server, and its client processes.
type place struct {
	b      *bench
	system system
	name   string // of the database
	url    string
	pool   *pgxpool.Pool
	nats   *child
	natsAt string
	store  string
	kids   []*child
}

// open makes a place. Nothing consumes yet.
func (b *bench) open(ctx context.Context, s system) (*place, error) {
	b.databases++
	p := &place{b: b, system: s, name: fmt.Sprintf("run_%d", b.databases)}
	if _, err := b.admin.Exec(ctx, fmt.Sprintf("CREATE DATABASE %s TEMPLATE template_%s", p.name, s.name)); err != nil {
		return nil, err
	}
	p.url = b.pg.DatabaseURL(p.name)
	cfg, err := pgxpool.ParseConfig(p.url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 12
	if p.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, err
	}
	if s.nats {
		if err := p.startNATS(ctx); err != nil {
			p.close()
			return nil, err
		}
	}
	return p, nil
}

func (p *place) startNATS(ctx context.Context) (err error) {
	if p.store, err = os.MkdirTemp("", "taskrelay-bench-"); err != nil {
		return err
	}
	var url json.RawMessage
	if p.nats, url, err = startChild(ctx, "nats-server", childConfig{Store: p.store}); err != nil {
		return err
	}
	return json.Unmarshal(url, &p.natsAt)
}

// startClients starts the system's processes; none consumes yet.
func (p *place) startClients(ctx context.Context, cfg childConfig) error {
	cfg.Database, cfg.NATS = p.url, p.natsAt
	for _, role := range p.system.roles {
		c, _, err := startChild(ctx, role, cfg)
		if err != nil {
			return err
		}
		p.kids = append(p.kids, c)
	}
	return nil
}

// gate is the child that starts and stops consuming, handler the one that runs the handlers.
func (p *place) gate() *child    { return p.kids[0] }
func (p *place) handler() *child { return p.kids[len(p.kids)-1] }

// stopClients ends the client processes, so that Postgres's counters are complete.
func (p *place) stopClients() error {
	var errs []error
	for _, c := range p.kids {
		errs = append(errs, c.stop())
	}
	p.kids = nil
	return errors.Join(errs...)
}

func (p *place) close() {
	for _, c := range p.kids {
		c.kill()
	}
	if p.nats != nil {
		_ = p.nats.stop()
	}
	if p.pool != nil {
		p.pool.Close()
	}
	if p.store != "" {
		_ = os.RemoveAll(p.store)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, _ = p.b.admin.Exec(ctx, "DROP DATABASE IF EXISTS "+p.name+" WITH (FORCE)")
}
