package outbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/pause"
	"github.com/taskrelay/taskrelay/internal/pg"
)

// A Relay publishes due tasks of one installation to JetStream. Several relays share the lanes among them; two that
// hold the same lane for a moment cost duplicates, which the workers' claim drops, never correctness.
//
// One goroutine reads lanes (round.go), one serves the work list (worklist.go), one the dead letters (deadletter.go),
// one keeps leases, positions and settings (lane.go), one watches the streams (stream.go), one compares table and
// stream (reconcile.go). Each survives any outage of Postgres or NATS.
type Relay struct {
	pool  *pgxpool.Pool
	nc    *nats.Conn
	js    jetstream.JetStream
	cfg   RelayConfig
	names Names
	log   zerolog.Logger
	pub   *publisher
	meter *meter

	installation string
	wake         chan struct{}
	compare      chan struct{} // a loss has been seen: reconcile at once
	started      atomic.Bool
	said         sync.Map      // drift that has been reported
	reported     time.Time     // when types without workers were last looked for
	pollTook     time.Duration // the last poll's time in Postgres; readLanes' own, as is pace
	pace         pace
	keeper       keeper
	list         workList
	letters      letters
	refusedAt    time.Time           // when types that are not allowed were last reported; applySwitches' own
	soloists     map[string]*soloist // of types that may run one task at a time; shareConcurrency's own
	sweeper      sweeper
	bulks        bulkWork
	collector    collector

	patience     patience
	places       places
	repositioned time.Time // when rows of another cluster were last looked for; reconcile's own

	mu           sync.Mutex // guards what follows; never held while publishing or asking a server
	lanes        map[laneKey]*lane
	incarnation  string
	settings     settings
	buckets      map[string]*bucket // of types with a rate
	calm         calm
	seen         string // the last snapshot
	calmSeen     string // the snapshot of the last read that found nothing
	lanesTaken   uint64 // grows with each change of what there is to read
	refusals     []*parcel
	counts       Counts
	lastRead     time.Time // of lanes, successful
	lastErr      map[string]error
	progress     map[string]time.Time // last turn of each loop, successful or not
	streamsKnown bool
	unsafe       error     // a stream that would lose tasks: nothing is published until it is mended
	sizeLimit    int32     // the stream's own limit on one message; -1: none
	highest      uint64    // sequence the stream has acknowledged to us
	rewound      bool      // it has acknowledged one of these again
	deadCreated  time.Time // when the dead stream was created
	deadHighest  uint64    // sequence the dead stream has acknowledged to us
}

// Counts says what a relay has done since it began.
type Counts struct {
	Published      int64 `json:"published"`       // messages stored for tasks read by position
	Republished    int64 `json:"republished"`     // messages stored for tasks on the work list
	Duplicates     int64 `json:"duplicates"`      // of these, how many the stream already had
	Refused        int64 `json:"refused"`         // tasks made dead because no server takes their message
	DeadLetters    int64 `json:"dead_letters"`    // letters stored
	DroppedHeaders int64 `json:"dropped_headers"` // headers of rows that could not be sent
	Purged         int64 `json:"purged"`          // finished tasks deleted because of their age
	PurgedLog      int64 `json:"purged_log"`      // rows of the attempt log and the audit deleted because of theirs
	Lanes          int64 `json:"lanes"`           // lanes held
	LanesWaiting   int64 `json:"lanes_waiting"`   // of these, how many cannot be published to now
	LanesElsewhere int64 `json:"lanes_elsewhere"` // lanes that another relay holds (RunOnce only)
}

// NewRelay makes a relay. The pool needs at least 3 connections: one reads the lanes, one keeps leases and positions, all
// else shares what is left; with 7 or more only background work waits for other such work. The connection to NATS should be made with
// nats.ReconnectBufSize(-1): with a buffer, a publish that the relay gave up on could be stored much later; that
// costs a duplicate which the claim drops. A relay is for one Run or RunOnce.
func NewRelay(pool *pgxpool.Pool, nc *nats.Conn, cfg RelayConfig) (*Relay, error) {
	if pool == nil || nc == nil {
		return nil, errors.New("new relay: pool and NATS connection are required")
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("new relay: %w", err)
	}
	if n := pool.Config().MaxConns; n < leastConns {
		return nil, fmt.Errorf("new relay: the pool may open %d connections to Postgres, a relay needs %d: set pool_max_conns=%d or more in the address (TASKRELAY_DATABASE_URL), or leave it out",
			n, leastConns, leastConns)
	}
	names := Names{Namespace: cfg.Namespace, APIPrefix: cfg.APIPrefix}
	js, err := names.JetStream(nc)
	if err != nil {
		return nil, fmt.Errorf("new relay: %w", err)
	}
	r := &Relay{
		pool: pool, nc: nc, js: js, cfg: cfg, names: names,
		log:  cfg.Logger.With().Str("component", "relay").Str("relay", cfg.Name).Logger(),
		pub:  newPublisher(nc),
		wake: make(chan struct{}, 1), compare: make(chan struct{}, 1),
		lanes: make(map[laneKey]*lane), lastErr: make(map[string]error), progress: make(map[string]time.Time),
		soloists: make(map[string]*soloist), places: placesOf(pool.Config().MaxConns),
	}
	if r.meter, err = newMeter(r); err != nil {
		return nil, fmt.Errorf("new relay: %w", err)
	}
	return r, nil
}

// Run publishes until ctx ends, then saves its positions, gives its lanes back and returns nil. It returns an error
// only for what no waiting mends: another installation's stream or, at the start, a stream that would lose tasks. One that
// is edited so later is waited for: nothing is published, and Ready says why. So are outages of Postgres and NATS, however
// long.
func (r *Relay) Run(ctx context.Context) error {
	if !r.started.CompareAndSwap(false, true) {
		return errors.New("relay: Run or RunOnce was called before; make a new Relay")
	}
	if r.cfg.Disabled {
		// Something else publishes. People are told all the same: of what dies, and by whoever is alive.
		r.log.Info().Msg("relay is disabled (RELAY_ENABLED=false), publishing nothing")
		if err := r.readInstallation(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		return r.turnLoops(ctx, r.noticeLoops())
	}
	stop, err := r.start(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer stop()
	r.log.Info().Str("installation", r.installation).Str("stream", r.names.Stream()).Msg("relay started")

	sub, err := r.nc.Subscribe(r.names.Wake(), func(*nats.Msg) { r.Wake() })
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", r.names.Wake(), err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	unobserve, err := r.meter.observe()
	if err != nil {
		return fmt.Errorf("relay metrics: %w", err)
	}
	defer unobserve()

	loops := map[string]func(context.Context) (time.Duration, error){
		loopLanes: r.keepLanes, loopRead: r.readLanes, loopWorkList: r.serveWorkList, loopLetters: r.serveDeadLetters,
		loopStreams: r.watchStreams, loopSwitches: r.applySwitches, loopReconcile: r.reconcileOrWait,
		loopRetention: r.keepRetention, loopBulk: r.workOffBulks,
	}
	maps.Copy(loops, r.noticeLoops())
	return r.turnLoops(ctx, loops)
}

// turnLoops turns loops until ctx ends or one of them cannot go on.
func (r *Relay) turnLoops(ctx context.Context, loops map[string]func(context.Context) (time.Duration, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	var fatal error
	var once sync.Once
	for name, step := range loops {
		wg.Go(func() {
			if err := r.loop(ctx, name, step); err != nil {
				once.Do(func() { fatal = err })
				cancel()
			}
		})
	}
	wg.Wait()
	return fatal // not the context's cause: that may be the caller's own
}

// Wake makes the relay look at once instead of at its next poll. Any goroutine may call it.
func (r *Relay) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Counts returns what the relay has done so far.
func (r *Relay) Counts() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.counts
	c.Lanes = int64(len(r.lanes))
	for _, l := range r.lanes {
		if !l.waitUntil.IsZero() {
			c.LanesWaiting++
		}
	}
	return c
}

// Live returns nil as long as each loop turns, also when a server it needs is away.
func (r *Relay) Live() error {
	if r.cfg.Disabled {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, at := range r.progress {
		if idle := time.Since(at); idle > stalled+r.patience.longest() {
			return fmt.Errorf("loop %q has not turned for %v", name, idle.Round(time.Second))
		}
	}
	return nil
}

// Ready returns nil when the relay can publish: Postgres answers, NATS is connected, the streams are there.
func (r *Relay) Ready() error {
	if r.cfg.Disabled {
		return nil
	}
	if !r.nc.IsConnected() {
		return fmt.Errorf("NATS is %s", r.nc.Status())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.unsafe != nil {
		return r.unsafe
	}
	if !r.streamsKnown {
		return errors.New("streams are not ready")
	}
	// All of it: the first reason is seldom the one that helps.
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(r.lastErr)) {
		if err := r.lastErr[name]; err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	for _, l := range slices.SortedFunc(maps.Values(r.lanes), func(a, b *lane) int { return compareKeys(a.laneKey, b.laneKey) }) {
		if l.trouble != nil && l.waitStep == waitLongest && len(errs) < 20 {
			errs = append(errs, fmt.Errorf("tasks of %s (%s) cannot be published: %w", l.bizType, l.priority, l.trouble))
		}
	}
	if since := time.Since(r.lastRead); since > 10*time.Second {
		errs = append(errs, fmt.Errorf("no lane was read for %v", since.Round(time.Second)))
	}
	return errors.Join(errs...)
}

// start finds the installation, the streams and the incarnation, waiting for servers that are away, and starts the
// publisher. The function it returns stops all that again.
func (r *Relay) start(ctx context.Context) (stop func(), err error) {
	if err := r.readInstallation(ctx); err != nil {
		return nil, err
	}
	if err := r.untilAnswered(ctx, "start", func() error { return r.reposition(ctx) }); err != nil {
		return nil, err
	}
	r.repositioned = time.Now()
	err = r.untilAnswered(ctx, "start", func() error {
		err := r.ensureStreams(ctx)
		if _, ok := errors.AsType[unsafeStreamError](err); ok {
			return fatalError{err} // whoever starts a relay is there to see it
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := r.untilAnswered(ctx, "start", func() error { return r.enterIncarnation(ctx) }); err != nil {
		return nil, err
	}
	pubCtx, stopPub := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- r.pub.run(pubCtx) }()
	heedNoMore := r.heedRefusals(pubCtx)
	return func() {
		r.leave(context.WithoutCancel(ctx))
		heedNoMore()
		stopPub()
		<-done
	}, nil
}

func (r *Relay) readInstallation(ctx context.Context) error {
	return r.untilAnswered(ctx, "start", func() error {
		inst, err := r.cfg.Schema.Installation(ctx, r.pool)
		if err != nil {
			return err
		}
		r.installation = inst.ID
		return nil
	})
}

// untilAnswered repeats f with growing pauses until it succeeds, ctx ends or waiting cannot help.
func (r *Relay) untilAnswered(ctx context.Context, what string, f func() error) error {
	var notice notices
	return backoff.RetryNotify(func() error {
		err := f()
		if isFatal(err) {
			return backoff.Permanent(err)
		}
		return err
	}, backoff.WithContext(pause.Growing(firstPause, longestPause), ctx), func(err error, wait time.Duration) {
		if notice.due(time.Now()) {
			r.log.Warn().Err(err).Dur("delay", wait).Str("during", what).Msg("waiting")
		}
	})
}

// loop runs step again and again: after the wait it asks for, or after growing pauses when it fails.
func (r *Relay) loop(ctx context.Context, name string, step func(context.Context) (time.Duration, error)) error {
	ctx = onBehalfOf(ctx, name)
	pauses := pause.Growing(firstPause, longestPause)
	var notice notices
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		wait, err := step(ctx)
		if ctx.Err() != nil {
			return nil
		}
		r.mu.Lock()
		r.progress[name], r.lastErr[name] = time.Now(), err
		r.mu.Unlock()
		switch {
		case isFatal(err):
			return err
		case err != nil:
			wait = max(wait, pauses.NextBackOff())
			if notice.due(time.Now()) {
				r.log.Error().Err(err).Str("loop", name).Dur("delay", wait).Msg("loop failed, trying again")
			}
		default:
			if notice.end() {
				r.log.Info().Str("loop", name).Msg("loop works again")
			}
			pauses.Reset()
		}
		timer.Reset(wait)
	}
}

// turned says that a loop which waits on purpose is alive.
func (r *Relay) turned(name string) {
	r.mu.Lock()
	r.progress[name] = time.Now()
	r.mu.Unlock()
}

// notices lets a failure that repeats be logged once a period instead of every time.
type notices struct{ last time.Time }

func (n *notices) due(now time.Time) bool {
	if now.Sub(n.last) < 10*time.Second {
		return false
	}
	n.last = now
	return true
}

func (n *notices) end() bool {
	was := !n.last.IsZero()
	n.last = time.Time{}
	return was
}

// A fatalError is one that no waiting mends: an operator has to act.
type fatalError struct{ error }

func (e fatalError) Unwrap() error { return e.error }

func isFatal(err error) bool {
	var f fatalError
	return errors.As(err, &f)
}

func (r *Relay) query(ctx context.Context, sql string, args []any, scan func(pgx.Rows) error) error {
	return r.withPatience(ctx, sql, queryTimeout, func(ctx context.Context) error {
		return pg.Query(ctx, r.pool, r.cfg.Schema.Render(sql), args, scan)
	})
}

// queryCached is query for the statements of every poll.
func (r *Relay) queryCached(ctx context.Context, sql string, args []any, scan func(pgx.Rows) error) error {
	return r.withPatience(ctx, sql, queryTimeout, func(ctx context.Context) error {
		return pg.QueryCached(ctx, r.pool, r.cfg.Schema.Render(sql), args, scan)
	})
}

// stalled is how long a loop may make no turn, beside the one statement it may be waiting for.
const stalled = 30 * time.Second

// What has failed is tried again after pauses that grow so far.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second
)

func (r *Relay) exec(ctx context.Context, sql string, args ...any) error {
	return r.query(ctx, sql, args, func(pgx.Rows) error { return nil })
}
