package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"
)

// sample is what has been used up to a moment.
type sample struct {
	at               time.Time
	pg, nats, client time.Duration
	wal              float64
}

func (p *place) sample(ctx context.Context) (s sample, err error) {
	if err = p.pool.QueryRow(ctx, "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8").Scan(&s.wal); err != nil {
		return s, err
	}
	if s.pg, err = postgresCPU(p.b.pg.Pid()); err != nil {
		return s, err
	}
	if p.nats != nil {
		if s.nats, err = cpuTime(p.nats.cmd.Process.Pid, false); err != nil {
			return s, err
		}
	}
	for _, c := range p.kids {
		d, err := cpuTime(c.cmd.Process.Pid, false)
		if err != nil {
			return s, err
		}
		s.client += d
	}
	s.at = time.Now()
	return s, nil
}

// cost is what n tasks have used between two samples.
func cost(from, to sample, n int) (r row) {
	us := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(n) }
	r.CPUPostgres, r.CPUNATS, r.CPUClient = us(to.pg-from.pg), us(to.nats-from.nats), us(to.client-from.client)
	r.CPU = r.CPUPostgres + r.CPUNATS + r.CPUClient
	r.WAL = (to.wal - from.wal) / float64(n)
	r.Rate = float64(n) / to.at.Sub(from.at).Seconds()
	return r
}

// memory is the peak of the largest client process, in MB.
func (p *place) memory() (float64, error) {
	var most int64
	for _, c := range p.kids {
		n, err := peakMemory(c.cmd.Process.Pid)
		if err != nil {
			return 0, err
		}
		most = max(most, n)
	}
	return float64(most) / 1e6, nil
}

// counters reads the share of HOT updates and the dead rows, when all other sessions have ended and reported.
func (p *place) counters(ctx context.Context, r *row) error {
	if _, err := p.pool.Exec(ctx, "SELECT pg_stat_force_next_flush()"); err != nil {
		return err
	}
	var updates, hot, dead float64
	err := p.pool.QueryRow(ctx, `SELECT n_tup_upd, n_tup_hot_upd, n_dead_tup FROM pg_stat_user_tables
WHERE relid = $1::text::regclass`, p.system.table).Scan(&updates, &hot, &dead)
	if err != nil {
		return err
	}
	if updates > 0 {
		r.HOT = hot / updates
	}
	r.Dead = dead
	return nil
}

// profile starts a CPU profile in every client process, or ends them.
func (p *place) profile(ctx context.Context, begin bool) error {
	if p.b.profiles == "" {
		return nil
	}
	for _, c := range p.kids {
		q := request{Do: "profiled"}
		if begin {
			q = request{Do: "profile", Path: filepath.Join(p.b.profiles, fmt.Sprintf("%s-%s.pprof", p.name, c.role))}
		}
		if _, err := c.ask(ctx, q); err != nil {
			return err
		}
	}
	return nil
}
