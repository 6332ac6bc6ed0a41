package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/connect"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

// config reads the environment. A global flag is its variable for one command: it takes the variable's place before
// the environment is read, so both go through the same checks.
func (a *app) config(c *cobra.Command) (config.CLI, error) {
	a.applyFlags(c)
	return config.LoadCLI()
}

// applyFlags puts the global flags that were given into the environment, and returns them by their variable.
func (a *app) applyFlags(c *cobra.Command) map[string]string {
	given := map[string]string{}
	for _, variable := range []struct{ flag, name string }{
		{"database-url", "DATABASE_URL"}, {"nats-url", "NATS_URL"}, {"schema", "SCHEMA"}, {"namespace", "NAMESPACE"},
	} {
		if c.Flags().Changed(variable.flag) {
			os.Setenv(config.Prefix+variable.name, *a.flags[variable.name])
			given[variable.name] = variable.flag
		}
	}
	return given
}

// session is a command's connection to an installation.
type session struct {
	pool   *pgxpool.Pool
	schema outbox.Schema
	config config.CLI
}

// connect opens Postgres and refuses a schema that is too old for this binary.
func (a *app) connect(ctx context.Context, c *cobra.Command) (*session, error) {
	cfg, err := a.config(c)
	if err != nil {
		return nil, err
	}
	url, err := cfg.Database()
	if err != nil {
		return nil, err
	}
	pool, err := openPool(ctx, url)
	if err != nil {
		return nil, err
	}
	s := &session{pool: pool, schema: outbox.Schema(cfg.Schema), config: cfg}
	if err := schema.Validate(ctx, pool, schema.Options{Schema: cfg.Schema}); err != nil {
		pool.Close()
		return nil, err
	}
	return s, nil
}

func (s *session) close() { s.pool.Close() }

func openPool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		// Its text repeats the URL.
		return nil, usage("no Postgres URL: expected postgres://user:password@host:5432/database")
	}
	if cfg.ConnConfig.RuntimeParams["application_name"] == "" {
		cfg.ConnConfig.RuntimeParams["application_name"] = "taskrelay-cli"
	}
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = 10 * time.Second
	}
	if !strings.Contains(url, "default_query_exec_mode") {
		// A command runs each statement once, and a pooler in transaction mode would forget a prepared one.
		cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := pool.Ping(ctx); err != nil { // the pool itself does not connect
		pool.Close()
		if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
			return nil, &exitError{exitConnect, fmt.Errorf("connect to Postgres at %s: %w", address(cfg), connect.Reason(err))}
		}
		return nil, fmt.Errorf("connect to Postgres: %w", err)
	}
	return pool, nil
}

func address(cfg *pgxpool.Config) string {
	return net.JoinHostPort(cfg.ConnConfig.Host, strconv.Itoa(int(cfg.ConnConfig.Port))) + "/" + cfg.ConnConfig.Database
}

// change runs f in a transaction that carries the actor, so that the audit names the person and not only the login.
func (s *session) change(ctx context.Context, f func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('taskrelay.actor', $1::text, true)`, actor()); err != nil {
			return err
		}
		return f(tx)
	})
}

func actor() string {
	who, host := "unknown", "unknown"
	if u, err := user.Current(); err == nil {
		who = u.Username
	}
	if name := os.Getenv("USER"); name != "" {
		who = name
	}
	if h, err := os.Hostname(); err == nil {
		host = h
	}
	return "cli:" + who + "@" + host
}

func connectNats(cfg config.CLI) (*nats.Conn, error) {
	url, err := cfg.Nats()
	if err != nil {
		return nil, err
	}
	opts := []nats.Option{nats.Name("taskrelay-cli"), nats.CustomInboxPrefix("_INBOX_taskrelay"), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1)}
	own, err := connect.Identity{Creds: cfg.NatsCreds, NKey: cfg.NatsNkey, CA: cfg.NatsCA, Cert: cfg.NatsCert, Key: cfg.NatsKey}.Options()
	if err != nil {
		return nil, usage("connect to NATS: %w", err)
	}
	nc, err := nats.Connect(url, append(opts, own...)...)
	if err != nil {
		// The address may hold a password.
		return nil, &exitError{exitConnect, fmt.Errorf("connect to NATS at %s: %w", cfg.NatsURL, err)}
	}
	return nc, nil
}
