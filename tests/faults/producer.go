package faults

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// fate is what became of a task's transaction.
type fate int

const (
	unknown    fate = iota // the server was gone before it answered the COMMIT: the table tells
	committed              // it answered
	rolledBack             // it was never asked to commit
)

// An entry is a task that a producer has tried to make.
type entry struct {
	script
	body string // the payload, byte for byte
	fate fate
}

// ledger is what producers know. It is the checker's truth about what must be there.
type ledger struct {
	mu      sync.Mutex
	entries []*entry // the task with number n at n-1
}

func (l *ledger) next() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = append(l.entries, nil)
	return int64(len(l.entries))
}

func (l *ledger) note(f fate, entries []*entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range entries {
		e.fate = f
		l.entries[e.N-1] = e
	}
}

// count is how many tasks are certainly in the table.
func (l *ledger) count() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if e != nil && e.fate == committed {
			n++
		}
	}
	return n
}

// all returns what was tried. A number whose producer was stopped before it knew anything is left out.
func (l *ledger) all() map[int64]*entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make(map[int64]*entry, len(l.entries))
	for _, e := range l.entries {
		if e != nil {
			all[e.N] = e
		}
	}
	return all
}

// A producer is a service: it writes tasks in its transactions, some of which come to nothing.
type producer struct {
	pool   *pgxpool.Pool
	ledger *ledger
	rand   *rand.Rand
	lease  time.Duration
	every  time.Duration // mean time between two transactions
	full   *atomic.Bool  // too much is open: wait
}

func (p *producer) run(ctx context.Context) {
	for {
		wait := time.Duration((0.5 + p.rand.Float64()) * float64(p.every))
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		if !p.full.Load() {
			p.transaction(ctx)
		}
	}
}

var errOnPurpose = errors.New("rolled back on purpose")

// transaction writes one to four tasks by one of the entrances, and commits, rolls back, or rolls back a part.
func (p *producer) transaction(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	whole, part := p.draw(1+p.rand.IntN(4)), []*entry(nil)
	ending := p.rand.IntN(100)
	switch {
	case ending < 12:
		abandon(whole)
	case ending < 20:
		part = p.draw(1 + p.rand.IntN(2))
		abandon(part)
	}
	asked := false
	err := func() error {
		tx, err := p.pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
		if err := p.write(ctx, tx, whole); err != nil {
			return err
		}
		if len(part) > 0 {
			savepoint, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if err := p.write(ctx, savepoint, part); err != nil {
				return err
			}
			if err := savepoint.Rollback(ctx); err != nil {
				return err
			}
		}
		if ending < 12 {
			return errOnPurpose
		}
		asked = true
		return tx.Commit(ctx)
	}()
	p.ledger.note(rolledBack, part)
	switch {
	case err == nil:
		p.ledger.note(committed, whole)
	case asked && !errors.Is(err, pgx.ErrTxCommitRollback):
		p.ledger.note(unknown, whole)
	default:
		p.ledger.note(rolledBack, whole)
	}
}

func (p *producer) draw(n int) []*entry {
	entries := make([]*entry, n)
	for i := range entries {
		s := newScript(p.rand, p.ledger.next(), p.lease)
		entries[i] = &entry{script: s, body: s.payload()}
	}
	return entries
}

// abandon marks tasks whose transaction will be rolled back: the target knows them by their payload.
func abandon(entries []*entry) {
	for _, e := range entries {
		e.Rollback = true
		e.body = e.payload()
	}
}

// write uses the Go API, one by one or many at once, or an INSERT as any language would.
func (p *producer) write(ctx context.Context, tx pgx.Tx, entries []*entry) error {
	switch p.rand.IntN(3) {
	case 0:
		for _, e := range entries {
			if _, err := outbox.Enqueue(ctx, tx, e.bizType, e.body, e.options()...); err != nil {
				return err
			}
		}
		return nil
	case 1:
		many := make([]outbox.NewTask, len(entries))
		for i, e := range entries {
			many[i] = outbox.NewTask{BizType: e.bizType, Payload: e.body, Options: e.options()}
		}
		_, err := outbox.EnqueueMany(ctx, tx, many)
		return err
	}
	for _, e := range entries {
		priority, limit := outbox.PriorityLow, any(nil)
		if e.high {
			priority = outbox.PriorityHigh
		}
		if e.maxAttempts > 0 {
			limit = e.maxAttempts
		}
		if _, err := tx.Exec(ctx, `INSERT INTO taskrelay.task (biz_type, biz_id, payload, priority, max_attempts, run_at)
			VALUES ($1, $2, $3::text::json, $4, $5, CASE WHEN $6 > 0 THEN now() + $6 * interval '1 millisecond' END)`,
			e.bizType, strconv.FormatInt(e.N, 10), e.body, priority, limit, e.in.Milliseconds()); err != nil {
			return err
		}
	}
	return nil
}

func (e *entry) options() []outbox.Option {
	options := []outbox.Option{outbox.BizID(strconv.FormatInt(e.N, 10)), outbox.Low()}
	if e.high {
		options[1] = outbox.High()
	}
	if e.maxAttempts > 0 {
		options = append(options, outbox.MaxAttempts(e.maxAttempts))
	}
	if e.in > 0 {
		options = append(options, outbox.In(e.in))
	}
	return options
}
