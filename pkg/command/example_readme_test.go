package command_test

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// What the README shows. A command holds what it needs: here a client of the bank.
func Example_readme() {
	type Payment struct {
		OrderID string `json:"order_id"`
		Amount  string `json:"amount"`
	}
	errCardBlocked := errors.New("card is blocked")
	newPay := func(bank BankClient) command.Command[Payment] {
		return command.Command[Payment]{
			Execute: func(ctx context.Context, t *command.Task[Payment]) (any, error) {
				receipt, err := bank.Pay(ctx, t.Key(), t.Payload.Amount) // the same key for every attempt
				if errors.Is(err, errCardBlocked) {
					return nil, retry.Permanent(err)
				}
				return receipt, err // the receipt is kept in the row, an error is tried again
			},
			Compensate: func(ctx context.Context, t *command.Task[Payment], cause error) error {
				return bank.Refund(ctx, t.Key(), t.Payload.OrderID, cause.Error())
			},
			Retry:       retry.Exponential{Base: 2 * time.Second, Max: 10 * time.Minute, Jitter: 0.2},
			MaxAttempts: 8,
			Timeout:     20 * time.Second,
		}
	}
	runWorker := func(ctx context.Context, pool *pgxpool.Pool, nc *nats.Conn, bank BankClient, log zerolog.Logger) error {
		var reg command.Registry
		if err := command.Register(&reg, "ORDER_PAYMENT", newPay(bank)); err != nil {
			return err
		}
		worker, err := command.NewWorker(pool, nc, &reg, command.WorkerConfig{Logger: log})
		if err != nil {
			return err
		}
		return worker.Run(ctx) // until ctx ends; what runs then is finished first
	}
	_ = runWorker
}

// A second type is one more call of Register.
func Example_secondType() {
	type User struct {
		Email string `json:"email"`
	}
	add := func(reg *command.Registry, mail MailClient) error {
		return command.Register(reg, "USER_REGISTER", command.Command[User]{
			Execute: func(ctx context.Context, t *command.Task[User]) (any, error) {
				return nil, mail.Send(ctx, t.Key(), t.Payload.Email, "Welcome")
			},
		})
	}
	_ = add
}

// BankClient and MailClient stand for clients of other systems.
type BankClient interface {
	Pay(ctx context.Context, key, amount string) (receipt string, err error)
	Refund(ctx context.Context, key, orderID, cause string) error
}

type MailClient interface {
	Send(ctx context.Context, key, to, text string) error
}
