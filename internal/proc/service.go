package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/admin"
	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/connect"
	"github.com/taskrelay/taskrelay/internal/observe"
	"github.com/taskrelay/taskrelay/schema"
)

// Service is a process with its connections: Postgres has answered and its schema is new enough. NATS connects by
// itself, at once or later.
type Service struct {
	Pool   *pgxpool.Pool
	NATS   *nats.Conn
	Logger zerolog.Logger
	// Telemetry is where relay and worker count and trace.
	Telemetry *observe.Telemetry

	admin    *admin.Server
	stopped  context.CancelFunc // ends the admin server
	served   chan error
	profiles sync.WaitGroup
}

// Open makes a Service for role, relay or worker. The admin server answers first, so that a process that waits for
// Postgres is seen to be alive. Close it.
func Open(ctx context.Context, role, version string, servers config.Servers, common config.Common, process config.Process, stderr io.Writer) (*Service, error) {
	logger, err := connect.Logger(stderr, common.LogLevel, common.LogFormat)
	if err != nil {
		return nil, config.Invalid("LOG_LEVEL", "%w", err)
	}
	server, err := admin.Listen(process.AdminAddr, logger)
	if err != nil {
		return nil, err
	}
	// The admin server outlives ctx: a process that is stopping is still alive.
	actx, stopped := context.WithCancel(context.WithoutCancel(ctx))
	s := &Service{Logger: logger, admin: server, stopped: stopped, served: make(chan error, 1)}
	go func() { s.served <- server.Run(actx) }()
	if s.Telemetry, err = observe.New(ctx, role, Version(version), logger); err != nil {
		s.Close()
		return nil, config.Wrong(err)
	}
	server.Metrics(s.Telemetry.Handler())
	if err := s.serveProfiles(actx, process.PprofAddr); err != nil {
		s.Close()
		return nil, err
	}

	if s.Pool, err = connect.Postgres(ctx, string(servers.DatabaseURL), "taskrelay-"+role, logger); err != nil {
		s.Close()
		return nil, err
	}
	if err := s.checkSchema(ctx, servers, common, process); err != nil {
		s.Close()
		return nil, err
	}
	if s.NATS, err = connect.NATS(string(servers.NatsURL), connect.Identity{Creds: common.NatsCreds, NKey: common.NatsNkey, CA: common.NatsCA, Cert: common.NatsCert, Key: common.NatsKey}, role, logger); err != nil {
		s.Close()
		return nil, err
	}
	s.Telemetry.Add(observe.Connections(s.Pool, s.NATS))
	return s, nil
}

// serveProfiles serves them until the process ends, where they are wanted.
func (s *Service) serveProfiles(ctx context.Context, addr string) error {
	if addr == "" {
		return nil
	}
	p, err := admin.ListenProfiles(addr, s.Logger)
	if err != nil {
		return err
	}
	s.profiles.Go(func() {
		if err := p.Run(ctx); err != nil {
			s.Logger.Error().Err(err).Msg("profiles are not served any more")
		}
	})
	return nil
}

func (s *Service) checkSchema(ctx context.Context, servers config.Servers, common config.Common, process config.Process) error {
	opts := schema.Options{Schema: common.Schema, Logger: s.Logger}
	if process.Migrate == "auto" {
		pool, err := connect.Postgres(ctx, common.MigrateDatabase(servers.DatabaseURL), "taskrelay-migrate", s.Logger)
		if err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
		defer pool.Close()
		if _, err := schema.Migrate(ctx, pool, opts); err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
	}
	return schema.Validate(ctx, s.Pool, opts)
}

// Runner is a relay or a worker.
type Runner struct {
	Name  string
	Run   func(ctx context.Context) error
	Live  func() error
	Ready func() error
}

// Run runs r until ctx ends and r has stopped, or until r or the admin server fails.
func (s *Service) Run(ctx context.Context, r Runner) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watched := make(chan struct{})
	go func() {
		select {
		case err := <-s.served: // only by a failure: Close has not been called yet
			s.served <- err
			cancel(err)
		case <-watched:
		}
	}()
	defer close(watched)
	s.admin.Serving(r.Live,
		admin.Check{Name: "postgres", Err: s.postgres},
		admin.Check{Name: "nats", Err: s.nats},
		admin.Check{Name: r.Name, Err: func(context.Context) error { return r.Ready() }})
	defer context.AfterFunc(ctx, s.admin.Stopping)()

	if err := r.Run(ctx); err != nil {
		return err
	}
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func (s *Service) postgres(ctx context.Context) error {
	if err := s.Pool.Ping(ctx); err != nil {
		if ctx.Err() != nil {
			return errors.New("no answer in time")
		}
		return errors.New("no connection") // the log has the reason; pgx's text names the user
	}
	return nil
}

func (s *Service) nats(context.Context) error {
	if status := s.NATS.Status(); status != nats.CONNECTED {
		return errors.New(status.String())
	}
	return nil
}

// Close ends the connections and waits for them, but not for ever: a connection that hangs must not keep the
// process.
func (s *Service) Close() {
	if s.NATS != nil {
		if s.NATS.IsConnected() {
			_ = s.NATS.FlushTimeout(time.Second) // acks that are on their way
		}
		s.NATS.Close()
	}
	if s.Pool != nil {
		closed := make(chan struct{})
		go func() { s.Pool.Close(); close(closed) }()
		select {
		case <-closed:
		case <-time.After(2 * time.Second):
		}
	}
	if s.Telemetry != nil {
		s.Telemetry.Close()
	}
	s.stopped()
	<-s.served
	s.profiles.Wait()
}
