package testenv

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Running is a relay or a worker in this process.
type Running struct {
	t      testing.TB
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	logs   lockedBuffer
	once   sync.Once
}

// Stop ends it in order and fails the test if Run returned an error. Further calls do nothing.
func (r *Running) Stop() {
	r.t.Helper()
	r.once.Do(func() {
		r.cancel()
		select {
		case <-r.done:
		case <-time.After(60 * time.Second):
			r.t.Errorf("%s does not stop", r.name)
			return
		}
		if r.err != nil && !errors.Is(r.err, context.Canceled) {
			r.t.Errorf("%s ended: %v", r.name, r.err)
		}
	})
}

// Done is closed when Run has returned.
func (r *Running) Done() <-chan struct{} { return r.done }

// Err is what Run returned, after Done.
func (r *Running) Err() error { return r.err }

// Logs returns what it has logged so far.
func (r *Running) Logs() string { return r.logs.String() }

func (r *Running) logger() zerolog.Logger {
	return zerolog.New(&r.logs).Level(zerolog.InfoLevel).With().Timestamp().Logger()
}

func (r *Running) start(t testing.TB, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() {
		defer close(r.done)
		r.err = run(ctx)
	}()
	t.Cleanup(func() {
		r.Stop()
		if t.Failed() {
			logs := r.Logs()
			if len(logs) > 20_000 {
				logs = logs[:10_000] + "\n…\n" + logs[len(logs)-10_000:]
			}
			t.Logf("--- log of %s\n%s", r.name, logs)
		}
	})
}

// RunRelay runs a relay in this process until the test ends or Stop is called.
func (e *Env) RunRelay(change ...func(*outbox.RelayConfig)) *Running {
	e.t.Helper()
	r := &Running{t: e.t, name: "relay", done: make(chan struct{})}
	cfg := outbox.RelayConfig{Logger: r.logger()}
	for _, c := range change {
		c(&cfg)
	}
	relay, err := outbox.NewRelay(e.OpenPool("relay"), e.Connect("relay"), cfg)
	if err != nil {
		e.t.Fatal(err)
	}
	r.start(e.t, relay.Run)
	return r
}

// OpenPool opens a pool of its own on the test's database.
func (e *Env) OpenPool(application string) *pgxpool.Pool {
	e.t.Helper()
	cfg, err := pgxpool.ParseConfig(e.URL)
	if err != nil {
		e.t.Fatal(err)
	}
	cfg.MaxConns = 8
	cfg.ConnConfig.RuntimeParams["application_name"] = application
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(pool.Close)
	return pool
}

// Connect opens a NATS connection as the binaries do: for ever, without a buffer that would publish what was given up.
func (e *Env) Connect(name string) *nats.Conn {
	e.t.Helper()
	nc, err := nats.Connect(e.NATS.URL, nats.Name(name), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond),
		nats.ReconnectBufSize(-1), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(nc.Close)
	return nc
}
