package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/doctor"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func (a *app) doctorCommand() *cobra.Command {
	var fix bool
	var reason string
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Compare table and stream, and say what is missing where",
		Long: `doctor looks at Postgres and at NATS, and tells table and stream apart: per lane what each holds, which tasks have no
message and which messages no task, who is alive, who holds leases and for how long. To each finding it says what the relay
does about it by itself and when, and what a person should do. It changes nothing.

With --fix it has the relay do at once what it would do later: look at tasks whose message is lost, compare all lanes, send
dead letters again, have a consumer made anew, give rows of another cluster a new place. That never makes a good message
bad, and the audit says who asked.

It exits 0 when nothing is wrong (or, with --fix, when the relay has been asked for all of it), 6 when there is a problem,
7 when Postgres or NATS does not answer; what the other one shows is printed all the same.`,
		Example: `  taskrelay doctor
  taskrelay doctor -o json | jq '.findings[] | select(.level == "problem")'
  taskrelay doctor --fix --reason 'stream was purged by hand'`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			cfg, err := a.config(c)
			if err != nil {
				return err
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			servers, err := openServers(ctx, cfg)
			if err != nil {
				return err
			}
			defer closeServers(servers)
			relay := relayConfig(cfg)
			r := doctor.Examine(ctx, servers, relay)
			mended := false
			if fix && r.Postgres.Reachable {
				s := &session{pool: servers.Pool, schema: relay.Schema, config: cfg}
				mended = doctor.Fix(ctx, r, servers, relay, s.change, reason)
			}
			if err := printReport(p, r); err != nil {
				return err
			}
			switch {
			case r.Unreachable():
				return &exitError{code: exitConnect}
			case !r.Healthy && !mended:
				return &exitError{code: exitUnhealthy}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&fix, "fix", false, "have the relay do at once what it would do about it")
	c.Flags().StringVar(&reason, "reason", "taskrelay doctor --fix", "why, for the audit")
	return c
}

// answerTime is how long doctor waits for each server before it goes on without.
const answerTime = 5 * time.Second

// openServers connects to both and goes on with one. Both URLs must be set: what is not asked for is not down.
func openServers(ctx context.Context, cfg config.CLI) (doctor.Servers, error) {
	url, err := cfg.Database()
	if err != nil {
		return doctor.Servers{}, err
	}
	if _, err := cfg.Nats(); err != nil {
		return doctor.Servers{}, err
	}
	type answer struct {
		nc  *nats.Conn
		err error
	}
	broker := make(chan answer, 1)
	go func() {
		nc, err := connectNats(cfg)
		broker <- answer{nc, err}
	}()
	var s doctor.Servers
	pctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	if s.Pool, err = openPool(pctx, url); err != nil {
		if exitCode(err) == exitUsage {
			return s, err
		}
		s.Pool, s.PostgresError = nil, err
	}
	n := <-broker // bounded by the client's own timeout, 2 s
	s.NATS, s.NATSError = n.nc, n.err
	return s, nil
}

func closeServers(s doctor.Servers) {
	if s.Pool != nil {
		closed := make(chan struct{})
		go func(p *pgxpool.Pool) { p.Close(); close(closed) }(s.Pool)
		select {
		case <-closed:
		case <-time.After(time.Second): // a connection that hangs
		}
	}
	if s.NATS != nil {
		s.NATS.Close()
	}
}

// relayConfig is the configuration that a relay in this environment would have.
func relayConfig(cfg config.CLI) outbox.RelayConfig {
	return outbox.RelayConfig{Schema: outbox.Schema(cfg.Schema), Namespace: cfg.Namespace, APIPrefix: cfg.NatsAPIPrefix,
		Replicas: cfg.StreamReplicas, MaxPerSubject: cfg.StreamMaxPerSubject, Reconcile: cfg.RelayReconcile}
}

func (a *app) repositionCommand() *cobra.Command {
	var force bool
	var reason string
	c := &cobra.Command{
		Use:   "reposition",
		Short: "Give rows of another cluster a new place, after a restore or a copy",
		Long: `reposition makes an installation whole after its rows came from another Postgres cluster: a restore, a copy, a logical
replica. Their transaction ids mean nothing here, and no relay would come to them for months. A relay does the same when it
starts, and every hour. It is safe while relays and workers run, and to repeat.

--force is for after a restore in place, which nothing shows. It needs the rights of a relay.`,
		Example: "  taskrelay reposition\n  taskrelay reposition --force --reason 'restored from last night'",
		Args:    args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			ctx, cancel := a.limit(c, 0)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			did, err := doctor.Reposition(ctx, doctor.Servers{Pool: s.pool}, relayConfig(s.config), s.change, force, reason)
			if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == insufficientPrivilege {
				return &exitError{exitFailed, fmt.Errorf("reposition: %s: it writes what a relay writes, so it needs role %s_relay or the owner of the schema",
					e.Message, s.schema)}
			}
			if err != nil {
				return err
			}
			if p.format == "json" {
				return p.json(did)
			}
			return printAll(p, []outbox.Repositioned{did}, func(d outbox.Repositioned) string { return itoa(d.Rows) }, []column[outbox.Repositioned]{
				{title: "OTHER CLUSTER", cell: func(d outbox.Repositioned) string { return fmt.Sprint(d.Cluster) }},
				{title: "FOREIGN ROWS", cell: func(d outbox.Repositioned) string { return fmt.Sprint(d.ForeignRows) }},
				{title: "ROWS MOVED", cell: func(d outbox.Repositioned) string { return itoa(d.Rows) }},
			})
		},
	}
	c.Flags().BoolVar(&force, "force", false, "also when nothing shows that the cluster is another one")
	c.Flags().StringVar(&reason, "reason", "taskrelay reposition", "why, for the audit")
	return c
}
