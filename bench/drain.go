package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// warmUp is how many tasks a system works off before it is measured: plans, connections and lanes are there then.
const warmUp = 2000

// drainPlan says what a drain is made harder by.
type drainPlan struct {
	name   string
	future int  // rows for tomorrow beside the due ones
	churn  int  // tasks worked off while an old snapshot is held, which the drain then finds held too
	fail   bool // each fifth task fails once
	idle   int  // further types without work
	old    int  // rows that are finished, of taskrelay
	purge  bool // they have been so for longer than they are kept: the relay deletes them meanwhile
}

// drains measures a drain of each system in turn.
func (b *bench) drains(ctx context.Context, plan drainPlan) error {
	for run := range b.runs {
		for _, name := range b.systems {
			s, _ := findSystem(name)
			b.results.begin(plan.name, name, run+1, b.runs)
			r, err := b.drain(ctx, s, plan)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			b.results.add(r)
		}
	}
	return nil
}

func (b *bench) drain(ctx context.Context, s system, plan drainPlan) (row, error) {
	p, err := b.open(ctx, s)
	if err != nil {
		return row{}, err
	}
	defer p.close()
	idle := make([]string, plan.idle)
	for i := range idle {
		idle[i] = fmt.Sprintf("IDLE_%03d", i+1)
	}
	if err := p.startClients(ctx, childConfig{Fail: plan.fail, Idle: idle}); err != nil {
		return row{}, err
	}

	// Each idle type has had a task once, so that it is known everywhere.
	for _, t := range idle {
		if err := p.fill(ctx, s.fill, -1_000_000, -1_000_000, t); err != nil {
			return row{}, err
		}
	}
	if err := p.fill(ctx, s.fill, -warmUp, -1, bizType); err != nil {
		return row{}, err
	}
	if _, err := p.workOff(ctx, 0, warmUp+len(idle), nil); err != nil {
		return row{}, fmt.Errorf("warm up: %w", err)
	}
	if plan.churn > 0 {
		snapshot, err := p.holdSnapshot(ctx)
		if err != nil {
			return row{}, err
		}
		defer func() { _ = snapshot.Rollback(context.WithoutCancel(ctx)) }()
		if err := p.fill(ctx, s.fill, 1_000_000, 1_000_000+plan.churn-1, bizType); err != nil {
			return row{}, err
		}
		if _, err := p.workOff(ctx, 0, plan.churn, nil); err != nil {
			return row{}, fmt.Errorf("churn: %w", err)
		}
	}
	if plan.future > 0 {
		if err := p.fill(ctx, s.fillFuture, 1, plan.future, bizType); err != nil {
			return row{}, err
		}
	}

	if plan.old > 0 && s.name == "taskrelay" {
		if err := p.fillOld(ctx, plan); err != nil {
			return row{}, err
		}
	}
	var last int64
	if err := p.pool.QueryRow(ctx, s.last).Scan(&last); err != nil {
		return row{}, err
	}
	if err := p.fill(ctx, s.fill, 0, b.tasks-1, bizType); err != nil {
		return row{}, err
	}
	// A full table of some age: seen by vacuum, known to the planner, its pages on disk, so that the first change of
	// each page is logged whole.
	for _, sql := range []string{"VACUUM ANALYZE " + s.table, "CHECKPOINT", "SELECT pg_stat_reset()"} {
		if _, err := p.pool.Exec(ctx, sql); err != nil {
			return row{}, err
		}
	}
	r, err := p.workOff(ctx, last, b.tasks, func(begin bool) error { return p.profile(ctx, begin) })
	if err != nil {
		return row{}, err
	}
	if r.Memory, err = p.memory(); err != nil {
		return row{}, err
	}
	if err := p.stopClients(); err != nil {
		return row{}, err
	}
	if err := p.counters(ctx, &r); err != nil {
		return row{}, err
	}
	r.Scenario, r.System = plan.name, s.name
	return r, nil
}

// fill inserts tasks in one statement.
func (p *place) fill(ctx context.Context, sql string, from, to int, bizType string) error {
	if _, err := p.pool.Exec(ctx, sql, from, to, bizType, pad); err != nil {
		return fmt.Errorf("insert tasks: %w", err)
	}
	return nil
}

// fillOld inserts rows that are finished, and lets the relay look at them at once.
func (p *place) fillOld(ctx context.Context, plan drainPlan) error {
	age := "1 hour"
	if plan.purge {
		age = "31 days"
	}
	_, err := p.pool.Exec(ctx, `WITH due AS (UPDATE taskrelay.retention SET full_at = NULL)
INSERT INTO taskrelay.task (biz_type, biz_id, payload, status, finished_at)
SELECT $2::text, 'O-' || n, json_build_object('n', n, 'pad', $3::text), 'succeeded', now() - $4::text::interval
FROM generate_series(1, $1::int) AS n`, plan.old, bizType, pad, age)
	if err != nil {
		return fmt.Errorf("insert finished tasks: %w", err)
	}
	return nil
}

// workOff lets the system consume until no task above id after is open, and returns what that took from the first task
// handled on: how long a system takes to start is no part of it. around, if any, is called before and after.
func (p *place) workOff(ctx context.Context, after int64, tasks int, around func(begin bool) error) (row, error) {
	if around == nil {
		around = func(bool) error { return nil }
	}
	if _, err := p.handler().ask(ctx, request{Do: "expect", Count: int64(tasks)}); err != nil {
		return row{}, err
	}
	if err := around(true); err != nil {
		return row{}, err
	}
	if _, err := p.gate().ask(ctx, request{Do: "start"}); err != nil {
		return row{}, err
	}
	if _, err := p.handler().ask(ctx, request{Do: "first"}); err != nil {
		return row{}, err
	}
	from, err := p.sample(ctx)
	if err != nil {
		return row{}, err
	}
	if _, err := p.handler().ask(ctx, request{Do: "wait"}); err != nil {
		return row{}, err
	}
	to, err := p.waitDone(ctx, after)
	if err != nil {
		return row{}, err
	}
	if err := around(false); err != nil {
		return row{}, err
	}
	if _, err := p.gate().ask(ctx, request{Do: "stop"}); err != nil {
		return row{}, err
	}
	return cost(from, to, tasks), nil
}

// waitDone returns when nothing above id after is open, with what had been used when that was so. It looks at the
// newest rows until they are done, which costs next to nothing, and only then at all of them: that look is after the
// sample. [Counting all rows each time cost River's figure 3 µs a task.]
func (p *place) waitDone(ctx context.Context, after int64) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	pause := time.NewTicker(5 * time.Millisecond)
	defer pause.Stop()
	var last int64
	if err := p.pool.QueryRow(ctx, p.system.last).Scan(&last); err != nil {
		return sample{}, err
	}
	var open int64
	for {
		if err := p.pool.QueryRow(ctx, p.system.open, max(after, last-newest)).Scan(&open); err != nil {
			return sample{}, fmt.Errorf("wait until all is settled: %w", err)
		}
		if open == 0 {
			s, err := p.sample(ctx)
			if err != nil {
				return s, err
			}
			if err := p.pool.QueryRow(ctx, p.system.open, after).Scan(&open); err != nil {
				return s, fmt.Errorf("wait until all is settled: %w", err)
			}
			if open == 0 {
				return s, nil
			}
		}
		select {
		case <-ctx.Done():
			return sample{}, fmt.Errorf("%d tasks are still open a minute after their handlers returned", open)
		case <-pause.C:
		}
	}
}

// newest is how many of the newest rows are looked at while waiting: more than are settled in one batch.
const newest = 3000

// holdSnapshot is a report that somebody left open.
func (p *place) holdSnapshot(ctx context.Context) (pgx.Tx, error) {
	tx, err := p.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return nil, err
	}
	_, err = tx.Exec(ctx, "SELECT count(*) FROM "+p.system.table)
	return tx, err
}
