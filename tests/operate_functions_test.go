package tests

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// inState inserts a task and puts it into a state, as relay and worker would leave it.
func inState(t *testing.T, db *testenv.Database, status string) int64 {
	t.Helper()
	id := db.Insert(t, "A")
	db.Exec(t, `UPDATE taskrelay.task SET status = $2::text, attempt = CASE WHEN $2::text = 'pending' THEN 0 ELSE 1 END,
		finished_at = CASE WHEN $2::text IN ('succeeded', 'dead', 'cancelled') THEN now() END,
		dead_at = CASE WHEN $2::text = 'dead' THEN now() END, dead_lettered_at = CASE WHEN $2::text = 'dead' THEN now() END,
		lease_token = CASE WHEN $2::text = 'running' THEN 7 END, lease_until = CASE WHEN $2::text = 'running' THEN now() + interval '1 min' END,
		first_started_at = CASE WHEN $2::text <> 'pending' THEN now() END,
		next_attempt_at = CASE WHEN $2::text = 'retrying' THEN now() + interval '1 hour' END,
		republish_at = CASE WHEN $2::text = 'retrying' THEN now() + interval '1 hour' END
		WHERE id = $1`, id, status)
	return id
}

// Every operation in every state: what it does, or why not. What is changed is fenced and audited, what is refused is as it was.
func TestOperationsAreGuardedByState(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, compensates) VALUES ('A', true)`)
	states := []string{"pending", "retrying", "running", "blocked", "succeeded", "dead", "cancelled"}
	type want = map[string]string // by state: the new state, or "- why not"
	for call, wants := range map[string]want{
		"requeue($1::bigint, 'why')": {
			"pending": "- only dead and cancelled", "retrying": "- only dead and cancelled", "running": "- only dead and cancelled",
			"blocked": "- only dead and cancelled", "succeeded": "- allow_succeeded", "dead": "pending", "cancelled": "pending"},
		"reset($1::bigint, 'why')": {
			"pending": "pending", "retrying": "pending", "running": "- it is running", "blocked": "pending",
			"succeeded": "- allow_succeeded", "dead": "pending", "cancelled": "pending"},
		"reset($1::bigint, 'why', true)": {"succeeded": "pending", "running": "- it is running"},
		"rerun($1::bigint, 'why')": {
			"pending": "- only finished", "retrying": "- only finished", "running": "- only finished", "blocked": "- only finished",
			"succeeded": "- allow_succeeded", "dead": "pending", "cancelled": "pending"},
		"rerun($1::bigint, 'why', true)": {"succeeded": "pending", "dead": "pending"},
		"run_now($1::bigint, 'why')": {
			"pending": "pending", "retrying": "retrying", "running": "- it is running", "blocked": "- blocked", "succeeded": "- succeeded",
			"dead": "- requeue it", "cancelled": "- requeue it"},
		"delay($1::bigint, '5 min', 'why')": {
			"pending": "pending", "retrying": "retrying", "running": "- it is running", "blocked": "- blocked", "succeeded": "- succeeded",
			"dead": "- requeue it", "cancelled": "- requeue it"},
		"set_priority($1::bigint, 'high', 'why')": {
			"pending": "pending", "retrying": "retrying", "running": "- it is running", "blocked": "- blocked", "succeeded": "- succeeded",
			"dead": "- requeue it", "cancelled": "- requeue it"},
		"set_priority($1::bigint, 'low', 'why')": {"pending": "- low already", "retrying": "- low already"},
		"cancel($1::bigint, 'why')": {
			"pending": "cancelled", "retrying": "cancelled", "running": "running", "blocked": "cancelled", "succeeded": "- succeeded",
			"dead": "- dead already", "cancelled": "- cancelled already"},
		"cancel($1::bigint, 'why', true)": {
			"pending": "cancelled", "retrying": "pending", "running": "running", "blocked": "pending", "succeeded": "- succeeded",
			"dead": "- dead already", "cancelled": "- cancelled already"},
		"discard($1::bigint, 'why')": {
			"pending": "- only dead", "retrying": "- only dead", "running": "- only dead", "blocked": "- only dead", "succeeded": "- only dead",
			"dead": "cancelled", "cancelled": "- cancelled already"},
		"delete_task($1::bigint, 'why')": {
			"pending": "gone", "retrying": "gone", "running": "- it is running", "blocked": "gone", "succeeded": "gone", "dead": "gone", "cancelled": "gone"},
	} {
		for _, state := range states {
			want, ok := wants[state]
			if !ok {
				continue
			}
			name := call + " of a " + state + " task"
			id := inState(t, db, state)
			before := db.Text(t, `SELECT t::text FROM taskrelay.task AS t WHERE id = $1`, id)
			var changed bool
			var why *string
			db.Scan(t, "SELECT changed, why_not FROM taskrelay."+call, []any{id}, &changed, &why)
			audits := db.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE task_id = $1 AND reason = 'why' AND before IS NOT NULL`, id)
			if text, refused := strings.CutPrefix(want, "- "); refused {
				if changed || why == nil || !strings.Contains(*why, text) {
					t.Errorf("%s: got %v, %q; want a refusal with %q", name, changed, text, text)
				}
				equal(t, name+": audit rows", audits, 0)
				equal(t, name+": row", db.Text(t, `SELECT t::text FROM taskrelay.task AS t WHERE id = $1`, id), before)
				continue
			}
			if !changed {
				t.Errorf("%s is refused: %s", name, text(why))
				continue
			}
			equal(t, name+": audit rows", audits, 1)
			if want == "gone" {
				equal(t, name+": rows", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE id = $1`, id), 0)
				continue
			}
			row := db.Task(t, id)
			equal(t, name+": state", row.Status, want)
			fenced := 1
			if state == "running" { // it belongs to its lease
				fenced = 0
			}
			equal(t, name+": generation", row.Generation, fenced)
			if row.FinishedAt == nil && state != "running" && row.RepublishAt == nil {
				t.Errorf("%s: nobody will look at it: no republish_at", name)
			}
		}
	}
}

// One call with many ids answers for each, once, and what does not exist is said to.
func TestOperationsAnswerForEachId(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	dead, pending := inState(t, db, "dead"), inState(t, db, "pending")
	got := db.Text(t, `SELECT string_agg(format('%s %s', changed, why_not), '; ' ORDER BY id)
		FROM taskrelay.discard(ARRAY[$2, $1, 999999, $1, NULL]::bigint[], 'seen')`, dead, pending)
	equal(t, "answers", got, "t ; f it is pending: only dead tasks are discarded; f no such task")
	for _, call := range []string{
		`discard(ARRAY[$1::bigint], ' ')`, `rerun(ARRAY[$1::bigint], NULL)`, `set_priority(ARRAY[$1::bigint], 'high', '')`, `cancel($1::bigint, '', true)`,
	} {
		if _, err := db.Pool.Exec(t.Context(), `SELECT taskrelay.`+call, pending); err == nil || !strings.Contains(err.Error(), "a reason is required") {
			t.Errorf("%s: got %v, want that a reason is required", call, err)
		}
	}
	if _, err := db.Pool.Exec(t.Context(), `SELECT taskrelay.set_priority($1::bigint, 'urgent', 'x')`, pending); err == nil || !strings.Contains(err.Error(), "high or low") {
		t.Errorf("priority urgent: got %v", err)
	}
	_, err := outbox.Cancel(t.Context(), db.Pool, []int64{pending}, "x", outbox.AllowSucceeded)
	if err == nil {
		t.Error("cancel takes a flag that is not its own")
	}
}

// A task that waits in one lane goes on in the other, once, at the time it was due.
func TestSetPriorityMovesATaskToTheOtherLane(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.RunRelay()
	published := e.Insert(t, "ORDER_PAYMENT")
	scheduled := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(2*time.Second))
	waitMessages(t, e, 1)
	for _, id := range []int64{published, scheduled} {
		if changed, why := change(t, e, "set_priority($1::bigint, 'high', 'the customer waits')", id); !changed {
			t.Fatal(why)
		}
	}
	high, err := e.NATS.Conn.SubscribeSync("tasks.ORDER_PAYMENT.high")
	noError(t, "subscribe", err)
	t.Cleanup(func() { _ = high.Unsubscribe() })
	testenv.Eventually(t, soon, func() error {
		if _, err := e.NATS.Last(t.Context(), "TASKS", "tasks.ORDER_PAYMENT.high"); err != nil {
			return fmt.Errorf("no message on the high subject: %w", err)
		}
		return nil
	})
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	e.WaitStatus(t, soon, published, "succeeded")
	row := e.WaitStatus(t, soon, scheduled, "succeeded")
	if row.FirstStartedAt.Before(*row.RunAt) {
		t.Errorf("started at %v, before its time %v", row.FirstStartedAt, row.RunAt)
	}
	for _, id := range []int64{published, scheduled} { // the message on the old lane is stale
		equal(t, "calls", len(sink.CallsOf(id)), 1)
		equal(t, "priority of the call", sink.CallsOf(id)[0].Header.Get("Task-Priority"), "high")
	}
}

// A discarded task has no letter; brought back and dead anew it has a new one, which a late purge leaves alone.
func TestDiscardTakesTheLetterAway(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 400})
	e.RunRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT")
	subject := outbox.Names{}.DeadSubject("ORDER_PAYMENT", id)
	letter := func() (nats.Header, error) {
		m, err := e.NATS.Last(t.Context(), "TASKS_DEAD", subject)
		if err != nil {
			return nil, err
		}
		return m.Header, nil
	}
	testenv.Eventually(t, soon, func() error { _, err := letter(); return err })
	e.WaitStatus(t, soon, id, "dead")
	if changed, why := change(t, e, "discard($1::bigint, 'paid by hand')", id); !changed {
		t.Fatal(why)
	}
	testenv.Eventually(t, soon, func() error {
		if _, err := letter(); err == nil {
			return errorf("the letter is still there")
		}
		return nil
	})
	row := e.Task(t, id)
	if row.Status != "cancelled" || row.DeadAt != nil || text(row.DeadReason) != "permanent" || row.LastError == nil {
		t.Errorf("a discarded task: %+v", row)
	}
	equal(t, "rows of the view dead", e.Int(t, `SELECT count(*) FROM taskrelay.dead`), 0)
	equal(t, "letters to purge", e.Int(t, `SELECT count(*) FROM taskrelay.letter_purge`), 0)

	if changed, why := change(t, e, "requeue($1::bigint, 'not paid after all')", id); !changed {
		t.Fatal(why)
	}
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE status = 'dead' AND dead_lettered_at IS NOT NULL`)
	// As if the purge of the discard came only now, from a relay that was slow.
	e.Exec(t, `INSERT INTO taskrelay.letter_purge (task_id, biz_type, generation) VALUES ($1, 'ORDER_PAYMENT', $2)`, id, row.Generation)
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.letter_purge`)
	h, err := letter()
	noError(t, "the new letter", err)
	equal(t, "generation of the letter", h.Get(outbox.HeaderGeneration), itoa(int64(row.Generation+1)))
}
