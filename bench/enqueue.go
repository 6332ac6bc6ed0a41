package main

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// entrance is a way to put a task into a business transaction.
type entrance struct {
	scenario, system string
	enqueue          func(p *place) (enqueuer, error)
}

func fixed(e enqueuer) func(*place) (enqueuer, error) {
	return func(*place) (enqueuer, error) { return e, nil }
}

var entrances = []entrance{
	{"enqueue", "taskrelay", fixed(enqueueInsert)},
	{"enqueue-outbox", "taskrelay", fixed(enqueueOutbox)},
	{"enqueue-function", "taskrelay", fixed(enqueueFunction)},
	{"enqueue", "river", func(p *place) (enqueuer, error) { return riverEnqueuer(p.pool) }},
}

// enqueueing measures how much slower a business transaction gets by the task in it. Nobody consumes, so that it is
// the transaction alone; one session listens, as River's clients do. The transaction without a task is measured
// before each, on the same database.
func enqueueing(ctx context.Context, b *bench) error {
	for run := range b.runs {
		for _, e := range entrances {
			if !slices.Contains(b.systems, e.system) {
				continue
			}
			b.results.begin(e.scenario, e.system, run+1, b.runs)
			r, err := b.enqueueBy(ctx, e)
			if err != nil {
				return fmt.Errorf("%s: %w", e.scenario, err)
			}
			r.Scenario, r.System = e.scenario, e.system
			b.results.add(r)
		}
	}
	return nil
}

func (b *bench) enqueueBy(ctx context.Context, e entrance) (row, error) {
	s, _ := findSystem(e.system)
	s.nats = false // nobody consumes
	p, err := b.open(ctx, s)
	if err != nil {
		return row{}, err
	}
	defer p.close()
	listener, err := p.pool.Acquire(ctx)
	if err != nil {
		return row{}, err
	}
	defer listener.Release()
	if _, err := listener.Exec(ctx, `LISTEN "public.river_insert"`); err != nil {
		return row{}, err
	}
	enqueue, err := e.enqueue(p)
	if err != nil {
		return row{}, err
	}
	// The first second is for plans, files that grow and connections.
	if _, err := p.transact(ctx, enqueue, time.Second, -1_000_000_000); err != nil {
		return row{}, err
	}
	alone, err := p.transact(ctx, nil, b.window/2, 0)
	if err != nil {
		return row{}, err
	}
	r, err := p.transact(ctx, enqueue, b.window, 0)
	if err != nil {
		return row{}, err
	}
	r.Slowdown = alone.Rate / r.Rate
	return r, nil
}

// transact runs business transactions for a while. The payload numbers begin at first.
func (p *place) transact(ctx context.Context, enqueue enqueuer, window time.Duration, first int) (row, error) {
	var done atomic.Int64
	numbers := freely(window, steadyLimit)
	next := func() (int, bool) { n, ok := numbers(); return first + n, ok }
	from, err := p.sample(ctx)
	if err != nil {
		return row{}, err
	}
	if err := produce(ctx, p.pool, enqueue, next, func(int) { done.Add(1) }); err != nil {
		return row{}, err
	}
	to, err := p.sample(ctx)
	if err != nil {
		return row{}, err
	}
	return cost(from, to, int(done.Load())), nil
}
