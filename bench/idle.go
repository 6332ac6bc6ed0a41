package main

import (
	"context"
	"fmt"
	"time"
)

const idleAfter = 5 * time.Second

// idle measures what a system costs when there is nothing to do: CPU µs a second in place of CPU µs a task, so that
// 10,000 is one percent of a core.
func idle(ctx context.Context, b *bench) error {
	for run := range b.runs {
		for _, name := range b.systems {
			b.results.begin("idle", name, run+1, b.runs)
			r, err := b.idleCost(ctx, name)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			r.Scenario, r.System, r.Rate = "idle", name, 0
			b.results.add(r)
		}
	}
	return nil
}

func (b *bench) idleCost(ctx context.Context, name string) (row, error) {
	s, _ := findSystem(name)
	p, err := b.open(ctx, s)
	if err != nil {
		return row{}, err
	}
	defer p.close()
	if err := p.startClients(ctx, childConfig{}); err != nil {
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
	// What is asked once after a start, such as retention, is no cost of idling.
	if err := pause(ctx, idleAfter); err != nil {
		return row{}, err
	}
	from, err := p.sample(ctx)
	if err != nil {
		return row{}, err
	}
	if err := pause(ctx, b.window); err != nil {
		return row{}, err
	}
	to, err := p.sample(ctx)
	if err != nil {
		return row{}, err
	}
	r := cost(from, to, 1)
	seconds := to.at.Sub(from.at).Seconds()
	for _, f := range []*float64{&r.CPU, &r.CPUPostgres, &r.CPUNATS, &r.CPUClient, &r.WAL} {
		*f /= seconds
	}
	r.Memory, err = p.memory()
	return r, err
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
