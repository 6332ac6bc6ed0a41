package demo

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// The business types of the demo.
const (
	orderPayment = "ORDER_PAYMENT"
	refundCard   = "REFUND_CARD"
	refundWallet = "REFUND_WALLET"
	refundBank   = "REFUND_BANK"
	accountOpen  = "ACCOUNT_OPEN"
)

// nakMax is the longest delay that a worker of the demo leaves to JetStream. It is short so that both roads of a
// retry are taken: most go by nak, those of bank transfers and the later ones of accounts through the table.
const nakMax = 2 * time.Second

// payment is the payload of ORDER_PAYMENT.
type payment struct {
	OrderID     int64  `json:"order_id"`
	Customer    string `json:"customer"`
	Items       int64  `json:"items"`
	AmountCents int64  `json:"amount_cents"`
}

// refund is the payload of the three REFUND types.
type refund struct {
	RefundID    int64  `json:"refund_id"`
	OrderID     int64  `json:"order_id"`
	Customer    string `json:"customer"`
	AmountCents int64  `json:"amount_cents"`
}

// account is the payload of ACCOUNT_OPEN.
type account struct {
	AccountID int64  `json:"account_id"`
	Customer  string `json:"customer"`
}

// shop holds what the commands need.
type shop struct {
	pool  *pgxpool.Pool
	world *world
	calls calls
}

// register makes the shop's commands known to a worker.
func (s *shop) register(r *command.Registry) error {
	short := retry.Exponential{Base: 300 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.2}
	return errors.Join(
		command.Register(r, orderPayment, command.Command[payment]{
			Execute:     counted(&s.calls, s.pay),
			Retry:       short,
			MaxAttempts: 5,
			Timeout:     5 * time.Second,
			Concurrency: 10,
			Title:       "Take the payment of an order",
			RunbookURL:  "https://runbooks.example.com/order-payment",
		}),
		command.Register(r, refundCard, command.Command[refund]{
			Execute:     counted(&s.calls, s.refundBy(s.world.card)),
			Retry:       short,
			MaxAttempts: 5,
			Timeout:     5 * time.Second,
			Concurrency: 10,
			Title:       "Refund to a card",
			RunbookURL:  "https://runbooks.example.com/refund-card",
		}),
		command.Register(r, refundWallet, command.Command[refund]{
			Execute:     counted(&s.calls, s.refundBy(s.world.wallet)),
			Retry:       retry.Exponential{Base: 300 * time.Millisecond, Max: 1500 * time.Millisecond, Jitter: 0.2},
			MaxAttempts: 10,
			Timeout:     5 * time.Second,
			Concurrency: 10,
			Title:       "Refund to a wallet",
		}),
		command.Register(r, refundBank, command.Command[refund]{
			Execute:     counted(&s.calls, s.refundBy(s.world.transfer)),
			Retry:       retry.Fixed{Base: 2500 * time.Millisecond},
			MaxAttempts: 8,
			Timeout:     1500 * time.Millisecond,
			Concurrency: 10,
			Title:       "Refund by bank transfer",
		}),
		command.Register(r, accountOpen, command.Command[account]{
			Execute:     counted(&s.calls, s.openAccount),
			Compensate:  countedCompensation(&s.calls, s.cancelAccount),
			Retry:       short,
			MaxAttempts: 5,
			Timeout:     5 * time.Second,
			Concurrency: 10,
			Title:       "Open an account at the bank",
			RunbookURL:  "https://runbooks.example.com/account-open",
		}),
	)
}

// pay captures the money and notes the receipt. Running it again changes nothing: the gateway knows the key, and the
// UPDATE writes the same receipt.
func (s *shop) pay(ctx context.Context, t *command.Task[payment]) (any, error) {
	p := t.Payload
	perItem := p.AmountCents / p.Items // the bug: an order without items
	receipt, err := s.world.gateway.ask(ctx, "capture", t.Key(), order{"O-" + strconv.FormatInt(p.OrderID, 10), p.Customer, p.AmountCents})
	if err != nil {
		return nil, classify(err)
	}
	_, err = s.pool.Exec(ctx, `UPDATE demo.orders SET receipt = $2 WHERE id = $1`, p.OrderID, receipt)
	return map[string]any{"receipt": receipt, "cents_per_item": perItem}, err
}

// refundBy pays back through a channel. The order's sum must grow once, so the same transaction completes the task:
// either both are committed or neither, and a worker that comes too late rolls both back.
func (s *shop) refundBy(channel *service) func(context.Context, *command.Task[refund]) (any, error) {
	return func(ctx context.Context, t *command.Task[refund]) (any, error) {
		p := t.Payload
		reference, err := channel.ask(ctx, "refund", t.Key(), order{"R-" + strconv.FormatInt(p.RefundID, 10), p.Customer, p.AmountCents})
		if err != nil {
			return nil, classify(err)
		}
		return nil, pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE demo.refunds SET reference = $2 WHERE id = $1`, p.RefundID, reference); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `UPDATE demo.orders SET refunded_cents = refunded_cents + $2 WHERE id = $1`, p.OrderID, p.AmountCents); err != nil {
				return err
			}
			return command.Complete(ctx, tx, t)
		})
	}
}

func (s *shop) openAccount(ctx context.Context, t *command.Task[account]) (any, error) {
	p := t.Payload
	iban, err := s.world.bank.ask(ctx, "open", t.Key(), order{"A-" + strconv.FormatInt(p.AccountID, 10), p.Customer, 0})
	var answer *statusError
	if errors.As(err, &answer) && answer.status == http.StatusGone {
		if _, err := s.pool.Exec(ctx, `UPDATE demo.accounts SET status = 'withdrawn' WHERE id = $1`, p.AccountID); err != nil {
			return nil, err
		}
		return nil, command.Cancel(err)
	}
	if err != nil {
		return nil, classify(err)
	}
	_, err = s.pool.Exec(ctx, `UPDATE demo.accounts SET status = 'open', iban = $2 WHERE id = $1`, p.AccountID, iban)
	return map[string]string{"iban": iban}, err
}

// cancelAccount undoes an opening that did not succeed. The bank may have the account in its books all the same:
// an answer that never came says nothing.
func (s *shop) cancelAccount(ctx context.Context, t *command.Task[account], cause error) error {
	p := t.Payload
	if _, err := s.world.bank.ask(ctx, "cancel", t.Key(), order{"A-" + strconv.FormatInt(p.AccountID, 10), p.Customer, 0}); err != nil {
		return classify(err)
	}
	_, err := s.pool.Exec(ctx, `UPDATE demo.accounts SET status = 'cancelled' WHERE id = $1`, p.AccountID)
	return err
}

// classify makes an answer that will not change permanent; everything else is worth another attempt.
func classify(err error) error {
	var answer *statusError
	if errors.As(err, &answer) && answer.status >= 400 && answer.status < 500 {
		return retry.Permanent(err)
	}
	return err
}

// calls counts how often a handler was entered, per task and phase, to be compared with the attempt log.
type calls struct {
	mu sync.Mutex
	n  map[callKey]int
}

type callKey struct {
	task  int64
	phase string
}

func (c *calls) add(task int64, phase string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[callKey]int{}
	}
	c.n[callKey{task, phase}]++
}

func (c *calls) snapshot() map[callKey]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := make(map[callKey]int, len(c.n))
	for k, v := range c.n {
		n[k] = v
	}
	return n
}

func counted[P any](c *calls, f func(context.Context, *command.Task[P]) (any, error)) func(context.Context, *command.Task[P]) (any, error) {
	return func(ctx context.Context, t *command.Task[P]) (any, error) {
		c.add(t.ID, t.Phase)
		return f(ctx, t)
	}
}

func countedCompensation[P any](c *calls, f func(context.Context, *command.Task[P], error) error) func(context.Context, *command.Task[P], error) error {
	return func(ctx context.Context, t *command.Task[P], cause error) error {
		c.add(t.ID, t.Phase)
		return f(ctx, t, cause)
	}
}
