package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// errChangedMind rolls a transaction back on purpose.
var errChangedMind = errors.New("the customer changed their mind")

// made is one task as the business remembers it.
type made struct {
	id      int64
	bizType string
	bizID   string
	cents   int64
}

// producer is the service that writes business rows and tasks together.
type producer struct {
	pool   *pgxpool.Pool
	schema outbox.Schema
	world  *world
	rand   *rand.Rand

	orders []paidOrder // that something can be refunded of

	mu         sync.Mutex
	committed  []made
	rolledBack []made
	duplicates int
	problems   []string
	done       bool
}

type paidOrder struct{ id, left int64 }

// produced is what the producer has done so far.
type produced struct {
	committed, rolledBack []made
	duplicates            int
	problems              []string
	done                  bool
}

func (p *producer) state() produced {
	p.mu.Lock()
	defer p.mu.Unlock()
	return produced{p.committed, p.rolledBack, p.duplicates, p.problems, p.done}
}

// run writes n tasks evenly over d. The bank goes down on the way and comes back.
func (p *producer) run(ctx context.Context, n int, d time.Duration) error {
	defer func() {
		p.world.bankDown.Store(false)
		p.mu.Lock()
		p.done = true
		p.mu.Unlock()
	}()
	tick := time.NewTicker(d / time.Duration(n))
	defer tick.Stop()
	for i := range n {
		switch i {
		case n * 30 / 100:
			p.world.bankDown.Store(true)
		case n * 57 / 100:
			p.world.bankDown.Store(false)
		}
		if err := p.event(ctx, i*100/n, i > 0 && i*100/n != (i-1)*100/n); err != nil {
			return fmt.Errorf("write business and task: %w", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// event is one thing that happens in the shop. A few are bound to go wrong, at fixed percents of the run; the rest
// is chance.
func (p *producer) event(ctx context.Context, percent int, first bool) error {
	if first {
		switch percent {
		case 8, 60:
			return p.badPayload(ctx)
		case 12:
			return p.order(ctx, noItems, 0)
		case 18, 55, 80:
			if len(p.orders) > 0 {
				return p.refund(ctx, refundCard, closedCard)
			}
		case 24, 75:
			return p.account(ctx, withdrawn)
		case 28:
			return p.account(ctx, frozen)
		}
	}
	switch x := p.rand.Float64(); {
	case x < 0.5 || len(p.orders) == 0:
		return p.order(ctx, p.customer(), 1+p.rand.Int64N(5))
	case x < 0.77:
		return p.refund(ctx, []string{refundCard, refundWallet, refundBank}[p.rand.IntN(3)], p.customer())
	default:
		return p.account(ctx, p.customer())
	}
}

var names = []string{"Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Joy"}

func (p *producer) customer() string { return names[p.rand.IntN(len(names))] }

// order: paid at the counter, to be captured at the gateway. Every tenth is urgent.
func (p *producer) order(ctx context.Context, customer string, items int64) error {
	cents := 500 + p.rand.Int64N(20_000)
	var id int64
	err := p.write(ctx, orderPayment, customer, cents, func(tx pgx.Tx) (string, any, []outbox.Option, error) {
		err := tx.QueryRow(ctx, `INSERT INTO demo.orders (customer, amount_cents) VALUES ($1, $2) RETURNING id`, customer, cents).Scan(&id)
		opts := []outbox.Option{outbox.Header("tenant", "shop-1")}
		if p.rand.IntN(10) == 0 {
			opts = append(opts, outbox.High())
		}
		if items == 0 {
			opts = append(opts, outbox.MaxAttempts(3))
		}
		return "O-" + strconv.FormatInt(id, 10), payment{id, customer, items, cents}, opts, err
	})
	if err == nil && items > 0 {
		p.orders = append(p.orders, paidOrder{id, cents})
	}
	return ignoreRollback(err)
}

// refund pays a part of an order back, some of them after a while.
func (p *producer) refund(ctx context.Context, bizType, customer string) error {
	o := &p.orders[p.rand.IntN(len(p.orders))]
	cents := min(o.left, 100+p.rand.Int64N(400))
	if cents <= 0 {
		return p.order(ctx, customer, 1)
	}
	err := p.write(ctx, bizType, customer, cents, func(tx pgx.Tx) (string, any, []outbox.Option, error) {
		var id int64
		err := tx.QueryRow(ctx, `INSERT INTO demo.refunds (order_id, channel, amount_cents) VALUES ($1, $2, $3) RETURNING id`,
			o.id, bizType, cents).Scan(&id)
		var opts []outbox.Option
		if p.rand.IntN(4) == 0 {
			opts = append(opts, outbox.In(time.Duration(1+p.rand.IntN(3))*time.Second))
		}
		return "R-" + strconv.FormatInt(id, 10), refund{id, o.id, customer, cents}, opts, err
	})
	if err == nil {
		o.left -= cents
	}
	return ignoreRollback(err)
}

func (p *producer) account(ctx context.Context, customer string) error {
	return ignoreRollback(p.write(ctx, accountOpen, customer, 0, func(tx pgx.Tx) (string, any, []outbox.Option, error) {
		var id int64
		err := tx.QueryRow(ctx, `INSERT INTO demo.accounts (customer) VALUES ($1) RETURNING id`, customer).Scan(&id)
		return "A-" + strconv.FormatInt(id, 10), account{id, customer}, nil, err
	}))
}

// write runs one business transaction: rows writes the business's own rows and says which task belongs to them.
// Some transactions are rolled back after all was written, and then there must be no task; some tasks are sent once
// more, as a double click would, and then there must be one.
func (p *producer) write(ctx context.Context, bizType, customer string, cents int64, rows func(pgx.Tx) (bizID string, payload any, opts []outbox.Option, err error)) error {
	var (
		m       made
		payload any
		opts    []outbox.Option
	)
	// Those that are meant to go wrong must not vanish by a rollback.
	rollBack := p.rand.IntN(12) == 0 && !strings.Contains(customer, "(")
	err := pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) (err error) {
		var bizID string
		if bizID, payload, opts, err = rows(tx); err != nil {
			return err
		}
		opts = append(opts, outbox.BizID(bizID))
		ref, err := p.schema.Enqueue(ctx, tx, bizType, payload, opts...)
		if err != nil {
			return err
		}
		m = made{ref.ID, bizType, bizID, cents}
		if rollBack {
			return errChangedMind
		}
		return nil
	})
	switch {
	case errors.Is(err, errChangedMind):
		p.mu.Lock()
		p.rolledBack = append(p.rolledBack, m)
		p.mu.Unlock()
		return err
	case err != nil:
		return err
	}
	p.mu.Lock()
	p.committed = append(p.committed, m)
	p.mu.Unlock()
	if p.rand.IntN(20) == 0 {
		return p.again(ctx, m, payload, opts)
	}
	return nil
}

// again sends a task a second time. The business id makes it the same task.
func (p *producer) again(ctx context.Context, m made, payload any, opts []outbox.Option) error {
	return pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error {
		ref, err := p.schema.Enqueue(ctx, tx, m.bizType, payload, opts...)
		if err != nil {
			return err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.duplicates++
		if ref.New || ref.ID != m.id {
			p.problems = append(p.problems, fmt.Sprintf("%s %s became two tasks, %d and %d", m.bizType, m.bizID, m.id, ref.ID))
		}
		return nil
	})
}

// badPayload comes from another team, by plain SQL, with a payload that does not fit.
func (p *producer) badPayload(ctx context.Context) error {
	m := made{bizType: orderPayment, bizID: "legacy-" + strconv.FormatInt(time.Now().UnixMicro(), 10)}
	err := p.pool.QueryRow(ctx, p.schema.Render(`INSERT INTO {{schema}}.task (biz_type, biz_id, payload)
		VALUES ($1, $2, '{"order_id": "not a number", "amount": "a lot"}') RETURNING id`), m.bizType, m.bizID).Scan(&m.id)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.committed = append(p.committed, m)
	p.mu.Unlock()
	return nil
}

func ignoreRollback(err error) error {
	if errors.Is(err, errChangedMind) {
		return nil
	}
	return err
}
