package main

import (
	"context"
	"fmt"
	"time"
)

// latencyRate is how many business transactions a second the latency is measured at.
const latencyRate = 500

// latencyWarm is how many tasks go before those that are measured: two seconds of them.
const latencyWarm = 2 * latencyRate

// steadyLimit bounds what producers can make in a window; no machine here makes so many.
const steadyLimit = 1_000_000

// latency measures commit to handler at a fixed rate: taskrelay by polling and with a wake-up after each commit, River
// by its NOTIFY.
func latency(ctx context.Context, b *bench) error {
	n := int(latencyRate*b.window.Seconds()) + latencyWarm
	for run := range b.runs {
		for _, name := range b.systems {
			for _, wake := range []bool{false, true} {
				if wake && name != "taskrelay" {
					continue
				}
				scenario := "latency"
				if wake {
					scenario = "latency-wake"
				}
				b.results.begin(scenario, name, run+1, b.runs)
				r, err := b.produced(ctx, name, produceTimed{count: n, rate: latencyRate, warm: latencyWarm, wake: wake})
				if err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				r.Scenario, r.System = scenario, name
				b.results.add(r)
			}
		}
	}
	return nil
}

// steady lets producers run as fast as they can while the system consumes.
func steady(ctx context.Context, b *bench) error {
	for run := range b.runs {
		for _, name := range b.systems {
			b.results.begin("steady", name, run+1, b.runs)
			r, err := b.produced(ctx, name, produceTimed{window: b.window})
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			r.Scenario, r.System = "steady", name
			b.results.add(r)
		}
	}
	return nil
}

// produceTimed says how many tasks are produced, and how fast.
type produceTimed struct {
	count  int // at rate a second
	rate   float64
	warm   int           // of them, the first, whose latency is not measured
	window time.Duration // or as fast as possible for so long
	wake   bool
}

// produced runs producers beside consumers, until all that was produced is finished.
func (b *bench) produced(ctx context.Context, name string, plan produceTimed) (row, error) {
	s, _ := findSystem(name)
	p, err := b.open(ctx, s)
	if err != nil {
		return row{}, err
	}
	defer p.close()
	limit := plan.count
	if plan.window > 0 {
		limit = steadyLimit
	}
	if err := p.startClients(ctx, childConfig{Timed: limit}); err != nil {
		return row{}, err
	}
	if err := p.fill(ctx, s.fill, -warmUp, -1, bizType); err != nil {
		return row{}, err
	}
	if _, err := p.workOff(ctx, 0, warmUp, nil); err != nil {
		return row{}, fmt.Errorf("warm up: %w", err)
	}
	if _, err := p.gate().ask(ctx, request{Do: "start"}); err != nil {
		return row{}, err
	}
	if err := p.doOne(ctx); err != nil {
		return row{}, err
	}
	enqueue, err := s.enqueuer(p.pool)
	if err != nil {
		return row{}, err
	}
	commits := make([]int64, limit)
	after := func(n int) { commits[n] = time.Now().UnixNano() }
	if plan.wake {
		wake, closed, err := p.waker()
		if err != nil {
			return row{}, err
		}
		defer closed()
		after = func(n int) { commits[n] = time.Now().UnixNano(); wake() }
	}
	next := freely(plan.window, limit)
	if plan.window == 0 {
		next = ticks(limit, plan.rate)
	}
	from, err := p.sample(ctx)
	if err != nil {
		return row{}, err
	}
	if err := produce(ctx, p.pool, enqueue, next, after); err != nil {
		return row{}, err
	}
	to, err := p.waitDone(ctx, 0)
	if err != nil {
		return row{}, err
	}
	for len(commits) > 0 && commits[len(commits)-1] == 0 {
		commits = commits[:len(commits)-1]
	}
	r := cost(from, to, len(commits))
	if err := p.latencies(ctx, plan.warm, commits, &r); err != nil {
		return row{}, err
	}
	if r.Memory, err = p.memory(); err != nil {
		return row{}, err
	}
	if err := p.stopClients(); err != nil {
		return row{}, err
	}
	return r, p.counters(ctx, &r)
}

// doOne returns when a system that was started has done one more task, and so is at work: nobody's latency is that of
// its start.
func (p *place) doOne(ctx context.Context) error {
	if err := p.fill(ctx, p.system.fill, -warmUp-1, -warmUp-1, bizType); err != nil {
		return err
	}
	_, err := p.waitDone(ctx, 0)
	return err
}
