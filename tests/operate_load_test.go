//go:build load

package tests

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// C-122, issue 5: 50,000 dead tasks are requeued in bulk while normal traffic of the same type and lane runs, and its p95
// from commit to start stays under twice what it was. By Postgres's clock: make load-bulk.
func TestBulkLeavesNormalTrafficItsLatency(t *testing.T) {
	n, rate, calm := number(t, "TASKS", 50_000), number(t, "RATE", 500), number(t, "CALM", 30)
	e := testenv.New(t)
	e.StartRelay()
	e.StartWorker("TASKRELAY_BIZ_TYPES=ORDER_PAYMENT", "TASKRELAY_BIZ_ORDER_PAYMENT_TARGET=noop:")
	deadTasks(t, e.Database, "ORDER_PAYMENT", n)
	e.Exec(t, `VACUUM ANALYZE taskrelay.task`)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.worker WHERE 'ORDER_PAYMENT' = ANY (biz_types)`)

	ctx, stop := context.WithCancel(t.Context())
	produced := make(chan error, 1)
	go func() { // 100 a second, each in a transaction of its own
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				produced <- nil
				return
			case <-tick.C:
				if _, err := e.Pool.Exec(context.WithoutCancel(ctx), `INSERT INTO taskrelay.task (biz_type, payload) VALUES ('ORDER_PAYMENT', '{"normal": true}')`); err != nil {
					produced <- err
					return
				}
			}
		}
	}()
	p95 := func(what, from, to string) float64 {
		var count int64
		var p50, p95, worst float64
		e.Scan(t, `SELECT count(*), percentile_cont(0.5) WITHIN GROUP (ORDER BY ms), percentile_cont(0.95) WITHIN GROUP (ORDER BY ms), max(ms)
			FROM (SELECT extract(epoch FROM t.first_started_at - t.created_at)::float8 * 1000 AS ms FROM taskrelay.task AS t
			      WHERE t.biz_id IS NULL AND t.created_at BETWEEN $1::timestamptz AND $2::timestamptz) AS x`, []any{from, to}, &count, &p50, &p95, &worst)
		t.Logf("%-12s %6d normal tasks, commit to start: p50 %.1f ms, p95 %.1f ms, worst %.1f ms", what, count, p50, p95, worst)
		return p95
	}
	const now = `SELECT clock_timestamp()::text`
	warm := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id IS NULL`)
	e.WaitCount(t, soon, 1, `SELECT (count(*) > $1)::int FROM taskrelay.task WHERE biz_id IS NULL AND status = 'succeeded'`, warm+200)
	from := e.Text(t, now)
	e.WaitCount(t, time.Duration(calm)*10*time.Second, 1, `SELECT (clock_timestamp() > $1::timestamptz + $2 * interval '1 second')::int`, from, calm)
	start := e.Text(t, now)
	began := time.Now()
	_, err := outbox.StartBulk(t.Context(), e.Pool, "requeue", outbox.BulkFilter{BizType: "ORDER_PAYMENT"}, "bank is back", outbox.BulkOptions{Rate: float64(rate)})
	noError(t, "start", err)
	e.WaitCount(t, 15*time.Minute, 1, `SELECT count(*) FROM taskrelay.bulk WHERE state = 'done'`)
	t.Logf("bulk: %s in %v, at most %d a second", e.Text(t, `SELECT concat_ws(' ', changed, 'changed,', skipped, 'skipped') FROM taskrelay.bulk`), time.Since(began).Round(100*time.Millisecond), rate)
	end := e.Text(t, now)
	stop()
	noError(t, "produce", <-produced)
	e.WaitCount(t, 2*time.Minute, 0, `SELECT count(*) FROM taskrelay.task WHERE status <> 'succeeded'`)
	equal(t, "tasks requeued", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id IS NOT NULL AND generation = 1`), int64(n))
	before, during := p95("before", from, start), p95("during", start, end)
	if ratio := during / before; ratio >= 2 {
		t.Errorf("p95 of normal traffic is %.2f times what it was, want less than 2", ratio)
	} else {
		t.Logf("p95 %.2f times what it was", ratio)
	}
}

func number(t *testing.T, name string, byDefault int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return byDefault
	}
	n, err := strconv.Atoi(text)
	noError(t, fmt.Sprintf("%s=%s", name, text), err)
	return n
}
