package tests

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// BenchmarkEnqueue is one transaction with one task each (many: 1,000 tasks), beside what it is measured against:
// go test ./tests -run NONE -bench Enqueue
func BenchmarkEnqueue(b *testing.B) {
	db := testenv.DB(b)
	const payload = `{"order_id":"O-123456","amount":"99.90","channel":"card"}`
	n := 0
	for _, c := range []struct {
		name  string
		tasks int
		do    func(tx pgx.Tx) error
	}{
		{"empty transaction", 1, func(tx pgx.Tx) error {
			_, err := tx.Exec(b.Context(), "SELECT 1")
			return err
		}},
		{"plain INSERT", 1, func(tx pgx.Tx) error {
			_, err := tx.Exec(b.Context(), "INSERT INTO taskrelay.task (biz_type, biz_id, payload) VALUES ($1, $2, $3)", "PLAIN", fmt.Sprint(n), payload)
			return err
		}},
		{"Enqueue", 1, func(tx pgx.Tx) error {
			_, err := outbox.Enqueue(b.Context(), tx, "GO", payload, outbox.BizID(fmt.Sprint(n)))
			return err
		}},
		{"Enqueue, duplicate", 1, func(tx pgx.Tx) error {
			_, err := outbox.Enqueue(b.Context(), tx, "GO", payload, outbox.BizID("1"))
			return err
		}},
		{"EnqueueMany", 1000, func(tx pgx.Tx) error {
			tasks := make([]outbox.NewTask, 1000)
			for i := range tasks {
				tasks[i] = outbox.NewTask{BizType: "MANY", Payload: payload, Options: []outbox.Option{outbox.BizID(fmt.Sprint(n, "-", i))}}
			}
			_, err := outbox.EnqueueMany(b.Context(), tx, tasks)
			return err
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				n++
				if err := pgx.BeginFunc(b.Context(), db.Pool, c.do); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*c.tasks), "µs/task")
		})
	}
}
