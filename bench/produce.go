package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// producers is how many business transactions run at once.
const producers = 8

// business runs one business transaction: an order, and with it a task, if enqueue is not nil.
func business(ctx context.Context, pool *pgxpool.Pool, enqueue enqueuer, n int) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO orders (customer, amount) VALUES ($1, $2)", "customer-12345", 99.90)
		if err != nil || enqueue == nil {
			return err
		}
		return enqueue(ctx, tx, n)
	})
}

// produce runs business transactions on all producers until next says that there are no more, and returns the first
// error. after, if any, is called when transaction n has committed.
func produce(ctx context.Context, pool *pgxpool.Pool, enqueue enqueuer, next func() (n int, ok bool), after func(n int)) error {
	errs := make([]error, producers)
	var wg sync.WaitGroup
	for i := range producers {
		wg.Go(func() {
			for ctx.Err() == nil {
				n, ok := next()
				if !ok {
					return
				}
				if errs[i] = business(ctx, pool, enqueue, n); errs[i] != nil {
					return
				}
				if after != nil {
					after(n)
				}
			}
			errs[i] = ctx.Err()
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// ticks hands out 0 to n-1, each at its time, as customers arrive: whether or not the others have been served.
func ticks(n int, rate float64) func() (int, bool) {
	var k atomic.Int64
	began := time.Now()
	return func() (int, bool) {
		i := int(k.Add(1)) - 1
		if i >= n {
			return 0, false
		}
		time.Sleep(time.Until(began.Add(time.Duration(float64(i) / rate * float64(time.Second)))))
		return i, true
	}
}

// freely hands out numbers from 0 until the time is over, at most limit.
func freely(window time.Duration, limit int) func() (int, bool) {
	var k atomic.Int64
	ends := time.Now().Add(window)
	return func() (int, bool) {
		if !time.Now().Before(ends) {
			return 0, false
		}
		i := int(k.Add(1)) - 1
		return i, i < limit
	}
}

// latencies compares commits, as their producers saw them return, with the arrivals at the handler. A handler may be
// faster than the answer to COMMIT; that counts as 0. The first ones, skip, are left out.
func (p *place) latencies(ctx context.Context, skip int, commits []int64, r *row) error {
	text, err := p.handler().ask(ctx, request{Do: "arrivals"})
	if err != nil {
		return err
	}
	var arrivals []int64
	if err := json.Unmarshal(text, &arrivals); err != nil {
		return err
	}
	ms := make([]float64, 0, len(commits))
	for i, at := range commits {
		if i >= len(arrivals) || arrivals[i] == 0 {
			return fmt.Errorf("task %d of %d never reached its handler", i, len(commits))
		}
		if i >= skip {
			ms = append(ms, max(float64(arrivals[i]-at)/1e6, 0))
		}
	}
	slices.Sort(ms)
	r.P50, r.P95, r.P99 = percentile(ms, 50), percentile(ms, 95), percentile(ms, 99)
	return nil
}

// waker returns what a producer calls after its commit to wake the relay: an empty message on a connection of its own.
func (p *place) waker() (wake func(), closed func(), err error) {
	nc, err := nats.Connect(p.natsAt)
	if err != nil {
		return nil, nil, err
	}
	subject := outbox.Names{}.Wake()
	return func() { _ = nc.Publish(subject, nil) }, nc.Close, nil
}
