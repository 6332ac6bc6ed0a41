package command_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

type Payment struct {
	Order  string `json:"order"`
	Amount int64  `json:"amount"` // cents
}

var errDeclined = errors.New("card declined")

type bank struct{}

func (bank) charge(_ context.Context, key string, p Payment) (receipt string, err error) {
	return "receipt for " + p.Order, nil
}

func (bank) refund(context.Context, string, Payment) error { return nil }

// A command: what to do for the tasks of one type, and how to undo it.
func ExampleRegister() {
	var b bank
	var reg command.Registry
	err := command.Register(&reg, "ORDER_PAYMENT", command.Command[Payment]{
		Execute: func(ctx context.Context, t *command.Task[Payment]) (any, error) {
			receipt, err := b.charge(ctx, t.Key(), t.Payload) // the same key for every attempt
			if errors.Is(err, errDeclined) {
				return nil, retry.Permanent(err)
			}
			return map[string]string{"receipt": receipt}, err
		},
		Compensate: func(ctx context.Context, t *command.Task[Payment], cause error) error {
			return b.refund(ctx, t.Key(), t.Payload)
		},
		Retry:       retry.Exponential{Base: 5 * time.Second, Max: time.Hour, Jitter: 0.2},
		MaxAttempts: 6,
		Timeout:     20 * time.Second,
		Concurrency: 50,
	})
	fmt.Println(reg.BizTypes(), err)
	// Output: [ORDER_PAYMENT] <nil>
}

// A worker: runs the registered commands until ctx is cancelled.
func ExampleNewWorker() {
	run := func(ctx context.Context, pool *pgxpool.Pool, nc *nats.Conn, reg *command.Registry) error {
		w, err := command.NewWorker(pool, nc, reg, command.WorkerConfig{Concurrency: 50})
		if err != nil {
			return err
		}
		return w.Run(ctx)
	}
	_ = run
}

// Complete: the business rows and the end of the task commit together.
func ExampleComplete() {
	open := func(pool *pgxpool.Pool) command.Command[Payment] {
		return command.Command[Payment]{
			Execute: func(ctx context.Context, t *command.Task[Payment]) (any, error) {
				return nil, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, "INSERT INTO paid_order (id, amount) VALUES ($1, $2)", t.Payload.Order, t.Payload.Amount)
					if err != nil {
						return err
					}
					return command.Complete(ctx, tx, t)
				})
			},
		}
	}
	_ = open
}

// The outcomes a handler can choose besides success and an error that is retried.
func ExampleSnooze() {
	settleDay := func(_ context.Context, t *command.Task[Payment]) (any, error) {
		switch {
		case time.Now().Hour() < 9: // the bank is not open yet: no attempt is used up
			return nil, command.Snooze(15 * time.Minute)
		case t.Payload.Amount == 0: // nothing to do for anybody
			return nil, command.Cancel(errors.New("order was withdrawn"))
		case t.Payload.Amount < 0: // will never work
			return nil, retry.Permanent(errors.New("negative amount"))
		}
		return nil, retry.After(time.Minute, errors.New("bank asks to come back")) // an attempt is used up
	}
	_ = settleDay
}
