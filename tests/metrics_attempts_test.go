package tests

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/observe"
	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// series flattens what was gathered: name{label="value",…} → value; of a histogram its count.
func series(t *testing.T, g prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return flatten(families)
}

func flatten(families []*dto.MetricFamily) map[string]float64 {
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+`="`+l.GetValue()+`"`)
			}
			key := f.GetName()
			if len(labels) > 0 {
				key += "{" + strings.Join(labels, ",") + "}"
			}
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				all[key] = m.Counter.GetValue()
			case dto.MetricType_GAUGE:
				all[key] = m.Gauge.GetValue()
			case dto.MetricType_HISTOGRAM:
				all[key] = float64(m.Histogram.GetSampleCount())
			}
		}
	}
	return all
}

// withPrefix keeps the series of one metric that are not zero.
func withPrefix(all map[string]float64, prefix string) map[string]float64 {
	kept := map[string]float64{}
	for k, v := range all {
		if strings.HasPrefix(k, prefix) && v != 0 {
			kept[k] = v
		}
	}
	return kept
}

func telemetry(t *testing.T, role string) *observe.Telemetry {
	t.Helper()
	tel, err := observe.New(t.Context(), role, "test", zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tel.Close)
	return tel
}

// C48: whatever the outcome of an attempt, the counter and the attempt log say the same.
func TestAttemptsCountedAreRowsOfTheAttemptLog(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	relayTel, workerTel := telemetry(t, "relay"), telemetry(t, "worker")

	var snoozed atomic.Bool
	var reg command.Registry
	now := retry.Fixed{Base: 10 * time.Millisecond}
	register(t, &reg, "MIXED", command.Command[struct{ Do string }]{
		Retry: now, MaxAttempts: 3, Timeout: 1500 * time.Millisecond,
		Execute: func(ctx context.Context, task *command.Task[struct{ Do string }]) (any, error) {
			switch task.Payload.Do {
			case "flaky":
				if task.Attempt < 3 {
					return nil, errFlaky
				}
			case "panic":
				panic("boom")
			case "permanent":
				return nil, retry.Permanent(errFlaky)
			case "slow":
				<-ctx.Done()
				return nil, ctx.Err()
			case "cancel":
				return nil, command.Cancel(errors.New("called off"))
			case "snooze":
				if snoozed.CompareAndSwap(false, true) {
					return nil, command.Snooze(150 * time.Millisecond)
				}
			case "stale":
				// Somebody takes the row away while the handler runs.
				if task.Generation == 0 {
					_, err := e.Pool.Exec(ctx, `UPDATE taskrelay.task SET status = 'retrying', lease_token = NULL, lease_owner = NULL,
						lease_until = NULL, generation = 1, republish_at = now() + interval '300 ms' WHERE id = $1`, task.ID)
					return nil, err
				}
			case "complete":
				tx, err := e.Pool.Begin(ctx)
				if err != nil {
					return nil, err
				}
				if err := command.Complete(ctx, tx, task); err != nil {
					return nil, err
				}
				return nil, tx.Commit(ctx)
			}
			return nil, nil
		},
		Compensate: func(context.Context, *command.Task[struct{ Do string }], error) error { return nil },
	})
	for _, do := range []string{"ok", "ok", "flaky", "panic", "permanent", "cancel", "snooze", "stale", "complete"} {
		e.Insert(t, "MIXED", "payload", `{"Do": "`+do+`"}`)
	}
	e.Insert(t, "MIXED", "payload", `{"Do": "slow"}`, "max_attempts", 1)
	// A worker died in its first attempt.
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, payload) VALUES ('MIXED', '{"Do": "ok"}')`)
	e.Exec(t, `UPDATE taskrelay.task SET status = 'running', attempt = 1, lease_owner = 'gone', lease_token = 7, started_at = now(),
		first_started_at = now(), lease_until = now() - interval '1 s', republish_at = now() WHERE id = (SELECT max(id) FROM taskrelay.task)`)

	e.RunRelay(func(c *outbox.RelayConfig) { c.MeterProvider = relayTel.Meters })
	e.RunWorker(&reg, func(c *command.WorkerConfig) { c.MeterProvider = workerTel.Meters })
	e.WaitNoneOpen(t, soon)

	var want map[string]float64
	testenv.Eventually(t, soon, func() error { // the row is written before the counter
		want = map[string]float64{}
		rows, err := e.Pool.Query(t.Context(), `SELECT biz_type, phase, outcome, count(*) FROM taskrelay.task_attempt GROUP BY 1, 2, 3`)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var bizType, phase, outcome string
			var n float64
			if err := rows.Scan(&bizType, &phase, &outcome, &n); err != nil {
				return err
			}
			want[`taskrelay_task_attempts_total{biz_type="`+bizType+`",outcome="`+outcome+`",phase="`+phase+`"}`] = n
		}
		if got := withPrefix(series(t, workerTel.Gatherer()), "taskrelay_task_attempts_total"); !maps.Equal(got, want) {
			return errorf("got %v, want %v", got, want)
		}
		return nil
	})
	for _, outcome := range []string{"succeeded", "failed", "panic", "timeout", "cancelled", "snoozed", "stale", "lost"} {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(want)), func(k string) bool { return strings.Contains(k, `outcome="`+outcome+`"`) }) {
			t.Errorf("no attempt ended %s: the test does not show what it should; it saw %v", outcome, want)
		}
	}

	worker, relay := series(t, workerTel.Gatherer()), series(t, relayTel.Gatherer())
	finished := float64(e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'"))
	for key, want := range map[string]float64{
		`taskrelay_task_end_to_end_seconds{biz_type="MIXED"}`:               finished,
		`taskrelay_tasks_dead_total{biz_type="MIXED",reason="compensated"}`: float64(e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE compensation = 'done'")),
		`taskrelay_worker_lost_leases_total`:                                1,
		`taskrelay_writeback_total{result="stale"}`:                         1,
		`taskrelay_worker_slots{biz_type="MIXED",state="busy"}`:             0,
		`taskrelay_worker_slots{biz_type="MIXED",state="free"}`:             50,
	} {
		equal(t, key, worker[key], want)
	}
	equal(t, "messages of pages stored", relay[`taskrelay_relay_published_total{biz_type="MIXED",result="ok",source="position"}`], 10)
	// One value per task: but not for the one whose first attempt was lost, nor for the one whose row was taken away.
	equal(t, "first attempts", worker[`taskrelay_task_wait_seconds{biz_type="MIXED"}`], 9)

	for role, tel := range map[string]*observe.Telemetry{"relay": relayTel, "worker": workerTel} {
		problems, err := testutil.GatherAndLint(tel.Gatherer())
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			t.Errorf("%s: %s: %s", role, p.Metric, p.Text)
		}
	}
}

// C-129: a producer that invents types makes no series; a type gets its own once a worker or operator has made it known.
func TestUnknownTypesShareOneLabel(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	tel := telemetry(t, "relay")
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('KNOWN', 'operator')`)
	for _, bizType := range []string{"KNOWN", "MADE_UP_1", "MADE_UP_2"} {
		e.Insert(t, bizType)
	}
	e.RunRelay(func(c *outbox.RelayConfig) { c.MeterProvider = tel.Meters })
	testenv.Eventually(t, soon, func() error { // before the first look: gauges are read every 10 s at most
		if n := e.NATS.Messages(t, "TASKS"); n != 3 {
			return errorf("%d messages in the stream, want 3", n)
		}
		return nil
	})
	var all map[string]float64
	testenv.Eventually(t, soon, func() error {
		all = series(t, tel.Gatherer())
		other, known := all[`taskrelay_relay_published_total{biz_type="other",result="ok",source="position"}`], all[`taskrelay_relay_published_total{biz_type="KNOWN",result="ok",source="position"}`]
		if other+known != 3 {
			return errorf("published %v of other types and %v of KNOWN, want 3 together", other, known)
		}
		return nil
	})
	for key := range all {
		if strings.Contains(key, "MADE_UP") && !strings.Contains(key, "consumer=") {
			t.Errorf("a type that nobody knows has a series: %s", key)
		}
	}
	testenv.Eventually(t, soon, func() error {
		all = series(t, tel.Gatherer())
		if got := all[`taskrelay_tasks_without_worker{biz_type="other"}`]; got != 2 {
			return errorf("tasks of unknown types: got %v, want 2", got)
		}
		if got := all[`taskrelay_tasks_without_worker{biz_type="KNOWN"}`]; got != 1 {
			return errorf("tasks of KNOWN without a worker: got %v, want 1", got)
		}
		return nil
	})
}

// C-132: the backlog comes from the table, and an operator's pause shows.
func TestBacklogAndOldestAgeAreThoseOfTheTable(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	tel := telemetry(t, "relay")
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by, paused_at) VALUES ('HELD', 'operator', now())`)
	for range 3 {
		e.Insert(t, "HELD")
	}
	e.Insert(t, "HELD", "run_at", time.Now().Add(time.Hour)) // not due
	e.Exec(t, `UPDATE taskrelay.task SET created_at = created_at - interval '7 min' WHERE id = (SELECT min(id) FROM taskrelay.task)`)
	e.RunRelay(func(c *outbox.RelayConfig) { c.MeterProvider = tel.Meters })
	e.WaitCount(t, soon, 2, `SELECT count(*) FROM taskrelay.lane WHERE owner IS NOT NULL`) // the relay knows the types
	testenv.Eventually(t, soon, func() error {
		all := series(t, tel.Gatherer())
		if got := all[`taskrelay_outbox_tasks{biz_type="HELD",state="waiting"}`]; got != 3 {
			return errorf("waiting: got %v, want 3", got)
		}
		if got := all[`taskrelay_outbox_oldest_due_age_seconds{biz_type="HELD"}`]; got < 420 || got > 480 {
			return errorf("oldest due age: got %v s, want 7 minutes", got)
		}
		if got := all[`taskrelay_biz_type_paused{biz_type="HELD"}`]; got != 1 {
			return errorf("paused: got %v, want 1", got)
		}
		return nil
	})
}
