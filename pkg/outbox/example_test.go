package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

type payment struct {
	OrderID string `json:"order_id"`
	Amount  string `json:"amount"` // money is text: a float would round it
}

// The order and its task are committed together, or neither is.
func ExampleEnqueue() {
	payOrder := func(ctx context.Context, pool *pgxpool.Pool, p payment) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO orders (id, amount) VALUES ($1, $2)", p.OrderID, p.Amount); err != nil {
				return err
			}
			_, err := outbox.Enqueue(ctx, tx, "ORDER_PAYMENT", p, outbox.BizID(p.OrderID))
			return err
		})
	}
	_ = payOrder
}

// The same with database/sql. GORM, sqlx and bun work on a *sql.Tx too.
func ExampleEnqueueSQL() {
	payOrder := func(ctx context.Context, db *sql.DB, p payment) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "INSERT INTO orders (id, amount) VALUES ($1, $2)", p.OrderID, p.Amount); err != nil {
			return err
		}
		ref, err := outbox.EnqueueSQL(ctx, tx, "ORDER_PAYMENT", p, outbox.BizID(p.OrderID), outbox.High())
		if err != nil {
			return err
		}
		if !ref.New {
			return fmt.Errorf("order %s is being paid already, by task %d", p.OrderID, ref.ID)
		}
		return tx.Commit()
	}
	_ = payOrder
}

// A service in any language inserts a row. Use an INSERT as it is here, or
// SELECT * FROM taskrelay.enqueue('ORDER_PAYMENT', '{"amount": "9.90"}', 'O-1'),
// which returns the id and whether the task is new.
func Example_plainSQL() {
	payOrder := func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `
			INSERT INTO taskrelay.task (biz_type, biz_id, payload)
			VALUES ('ORDER_PAYMENT', 'O-1', '{"order_id": "O-1", "amount": "9.90"}')
			ON CONFLICT (biz_type, biz_id) DO NOTHING`)
		return err
	}
	_ = payOrder
}

// A task for later: the delay is counted by Postgres's clock.
func ExampleIn() {
	remind := func(ctx context.Context, tx pgx.Tx, orderID string) error {
		_, err := outbox.Enqueue(ctx, tx, "PAYMENT_REMINDER", map[string]string{"order_id": orderID},
			outbox.In(24*time.Hour), outbox.MaxAttempts(3))
		return err
	}
	_ = remind
}

func ExampleEnqueueMany() {
	refund := func(ctx context.Context, tx pgx.Tx, orderIDs []string) (fresh int, err error) {
		tasks := make([]outbox.NewTask, len(orderIDs))
		for i, id := range orderIDs {
			tasks[i] = outbox.NewTask{
				BizType: "REFUND",
				Payload: map[string]string{"order_id": id},
				Options: []outbox.Option{outbox.BizID(id)},
			}
		}
		refs, err := outbox.EnqueueMany(ctx, tx, tasks)
		for _, ref := range refs {
			if ref.New {
				fresh++
			}
		}
		return fresh, err
	}
	_ = refund
}

// A duplicate says only that the task exists. Whether it still does something is
// in its row.
func ExampleGet() {
	state := func(ctx context.Context, pool *pgxpool.Pool, id int64) (string, error) {
		task, err := outbox.Get(ctx, pool, id)
		if errors.Is(err, outbox.ErrNotFound) {
			return "purged", nil
		}
		return task.Status, err
	}
	_ = state
}

// The service commits, then waits for what the command has returned.
func ExampleAwait() {
	open := func(ctx context.Context, pool *pgxpool.Pool) (result []byte, err error) {
		var ref outbox.Ref
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			ref, err = outbox.Enqueue(ctx, tx, "OPEN_ACCOUNT", `{"customer": 4711}`, outbox.High(), outbox.BizID("C-4711"))
			return err
		})
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		task, err := outbox.Await(ctx, pool, ref.ID)
		if errors.Is(err, context.DeadlineExceeded) {
			return nil, errors.New("we are at it, and will tell you") // the task lives on
		}
		if err == nil && task.Status != "succeeded" {
			err = fmt.Errorf("account not opened: %s", task.LastError)
		}
		return task.Result, err
	}
	_ = open
}

// Read page by page, the newest first.
func ExampleList() {
	printDead := func(ctx context.Context, pool *pgxpool.Pool) error {
		f := outbox.Filter{Status: "dead", Limit: 100}
		for {
			tasks, err := outbox.List(ctx, pool, f)
			if err != nil || len(tasks) == 0 {
				return err
			}
			for _, t := range tasks {
				fmt.Println(t.ID, t.BizType, t.BizID, t.DeadReason, t.LastError)
			}
			f.Before = tasks[len(tasks)-1].ID
		}
	}
	_ = printDead
}

func ExampleSchema() {
	eu := outbox.Schema("taskrelay_eu")
	refund := func(ctx context.Context, tx pgx.Tx) error {
		_, err := eu.Enqueue(ctx, tx, "REFUND", `{"order_id": "O-1"}`)
		return err
	}
	_ = refund
	fmt.Println(eu.Validate(), outbox.Schema("EU").Validate())
	// Output: <nil> schema name "EU": want a small letter or _, then at most 40 of a-z, 0-9 and _ (for example "taskrelay")
}
