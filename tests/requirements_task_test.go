package tests

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// B27, B29, B32, B35, B37: the times of a task are in order, by Postgres's clock; each run has a lease of its own; the log
// says what the task was even when its row is gone.
func TestTimesOfATaskAreInOrder(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Statuses(500, 500, 200)...)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-1")
	row := e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "in order", e.Text(t, `SELECT (created_at <= first_started_at AND first_started_at < started_at AND started_at <= finished_at
		AND finished_at <= now())::text FROM taskrelay.task WHERE id = $1`, id), "true")
	attempts := e.Attempts(t, id)
	equal(t, "attempts", len(attempts), 3)
	equal(t, "started_at is that of the last run", *row.StartedAt, attempts[2].StartedAt)
	for i, a := range attempts {
		equal(t, "number", a.Attempt, i+1)
		if a.FinishedAt.Before(a.StartedAt) || i > 0 && a.StartedAt.Before(attempts[i-1].FinishedAt) {
			t.Errorf("attempt %d: %v to %v", i+1, a.StartedAt, a.FinishedAt)
		}
	}
	equal(t, "leases", e.Int(t, "SELECT count(DISTINCT lease_token) FROM taskrelay.task_attempt WHERE task_id = $1", id), 3)
	cli(t, e, "", "delete", itoa(id), "--reason", "test data", "--yes").ok(t, 0)
	equal(t, "rows", e.Int(t, "SELECT count(*) FROM taskrelay.task"), 0)
	equal(t, "the log", e.Text(t, `SELECT string_agg(DISTINCT biz_type || '/' || biz_id, ' ') FROM taskrelay.task_attempt WHERE task_id = $1`, id), "ORDER_PAYMENT/O-1")
}

// C25, C37: a type and an id are enough; the command is told the id.
func TestTypeAndIDAreEnough(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("USER_PUSH", sink.URL)...)
	id := e.Insert(t, "USER_PUSH", "biz_id", "user 10001/é")
	e.WaitStatus(t, soon, id, "succeeded")
	call := sink.CallsOf(id)[0]
	equal(t, "Task-Biz-Id", call.BizID, "user 10001/é")
	equal(t, "body", call.Body, "{}")
}

// K15, C17: a task that is due in an hour is in the table and nowhere else, whatever becomes of the stream.
func TestScheduledTaskWaitsInTheTableAlone(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	relay := e.RunRelay(quick)
	later := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Hour))
	e.Insert(t, "ORDER_PAYMENT")
	waitMessages(t, e, 1)
	if err := e.NATS.WaitStream(t, "TASKS").Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitMessages(t, e, 1) // the reconciler has been at it
	for range 2 {         // and once more
		if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, soon, func() error {
			s, err := e.NATS.JS.Stream(t.Context(), "TASKS")
			if errors.Is(err, jetstream.ErrStreamNotFound) {
				return err
			}
			if err == nil && s.CachedInfo().State.Msgs == 0 {
				err = errorf("the stream is empty")
			}
			return err
		})
	}
	for task := range tasksInStream(t, e) {
		if task == itoa(later) {
			t.Error("the task that is due in an hour was published")
		}
	}
	equal(t, "due", e.Text(t, "SELECT (due_at > now() + interval '50 min')::text FROM taskrelay.task_view WHERE id = $1", later), "true")
	relay.Stop()
}

// C45, C38: what becomes due together goes out together, in batches, while two thousand others wait for later.
func TestThousandDueTasksGoOutTogether(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, run_at) SELECT 'ORDER_PAYMENT', now() + CASE WHEN g % 3 = 0 THEN interval '1500 ms' ELSE interval '1 h' END
		FROM generate_series(1, 3000) AS g`)
	due := e.Text(t, "SELECT min(run_at)::text FROM taskrelay.task")
	e.RunRelay()
	waitMessages(t, e, 1000)
	last, err := e.NATS.Last(t.Context(), "TASKS", "tasks.ORDER_PAYMENT.low")
	if err != nil {
		t.Fatal(err)
	}
	var took float64
	e.Scan(t, "SELECT extract(epoch FROM $1::timestamptz - $2::text::timestamptz)::float8", []any{last.Time, due}, &took)
	t.Logf("the last of 1,000 was published %.3fs after it was due", took)
	if took < 0 || took > 5 { // some 50 ms on a quiet machine
		t.Errorf("the last of 1,000 was published %.3fs after it was due", took)
	}
}

// K3, K4, K5, K6, K7, K8, C49: the module needs what was asked for, uses it, and may be used by anybody.
func TestModuleIsWhatWasAskedFor(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(testenv.Root(), "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	mod := string(text)
	if !strings.HasPrefix(mod, "module github.com/taskrelay/taskrelay\n") {
		t.Errorf("go.mod begins with %.40q", mod)
	}
	if strings.Contains(mod, "replace ") {
		t.Error("go.mod has a replace directive: go get of the module would not have it")
	}
	for path, use := range map[string]string{
		"github.com/nats-io/nats.go":           `jetstream.New(`,
		"github.com/jackc/pgx/v5":              `pgxpool.NewWithConfig(`,
		"github.com/cenkalti/backoff/v4":       `backoff.NewExponentialBackOff(`,
		"github.com/kelseyhightower/envconfig": `envconfig.Process(`,
		"github.com/rs/zerolog":                `zerolog.New(`,
	} {
		if !strings.Contains(mod, "\t"+path+" v") {
			t.Errorf("go.mod does not require %s", path)
		}
		used := 0
		for _, file := range productFiles(t) {
			if strings.Contains(file, `"`+path) && strings.Contains(file, use) {
				used++
			}
		}
		if used == 0 {
			t.Errorf("no file imports %s and calls %s…)", path, use)
		}
	}
	licence, err := os.ReadFile(filepath.Join(testenv.Root(), "LICENSE"))
	if err != nil || !strings.Contains(string(licence), "Apache License") || !strings.Contains(string(licence), "Version 2.0") {
		t.Errorf("LICENSE is not the Apache License 2.0: %v", err)
	}
}
