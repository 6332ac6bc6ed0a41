package command

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/pause"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

const (
	// One claimer and one settler. Batches grow with the load, so two of each are no faster [20k tasks/s either way],
	// but their statements overlap: then the version that a claim left behind is still visible to somebody when the
	// settle comes, its page has no room for a third, and the update is not HOT [0.85 against 0.998, fillfactor 35].
	claimers = 1
	settlers = 1
	lockers  = 2
	// ownConns: claimers, settlers, lockers, heartbeat, presence, and deleting what is not kept.
	ownConns = claimers + settlers + lockers + 3
)

// Worker fetches, claims, runs and settles the tasks of the registered types. Make it with NewWorker, Run it once.
type Worker struct {
	cfg   WorkerConfig
	user  *pgxpool.Pool // what the caller gave: its settings make the worker's own pool
	pool  *pgxpool.Pool
	nc    *nats.Conn
	js    jetstream.JetStream
	names outbox.Names
	log   zerolog.Logger
	epoch time.Time
	sql   statements

	installation string
	dispatchers  []*dispatcher // by biz type, sorted
	held         holding
	claims       *batcher[*attempt]
	settles      *batcher[*settlement]
	locked       *batcher[*settlement]
	forgets      *batcher[int64]
	apiCalls     chan struct{}
	fatal        chan error

	background     context.Context // statements in flight; ends last
	handlers       context.Context // parent of every handler's context
	cancelHandlers context.CancelCauseFunc

	stats      Stats
	meter      *meter
	tracer     *tracer
	health     health
	complaints complaints
	started    atomic.Bool
	running    atomic.Bool
	finished   atomic.Bool
	sweptAt    atomic.Int64
	beatAt     atomic.Int64
}

// statements are the worker's, rendered for its schema.
type statements struct {
	claim, takeOver, classify, handBackEarly, heartbeat            string
	settleSucceeded, settle, settleLocked, lookUp, stale, complete string
	register, sayAlive, readTypes, sayGone, forget                 string
}

func renderStatements(s outbox.Schema) statements {
	return statements{
		claim: s.Render(claimSQL), takeOver: s.Render(takeOverSQL), classify: s.Render(classifySQL), handBackEarly: s.Render(handBackEarlySQL),
		heartbeat:       s.Render(heartbeatSQL),
		settleSucceeded: s.Render(settleSucceededSQL),
		settle:          s.Render(strings.Replace(settleSQL, "{{skip}}", "SKIP LOCKED", 1)),
		settleLocked:    s.Render(strings.Replace(settleSQL, "{{skip}}", "", 1)),
		lookUp:          s.Render(lookUpSQL), stale: s.Render(staleSQL), complete: s.Render(completeSQL),
		register: s.Render(registerSQL), sayAlive: s.Render(sayAliveSQL), readTypes: s.Render(readTypesSQL),
		sayGone: s.Render(sayGoneSQL), forget: s.Render(forgetSQL),
	}
}

// NewWorker makes a worker for the types of reg, which must not be changed afterwards. An empty registry is an error:
// such a worker would look alive and do nothing.
//
// The worker opens up to seven connections of its own with the settings of pool, so that handlers that use pool
// cannot keep heartbeats from getting one. It does not close pool or nc.
func NewWorker(pool *pgxpool.Pool, nc *nats.Conn, reg *Registry, cfg WorkerConfig) (*Worker, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("new worker: %w", err)
	}
	if reg == nil || len(reg.bindings) == 0 {
		return nil, errors.New("new worker: no command is registered: call command.Register, or set TASKRELAY_BIZ_TYPES for the stock worker")
	}
	names := outbox.Names{Namespace: cfg.Namespace, APIPrefix: cfg.APIPrefix}
	js, err := names.JetStream(nc)
	if err != nil {
		return nil, fmt.Errorf("new worker: %w", err)
	}
	w := &Worker{
		cfg: cfg, user: pool, nc: nc, js: js,
		names:    names,
		log:      cfg.Logger.With().Str("component", "worker").Str("worker", cfg.Name).Logger(),
		epoch:    time.Now(),
		sql:      renderStatements(cfg.Schema),
		held:     holding{all: make(map[int64]*attempt)},
		claims:   newBatcher[*attempt](),
		settles:  newBatcher[*settlement](),
		locked:   newBatcher[*settlement](),
		forgets:  newBatcher[int64](),
		apiCalls: make(chan struct{}, 16),
		fatal:    make(chan error, 1),
	}
	w.tracer = newTracer(cfg)
	if w.meter, err = newMeter(w); err != nil {
		return nil, fmt.Errorf("new worker: %w", err)
	}
	for _, t := range reg.BizTypes() {
		w.dispatchers = append(w.dispatchers, newDispatcher(w, reg.bindings[t]))
	}
	return w, nil
}

// now is monotonic: a clock that jumps must neither end nor prolong a lease.
func (w *Worker) now() time.Duration { return time.Since(w.epoch) }

// Run works until ctx is cancelled, then stops within Grace and a few seconds and returns nil: running handlers may
// finish, what is left is handed back. It waits with backoff for Postgres, NATS and the stream. It returns an error
// when going on would be wrong: the stream belongs to another installation.
func (w *Worker) Run(ctx context.Context) error {
	if !w.started.CompareAndSwap(false, true) {
		return errors.New("run worker: Run was called before")
	}
	background, endBackground := context.WithCancel(context.WithoutCancel(ctx))
	defer endBackground()
	w.background = background
	w.handlers, w.cancelHandlers = context.WithCancelCause(background)
	defer w.cancelHandlers(nil)
	defer w.finished.Store(true)
	w.sweptAt.Store(int64(w.now()))
	w.beatAt.Store(int64(w.now()))

	pool, err := ownPool(background, w.user)
	if err != nil {
		return fmt.Errorf("run worker: %w", err)
	}
	defer pool.Close()
	w.pool = pool
	if err := w.prepare(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("run worker: %w", err)
	}
	if err := w.work(ctx, endBackground); err != nil {
		return fmt.Errorf("run worker: %w", err)
	}
	return nil
}

// ownPool makes a small pool with the settings of another.
func ownPool(ctx context.Context, of *pgxpool.Pool) (*pgxpool.Pool, error) {
	cfg := of.Config()
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = ownConns, 0, 0
	return pgxpool.NewWithConfig(ctx, cfg)
}

// prepare waits for what a worker needs: its installation, the stream, its types made known.
func (w *Worker) prepare(ctx context.Context) error {
	err := w.await(ctx, "postgres", func(ctx context.Context) error {
		i, err := w.cfg.Schema.Installation(ctx, w.pool)
		w.installation = i.ID
		return err
	})
	if err != nil {
		return err
	}
	if err := w.await(ctx, "register", w.register); err != nil {
		return err
	}
	if err := w.await(ctx, "statements", w.rehearse); err != nil {
		return err
	}
	return w.await(ctx, "stream "+w.names.Stream(), func(ctx context.Context) error {
		_, err := w.findStream(ctx)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("waiting for stream %s: start a relay: %w", w.names.Stream(), err)
		}
		return err
	})
}

// await tries f with backoff until it succeeds, and says once a minute what it waits for.
func (w *Worker) await(ctx context.Context, part string, f func(context.Context) error) error {
	retry := pause.Growing(100*time.Millisecond, 5*time.Second)
	for {
		tryCtx, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := f(tryCtx)
		cancel()
		w.sweptAt.Store(int64(w.now()))
		w.beatAt.Store(int64(w.now()))
		if err == nil {
			w.health.clear(part)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if foreign := (errForeignStream{}); errors.As(err, &foreign) {
			return foreign
		}
		w.health.set(part, err, 0)
		w.complain("await "+part, func() { w.log.Warn().Err(err).Msg("waiting to start") })
		sleep(ctx, retry.NextBackOff())
	}
}

// work runs the loops until ctx ends or something fatal happens, then stops them in order.
func (w *Worker) work(ctx context.Context, endStatements context.CancelFunc) error {
	fetching, endFetching := context.WithCancel(w.background)
	claiming, endClaiming := context.WithCancel(w.background)
	settling, endSettling := context.WithCancel(w.background)
	defer endFetching()
	defer endClaiming()
	defer endSettling()
	var lanes, claims, loops sync.WaitGroup

	for range settlers {
		loops.Go(func() { w.settleLoop(settling) })
	}
	for range lockers {
		loops.Go(func() { w.lockedLoop(settling) })
	}
	loops.Go(func() { w.heartbeatLoop(settling) })
	loops.Go(func() { w.sweepLoop(settling) })
	loops.Go(func() { w.presenceLoop(settling) })
	loops.Go(func() { w.forgetLoop(settling) })
	for range claimers {
		claims.Go(func() { w.claimLoop(claiming) })
	}
	for _, d := range w.dispatchers {
		for _, l := range d.lanes {
			lanes.Go(func() { l.run(fetching) })
		}
	}
	unobserve, err := w.meter.observe()
	if err != nil {
		return fmt.Errorf("worker metrics: %w", err)
	}
	defer unobserve()
	w.running.Store(true)
	w.log.Info().Int("biz_types", len(w.dispatchers)).Dur("lease", w.cfg.Lease).Msg("worker started")

	var fatal error
	select {
	case <-ctx.Done():
	case fatal = <-w.fatal:
		w.log.Error().Err(fatal).Msg("worker stops")
	}
	w.log.Info().Dur("grace", w.cfg.Grace).Msg("worker stopping")
	w.stop(stopper{endFetching: endFetching, endClaiming: endClaiming, lanes: &lanes, claims: &claims})
	end := time.AfterFunc(answerWait, endStatements) // with Postgres away it would go on for a lease
	w.forgetRows(w.forgets.drain())
	end.Stop()
	endSettling()
	endStatements() // what is still in flight now hangs
	loops.Wait()
	claims.Wait()
	lanes.Wait()
	w.farewell()
	w.running.Store(false)
	return fatal
}

// laneTrouble takes note of a lane that cannot fetch.
func (w *Worker) laneTrouble(l *lane, err error) {
	if err == nil || errors.Is(err, errLimitChanged) {
		return
	}
	if foreign := (errForeignStream{}); errors.As(err, &foreign) {
		select {
		case w.fatal <- foreign:
		default:
		}
	}
	w.health.set("lane "+l.name(), err, 0)
	w.complain("lanes", func() {
		w.log.Warn().Err(err).Str("consumer", l.name()).Msg("lane cannot fetch, looking it up again")
	})
}

func (w *Worker) laneFine(l *lane) { w.health.clear("lane " + l.name()) }
