package outbox_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

type pagerClient struct{}

func (pagerClient) Call(_ context.Context, text string) error {
	fmt.Println(text)
	return nil
}

// A notifier is a function. Types name it in biz_type.notifier; here it is the default too.
func ExampleNotifier() {
	var pager pagerClient
	page := func(ctx context.Context, n outbox.Notice) error {
		if !n.Grave() {
			return nil // the morning is early enough
		}
		return pager.Call(ctx, fmt.Sprintf("%s: %d tasks, the first is %d", n.BizType, n.Count, n.Tasks[0].ID))
	}
	runRelay := func(ctx context.Context, pool *pgxpool.Pool, nc *nats.Conn) error {
		relay, err := outbox.NewRelay(pool, nc, outbox.RelayConfig{
			Notifiers: map[string]outbox.Notifier{"pager": page}, DefaultNotifier: "pager",
		})
		if err != nil {
			return err
		}
		return relay.Run(ctx)
	}
	_ = runRelay
	err := page(context.Background(), outbox.Notice{BizType: "ORDER_PAYMENT", Event: outbox.EventCompensationFailed, Count: 2,
		Tasks: []outbox.NoticeTask{{ID: 42}, {ID: 43}}})
	fmt.Println(err)
	// Output:
	// ORDER_PAYMENT: 2 tasks, the first is 42
	// <nil>
}

func ExampleNotice_Text() {
	at := time.Date(2026, 3, 4, 2, 13, 4, 0, time.UTC)
	n := outbox.Notice{
		BizType: "ORDER_PAYMENT", Title: "Payment of an order", RunbookURL: "https://wiki.example.com/payments",
		Event: outbox.EventDead, Count: 1, Counts: map[string]int{outbox.EventDead: 1}, From: at, To: at,
		Tasks: []outbox.NoticeTask{{ID: 42, BizID: "O-10001", Event: outbox.EventDead, Attempts: 10, Reason: "max_attempts",
			Error: "HTTP bank.example.com answered 503", Compensation: "done", At: at}},
	}
	fmt.Print(n.Text())
	// Output:
	// taskrelay: ORDER_PAYMENT task 42 (O-10001) is dead
	//
	// type:         ORDER_PAYMENT, Payment of an order
	// task:         42
	// biz id:       O-10001
	// attempts:     10
	// reason:       max_attempts
	// error:        HTTP bank.example.com answered 503
	// at:           2026-03-04 02:13:04Z
	// compensation: done, so a requeue needs --allow-compensated
	// look:         taskrelay show 42
	// requeue:      taskrelay requeue 42 --reason '…'
	// runbook:      https://wiki.example.com/payments
}
