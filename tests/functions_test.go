package tests

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// The table defends itself: C-008, C-010, C-011 and the rest, each refused by a constraint whose name says the rule.
// The rows beside a refused one are untouched.
func TestConstraintsRefuseByName(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	const bizType, bizID, key = "biz_type_is_1_to_63_letters_digits_underscores_dashes",
		"biz_id_is_1_to_255_bytes_without_control_characters", "ordering_key_is_1_to_255_bytes_without_control_characters"
	type columns = []any
	for _, c := range []struct {
		bizType    string
		columns    columns
		constraint string // "" is accepted
	}{
		{"order_created", nil, ""},
		{"order-created", nil, ""},
		{"9", nil, ""},
		{strings.Repeat("a", 63), nil, ""},
		{strings.Repeat("a", 64), nil, bizType},
		{strings.Repeat("a", 300), nil, bizType},
		{"order.created", nil, bizType},
		{"order created", nil, bizType},
		{"Order.Created", nil, bizType},
		{"заказ", nil, bizType},
		{"a*b", nil, bizType},
		{"a>b", nil, bizType},
		{"*", nil, bizType},
		{".a", nil, bizType},
		{"a..b", nil, bizType},
		{"a.", nil, bizType},
		{"_a", nil, bizType},
		{"-a", nil, bizType},
		{"", nil, bizType},
		{"a\n", nil, bizType},
		{"x\r\nPUB evil 1\r\nA", nil, bizType},

		{"A", columns{"biz_id", strings.Repeat("x", 255)}, ""},
		{"A", columns{"biz_id", strings.Repeat("x", 256)}, bizID},
		{"A", columns{"biz_id", strings.Repeat("x", 1000)}, bizID},
		{"A", columns{"biz_id", strings.Repeat("x", 6000)}, bizID},
		{"A", columns{"biz_id", strings.Repeat("😀", 63)}, ""},
		{"A", columns{"biz_id", strings.Repeat("😀", 255)}, bizID},
		{"A", columns{"biz_id", ""}, bizID},
		{"A", columns{"biz_id", "a\r\nTask-Id: 7"}, bizID},
		{"A", columns{"biz_id", "a\tb"}, bizID},
		{"A", columns{"biz_id", "a\x7f"}, bizID},
		{"A", columns{"biz_id", "Заказ № 1 .*>"}, ""},
		{"A", columns{"ordering_key", "k\r\n"}, key},
		{"A", columns{"ordering_key", ""}, key},
		{"A", columns{"ordering_key", "k"}, "ordering_keys_are_not_supported_yet"},

		{"A", columns{"priority", "high"}, ""},
		{"A", columns{"priority", "H"}, "priority_is_high_or_low"},
		{"A", columns{"max_attempts", 1}, ""},
		{"A", columns{"max_attempts", 1000}, ""},
		{"A", columns{"max_attempts", 0}, "max_attempts_is_1_to_1000"},
		{"A", columns{"max_attempts", -1}, "max_attempts_is_1_to_1000"},
		{"A", columns{"max_attempts", 1001}, "max_attempts_is_1_to_1000"},
		{"A", columns{"headers", `{"a":"b"}`}, ""},
		{"A", columns{"headers", `["a"]`}, "headers_is_an_object"},
		{"A", columns{"headers", `null`}, "headers_is_an_object"},
		{"A", columns{"payload", sized(512 << 10)}, ""},
		{"A", columns{"payload", sized(512<<10 + 1)}, "payload_is_at_most_512_kib"},
		{"A", columns{"payload", sized(8 << 20)}, "payload_is_at_most_512_kib"},

		{"A", columns{"status", "done"}, "status_is_known"},
		{"A", columns{"phase", "undo"}, "phase_is_known"},
		{"A", columns{"status", "succeeded"}, "use_taskrelay_requeue"},
		{"A", columns{"finished_at", time.Now()}, "use_taskrelay_requeue"},
		{"A", columns{"status", "running"}, "running_needs_lease"},
	} {
		name := fmt.Sprintf("%.20q %.60v", c.bizType, c.columns)
		_, err := db.TryInsert(t, c.bizType, c.columns...)
		var pe *pgconn.PgError
		switch {
		case c.constraint == "" && err != nil:
			t.Errorf("%s: refused: %v", name, err)
		case c.constraint == "":
		case !errors.As(err, &pe):
			t.Errorf("%s: got %v, want %s", name, err, c.constraint)
		// Postgres checks in the order of names; a row may break two rules.
		case pe.ConstraintName != c.constraint && !(c.constraint == "status_is_known" && pe.ConstraintName == "use_taskrelay_requeue"):
			t.Errorf("%s: refused by %s, want %s", name, pe.ConstraintName, c.constraint)
		}
	}
	// The article's own SQL: a person puts a final row back by hand. It is refused with the name of the function.
	id := db.Insert(t, "A")
	db.Exec(t, `UPDATE taskrelay.task SET status = 'dead', finished_at = now(), dead_at = now() WHERE id = $1`, id)
	_, err := db.Pool.Exec(t.Context(), `UPDATE taskrelay.task SET status = 'pending' WHERE id = $1`, id)
	if err == nil || !strings.Contains(err.Error(), "use_taskrelay_requeue") {
		t.Errorf("got %v, want a refusal by use_taskrelay_requeue", err)
	}
}

// sized is a JSON document of n bytes.
func sized(n int) string { return `"` + strings.Repeat("x", n-2) + `"` }

// C-001, C-004, C-005, C-007: json keeps every byte.
func TestPayloadIsKeptByteForByte(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	for _, p := range []string{
		`{"a":"x\u0000y"}`, `{"a":"\ud800"}`, `null`, `{}`, `""`, `[]`, `0`, "{\"b\": 1,\n  \"a\":2 , \"a\": 3}",
		`{"id":1970670598291982290,"amount":12345678901234567890.10}`, strings.Repeat("[", 6000) + strings.Repeat("]", 6000),
	} {
		id := db.Insert(t, "A", "payload", p)
		if got := db.Text(t, `SELECT payload::text FROM taskrelay.task WHERE id = $1`, id); got != p {
			t.Errorf("by INSERT: got %.60q, want %.60q", got, p)
		}
		db.Exec(t, `SELECT taskrelay.enqueue('A', $1::text::json)`, p)
		if got := db.Text(t, `SELECT payload::text FROM taskrelay.task ORDER BY id DESC LIMIT 1`); got != p {
			t.Errorf("by enqueue: got %.60q, want %.60q", got, p)
		}
	}
	for _, p := range []string{``, `{`, `{"a":}`, "{'a':1}"} {
		if _, err := db.TryInsert(t, "A", "payload", p); err == nil {
			t.Errorf("%q is accepted", p)
		}
	}
	if _, err := db.Pool.Exec(t.Context(), `SELECT taskrelay.enqueue('A', NULL)`); err == nil || !strings.Contains(err.Error(), `column "payload"`) {
		t.Errorf("payload NULL: got %v, want an error that names the column", err)
	}
}

func TestEnqueueTakesEveryShape(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, default_priority) VALUES ('URGENT', 'high')`)
	for _, c := range []struct{ call, want string }{
		{`enqueue('A')`, `A - low {} {} - -`},
		{`enqueue('A', '{"a": 1}')`, `A - low {"a": 1} {} - -`},
		{`enqueue('A', '{"a": 1}', 'id-1')`, `A id-1 low {"a": 1} {} - -`},
		{`enqueue('A', biz_id => 'id-2', priority => 'high')`, `A id-2 high {} {} - -`},
		{`enqueue('URGENT')`, `URGENT - high {} {} - -`},
		{`enqueue('URGENT', priority => 'low')`, `URGENT - low {} {} - -`},
		{`enqueue('A', run_at => '2030-01-01 00:00Z', max_attempts => 7)`, `A - low {} {} 1893456000 7`},
		{`enqueue('A', headers => '{"tenant": "x"}')`, `A - low {} {"tenant": "x"} - -`},
		{`enqueue('A', headers => NULL)`, `A - low {} {} - -`},
		{`enqueue(biz_type => 'A', payload => json_build_object('a', 1))`, `A - low {"a" : 1} {} - -`},
	} {
		var id int64
		var isNew bool
		db.Scan(t, `SELECT id, is_new FROM taskrelay.`+c.call, nil, &id, &isNew)
		got := db.Text(t, `SELECT concat_ws(' ', biz_type, coalesce(biz_id, '-'), priority, payload, headers, coalesce(extract(epoch FROM run_at)::bigint::text, '-'),
			coalesce(max_attempts::text, '-')) FROM taskrelay.task WHERE id = $1`, id)
		equal(t, c.call, got, c.want)
		equal(t, c.call+" is new", isNew, true)
	}
	for call, want := range map[string]string{
		`enqueue('a.b')`:                       "biz_type_is_1_to_63_letters_digits_underscores_dashes",
		`enqueue('A', priority => 'H')`:        "priority_is_high_or_low",
		`enqueue('A', max_attempts => 0)`:      "max_attempts_is_1_to_1000",
		`enqueue('A', ordering_key => 'k')`:    "ordering_key is not supported yet",
		`enqueue('A', biz_id => '')`:           "biz_id_is_1_to_255_bytes_without_control_characters",
		`enqueue(NULL)`:                        `column "biz_type"`,
		`enqueue('A', headers => '["a"]')`:     "headers_is_an_object",
		`enqueue('A', json_build_object(1,2))`: "", // fine
	} {
		_, err := db.Pool.Exec(t.Context(), `SELECT * FROM taskrelay.`+call)
		if got := fmt.Sprint(err); want != "" && !strings.Contains(got, want) || want == "" && err != nil {
			t.Errorf("%s: got %v, want %q", call, err, want)
		}
	}
	// A column with a collation of its own as argument.
	db.Exec(t, `CREATE TABLE orders (no text COLLATE "POSIX"); INSERT INTO orders VALUES ('id-1')`)
	var isNew bool
	db.Scan(t, `SELECT e.is_new FROM orders, taskrelay.enqueue('A', '{}', no) AS e`, nil, &isNew)
	equal(t, "new by a collated column", isNew, false)
}

// A43: one rule for every state: the biz id is taken until the row is deleted, and the caller's transaction goes on.
func TestEnqueueOfDuplicateKeepsTheTransaction(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	first := db.Insert(t, "A", "biz_id", "1")
	for _, state := range []string{`status = 'pending'`, `status = 'dead', finished_at = now(), dead_at = now()`,
		`status = 'succeeded', finished_at = now(), dead_at = NULL`, `status = 'cancelled', finished_at = now()`} {
		db.Exec(t, `UPDATE taskrelay.task SET `+state)
		tx := begin(t, db, pgx.ReadCommitted)
		for range 2 {
			id, isNew, err := enqueue(tx, "A", "1")
			if id != first || isNew || err != nil {
				t.Errorf("%s: got %d, %v, %v, want %d, false", state, id, isNew, err, first)
			}
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Errorf("%s: commit: %v", state, err)
		}
	}
	// C-042: deleted, the id is free.
	db.Exec(t, `DELETE FROM taskrelay.task`)
	tx := begin(t, db, pgx.ReadCommitted)
	if _, isNew, err := enqueue(tx, "A", "1"); !isNew || err != nil {
		t.Errorf("after delete: %v, %v", isNew, err)
	}
	if _, isNew, _ := enqueue(tx, "A", "1"); isNew {
		t.Error("the transaction does not find its own task")
	}
	// C-038: savepoints.
	savepoint, err := tx.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, isNew, err := enqueue(savepoint, "A", "2"); !isNew || err != nil {
		t.Errorf("in a savepoint: %v, %v", isNew, err)
	}
	if err := savepoint.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, isNew, err := enqueue(tx, "A", "2"); !isNew || err != nil {
		t.Errorf("after its savepoint was rolled back: %v, %v", isNew, err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	equal(t, "tasks", db.Int(t, `SELECT count(*) FROM taskrelay.task`), 2)
}

// C-041: B enqueues what A has inserted and not committed.
func TestEnqueueTellsTheTruthAboutAnOpenTransaction(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	for i, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, commits := range []bool{true, false} {
			name := fmt.Sprintf("%s, A commits: %v", level, commits)
			bizID := fmt.Sprintf("%d-%v", i, commits)
			a, b := begin(t, db, pgx.ReadCommitted), begin(t, db, level)
			// B's snapshot is older than A's commit.
			if _, err := b.Exec(t.Context(), `SELECT 1`); err != nil {
				t.Fatal(err)
			}
			aID, _, err := enqueue(a, "A", bizID)
			if err != nil {
				t.Fatal(err)
			}
			type answer struct {
				id    int64
				isNew bool
				err   error
			}
			done := make(chan answer, 1)
			go func() {
				id, isNew, err := enqueue(b, "A", bizID)
				if err == nil {
					err = b.Commit(context.Background())
				}
				done <- answer{id, isNew, err}
			}()
			waitForLock(t, db)
			if commits {
				err = a.Commit(t.Context())
			} else {
				err = a.Rollback(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			got := <-done
			switch {
			case !commits:
				if got.err != nil || !got.isNew {
					t.Errorf("%s: got %+v, want a new task", name, got)
				}
			case level == pgx.ReadCommitted:
				if got.err != nil || got.isNew || got.id != aID {
					t.Errorf("%s: got %+v, want task %d", name, got, aID)
				}
			default: // never a silent skip: the caller repeats its transaction
				var pe *pgconn.PgError
				if !errors.As(got.err, &pe) || pe.Code != "40001" {
					t.Errorf("%s: got %+v, want SQLSTATE 40001", name, got)
				}
			}
			_ = b.Rollback(t.Context())
			equal(t, name+": rows", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id = $1`, bizID), 1)
		}
	}
}

func TestEnqueueRace(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	fresh := 0
	for range 8 {
		wg.Go(func() {
			for i := range 50 {
				var id int64
				var isNew bool
				err := db.Pool.QueryRow(t.Context(), `SELECT id, is_new FROM taskrelay.enqueue('A', '{}', $1)`, fmt.Sprint(i)).Scan(&id, &isNew)
				if err != nil || id == 0 {
					t.Errorf("enqueue %d: %d, %v", i, id, err)
				}
				if isNew {
					mu.Lock()
					fresh++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	equal(t, "new", fresh, 50)
	equal(t, "rows", db.Int(t, `SELECT count(*) FROM taskrelay.task`), 50)
}

// B52: with strict_types the type must be known, and the refusal says how to make it known.
func TestStrictTypesRefuseUnknownTypes(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `UPDATE taskrelay.installation SET strict_types = true`)
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('KNOWN', 'w1'), ('PAUSED_ONLY', NULL)`)
	tx := begin(t, db, pgx.ReadCommitted)
	for _, bizType := range []string{"ORDER's", "PAUSED_ONLY", "OTHER"} {
		savepoint, err := tx.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = enqueue(savepoint, bizType, "1")
		var pe *pgconn.PgError
		if !errors.As(err, &pe) || pe.ConstraintName != "strict_types_refuses_unknown_biz_types" || !strings.Contains(pe.Hint, "FROM taskrelay.set_type(") {
			t.Errorf("%s: got %v, want a refusal with a hint", bizType, err)
		}
		if err := savepoint.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if bizType == "OTHER" { // the hint works as it stands
			if _, err := tx.Exec(t.Context(), pe.Hint[strings.Index(pe.Hint, "SELECT"):]); err != nil {
				t.Errorf("hint %s: %v", pe.Hint, err)
			}
		}
	}
	for _, bizType := range []string{"KNOWN", "OTHER"} {
		if _, isNew, err := enqueue(tx, bizType, "1"); !isNew || err != nil {
			t.Errorf("%s: %v, %v", bizType, isNew, err)
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Error(err)
	}
}

// states puts a fresh task into each state, as relay and workers leave it.
var states = map[string]string{
	"pending":   `status = 'pending'`,
	"scheduled": `run_at = now() + interval '1 day'`,
	"listed":    `generation = 1, republish_at = now() + interval '1 hour', next_attempt_at = now() + interval '1 hour', looks = 2, attempt = 2`,
	"retrying":  `status = 'retrying', attempt = 3, next_attempt_at = now() + interval '10 s', last_error = 'boom'`,
	"running":   `status = 'running', attempt = 1, lease_until = now() + interval '30 s', lease_token = 7, lease_owner = 'w', started_at = now()`,
	"asked":     `status = 'running', attempt = 1, lease_until = now() + interval '30 s', lease_token = 7, cancel_requested_at = now()`,
	"blocked":   `status = 'blocked'`,
	"succeeded": `status = 'succeeded', attempt = 1, finished_at = now(), result = '{"a":1}'`,
	"dead": `status = 'dead', attempt = 10, generation = 2, finished_at = now(), dead_at = now(), dead_reason = 'max_attempts', dead_lettered_at = now(),
		last_error = 'boom', looks = 3, started_at = now(), first_started_at = now()`,
	"cancelled": `status = 'cancelled', finished_at = now(), cancel_requested_at = now()`,
	"compensating": `status = 'retrying', phase = 'compensate', attempt = 1, execute_attempts = 10, cause = 'boom', compensation = 'pending',
		dead_reason = 'max_attempts', generation = 1, next_attempt_at = now() + interval '1 hour', republish_at = now() + interval '1 hour'`,
	"compensated": `status = 'dead', phase = 'compensate', attempt = 1, execute_attempts = 10, cause = 'boom', compensation = 'done', compensations = 1,
		generation = 1, finished_at = now(), dead_at = now(), dead_reason = 'max_attempts', dead_lettered_at = now(), last_error = 'boom'`,
}

// Each operating function in each state: what becomes of the row, or why nothing does.
func TestOperatingFunctionsInEveryState(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	const restarted, due, cancelled, asked = "restarted", "due", "cancelled", "asked"
	type want map[string]string // by state: one of the above, or words of why_not
	for _, c := range []struct {
		call string
		want want
	}{
		{`requeue(%d, 'why')`, want{
			"pending": "it is pending", "scheduled": "it is pending", "listed": "it is pending", "retrying": "it is retrying", "running": "it is running",
			"asked": "it is running", "blocked": "it is blocked", "succeeded": "allow_succeeded", "dead": restarted, "cancelled": restarted,
			"compensating": "it is retrying", "compensated": "ending in -r1",
		}},
		{`requeue(%d, 'why', allow_compensated => true)`, want{"compensated": restarted, "dead": restarted, "pending": "it is pending", "succeeded": "allow_succeeded"}},
		{`reset('A', '%d', 'why')`, want{
			"pending": restarted, "scheduled": restarted, "listed": restarted, "retrying": restarted, "running": "it is running", "asked": "it is running",
			"blocked": restarted, "succeeded": "allow_succeeded", "dead": restarted, "cancelled": restarted, "compensating": restarted, "compensated": "ending in -r1",
		}},
		{`reset('A', '%d', 'why', allow_succeeded => true)`, want{"succeeded": restarted, "compensated": "ending in -r1", "running": "it is running"}},
		{`reset('A', '%d', 'why', allow_compensated => true)`, want{"succeeded": "allow_succeeded", "compensated": restarted}},
		{`run_now(%d, 'why')`, want{
			"pending": due, "scheduled": due, "listed": due, "retrying": due, "running": "it is running", "asked": "it is running", "blocked": "it is blocked",
			"succeeded": "it has succeeded", "dead": "requeue it", "cancelled": "requeue it", "compensating": due, "compensated": "requeue it",
		}},
		{`delay(%d, '2 hours', 'why')`, want{
			"pending": due, "scheduled": due, "listed": due, "retrying": due, "running": "it is running", "asked": "it is running", "blocked": "it is blocked",
			"succeeded": "it has succeeded", "dead": "requeue it", "cancelled": "requeue it", "compensating": due, "compensated": "requeue it",
		}},
		{`cancel(%d, 'why')`, want{
			"pending": cancelled, "scheduled": cancelled, "listed": cancelled, "retrying": cancelled, "running": asked, "asked": "asked to stop already",
			"blocked": cancelled, "succeeded": "it has succeeded", "dead": "it is dead already", "cancelled": "it is cancelled already",
			"compensating": "allow_uncompensated", "compensated": "it is dead already",
		}},
	} {
		for state, want := range c.want {
			id := db.Insert(t, "A")
			name := fmt.Sprintf(c.call+" of %s", id, state)
			db.Exec(t, `UPDATE taskrelay.task SET biz_id = id::text, `+states[state]+` WHERE id = $1`, id)
			before := db.Task(t, id)
			image := db.Text(t, `SELECT t::text FROM taskrelay.task AS t WHERE id = $1`, id)
			var gotID int64
			var changed bool
			var why *string
			db.Scan(t, `SELECT id, changed, why_not FROM taskrelay.`+fmt.Sprintf(c.call, id), nil, &gotID, &changed, &why)
			after := db.Task(t, id)
			equal(t, name+": id", gotID, id)
			audit := db.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE task_id = $1`, id)

			if !slices.Contains([]string{restarted, due, cancelled, asked}, want) {
				if changed || !strings.Contains(text(why), want) {
					t.Errorf("%s: got changed %v, %q, want %q", name, changed, text(why), want)
				}
				equal(t, name+": row", db.Text(t, `SELECT t::text FROM taskrelay.task AS t WHERE id = $1`, id), image)
				equal(t, name+": audited", audit, 0)
				continue
			}
			equal(t, name+": changed", changed, true)
			equal(t, name+": audited", audit, 1)
			equal(t, name+": audit", db.Text(t, `SELECT concat_ws(' ', biz_type, biz_id = task_id::text, reason, before->>'status', before->>'generation',
				before->>'attempt', after->>'status', after->>'generation', after->>'phase', actor = session_user) FROM taskrelay.audit WHERE task_id = $1`, id),
				fmt.Sprintf("A t why %s %d %d %s %d %s t", before.Status, before.Generation, before.Attempt, after.Status, after.Generation, after.Phase))
			now := db.Text(t, `SELECT concat_ws(' ',
				'republish=' || coalesce(round(extract(epoch FROM republish_at - at) / 3600)::text, '-'), 'next=' || coalesce(round(extract(epoch FROM next_attempt_at - at) / 3600)::text, '-'),
				'looks=' || looks, 'lettered=' || (dead_lettered_at IS NOT NULL))
				FROM taskrelay.task AS t, (SELECT at FROM taskrelay.audit WHERE task_id = $1) AS a WHERE t.id = $1`, id)
			switch want {
			case restarted:
				equal(t, name+": why", text(why), "")
				equal(t, name+": generation", after.Generation, before.Generation+1)
				// The letter's mark stays until the relay has deleted the letter.
				equal(t, name+": due", now, fmt.Sprintf("republish=0 next=0 looks=0 lettered=%v", before.DeadLetteredAt != nil))
				equal(t, name+": state", fmt.Sprint(after.Status, after.Phase, after.Attempt, after.Compensation, after.Compensations),
					fmt.Sprint("pending", "execute", 0, "none", before.Compensations))
				if after.FinishedAt != nil || after.DeadAt != nil || after.DeadReason != nil || after.LeaseUntil != nil || after.LeaseOwner != nil ||
					after.CancelRequestedAt != nil || after.Cause != nil || after.Result != nil || after.StartedAt != nil {
					t.Errorf("%s: something is left of the past: %+v", name, after)
				}
				equal(t, name+": last error", text(after.LastError), text(before.LastError))
			case due:
				equal(t, name+": why", text(why), "")
				hours := "0"
				if strings.HasPrefix(c.call, "delay") {
					hours = "2"
				}
				equal(t, name+": due", now, fmt.Sprintf("republish=%s next=%s looks=0 lettered=false", hours, hours))
				equal(t, name+": state", fmt.Sprint(after.Status, after.Phase, after.Attempt, after.Generation),
					fmt.Sprint(before.Status, before.Phase, before.Attempt, before.Generation+1))
			case cancelled:
				equal(t, name+": why", text(why), "")
				equal(t, name+": due", now, "republish=- next=- looks=0 lettered=false")
				equal(t, name+": state", fmt.Sprint(after.Status, after.Generation, after.FinishedAt != nil), fmt.Sprint("cancelled", before.Generation+1, true))
			case asked:
				equal(t, name+": why", text(why), "it is running: its worker is asked to stop")
				equal(t, name+": state", fmt.Sprint(after.Status, after.Generation, after.CancelRequestedAt != nil, *after.LeaseUntil),
					fmt.Sprint("running", before.Generation, true, *before.LeaseUntil))
			}
		}
	}
}

func TestOperatingFunctionsTakeManyAndUnknownIDs(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	a, b := db.Insert(t, "A"), db.Insert(t, "A")
	db.Exec(t, `UPDATE taskrelay.task SET `+states["dead"]+` WHERE id = $1`, b)
	got := db.Text(t, `SELECT string_agg(concat_ws('|', id, changed, why_not), ', ' ORDER BY n) FROM taskrelay.cancel($1::bigint[], 'why') WITH ORDINALITY AS c(id, changed, why_not, n)`,
		[]int64{999, b, a, a})
	equal(t, "cancel", got, fmt.Sprintf("%d|t, %d|f|it is dead already, 999|f|no such task", a, b))
	equal(t, "of none", db.Int(t, `SELECT count(*) FROM taskrelay.cancel('{}'::bigint[], 'why')`), 0)
	equal(t, "of null", db.Int(t, `SELECT count(*) FROM taskrelay.cancel(NULL::bigint[], 'why')`), 0)
	equal(t, "requeue unknown", db.Text(t, `SELECT concat_ws('|', id, changed, why_not) FROM taskrelay.requeue(12345, 'why')`), "12345|f|no such task")
	equal(t, "reset unknown", db.Text(t, `SELECT concat_ws('|', id, changed, why_not) FROM taskrelay.reset('A', 'none', 'why')`), "f|no such task")
}

func TestOperatingFunctionsRefuseBadArguments(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Insert(t, "A", "biz_id", "1")
	var all []refused
	for _, reason := range []string{`NULL`, `''`, `E' \t\n'`} {
		for _, call := range []string{`requeue(1, %s)`, `reset('A', '1', %s)`, `run_now(1, %s)`, `delay(1, '1 h', %s)`, `cancel(1, %s)`, `cancel(ARRAY[1], %s)`} {
			all = append(all, refused{`SELECT * FROM taskrelay.` + fmt.Sprintf(call, reason), "a reason is required"})
		}
	}
	for _, by := range []string{`'0'`, `'-1 s'`, `'366 days 1 s'`, `'100 years'`, `NULL::interval`} {
		all = append(all, refused{`SELECT * FROM taskrelay.delay(1, ` + by + `, 'why')`, "more than 0 and at most 366 days"})
	}
	for _, call := range []string{`requeue(1, %s)`, `cancel(1, %s)`, `pause('A', %s)`, `set_strict_types(true, %s)`, `start_bulk('cancel', '{"all": true}', %s)`} {
		all = append(all, refused{`SELECT * FROM taskrelay.` + fmt.Sprintf(call, `repeat('ä', 1001)`), "the reason has 1001 characters, at most 1000"})
	}
	refuse(t, db.Pool, all)
	equal(t, "generation", db.Task(t, 1).Generation, 0)

	// C-014: a day is 24 hours, also when the clocks change in between.
	db.Exec(t, `SET LOCAL TimeZone = 'Europe/Berlin'; SELECT taskrelay.delay(1, '366 days', 'why')`)
	got := db.Int(t, `SELECT extract(epoch FROM t.next_attempt_at - a.at)::bigint FROM taskrelay.task AS t, taskrelay.audit AS a`)
	equal(t, "seconds of 366 days", got, 366*24*3600)
}

func TestAuditNamesTheActor(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Insert(t, "A")
	user := db.Text(t, `SELECT session_user::text`)
	tx := begin(t, db, pgx.ReadCommitted)
	for _, sql := range []string{`SELECT taskrelay.run_now(1, 'one')`, `SET LOCAL taskrelay.actor = 'cli:bob'`, `SELECT taskrelay.run_now(1, 'two')`} {
		if _, err := tx.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, `SELECT taskrelay.run_now(1, 'three')`)
	got := db.Text(t, `SELECT string_agg(reason || ' ' || actor, ', ' ORDER BY id) FROM taskrelay.audit`)
	equal(t, "actors", got, fmt.Sprintf("one %[1]s, two cli:bob (as %[1]s), three %[1]s", user))

	// The change and its record are one transaction.
	tx = begin(t, db, pgx.ReadCommitted)
	if _, err := tx.Exec(t.Context(), `SELECT taskrelay.cancel(1, 'why')`); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	equal(t, "records", db.Int(t, `SELECT count(*) FROM taskrelay.audit`), 3)
	if strings.Contains(db.Text(t, `SELECT string_agg(a::text, '') FROM taskrelay.audit AS a`), "payload") {
		t.Error("the audit holds the payload")
	}
}

// An operator's call waits for a worker's transaction and then judges what it left, not what it saw before.
func TestOperatingFunctionsJudgeWhatTheLockWaitedFor(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	id := db.Insert(t, "A")
	db.Exec(t, `UPDATE taskrelay.task SET `+states["dead"])
	worker := begin(t, db, pgx.ReadCommitted)
	if _, err := worker.Exec(t.Context(), `SELECT taskrelay.requeue($1::bigint, 'first')`, id); err != nil {
		t.Fatal(err)
	}
	done := make(chan string, 1)
	go func() {
		var got string
		err := db.Pool.QueryRow(context.Background(), `SELECT concat_ws('|', changed, why_not) FROM taskrelay.requeue($1::bigint, 'second')`, id).Scan(&got)
		done <- fmt.Sprint(got, err)
	}()
	waitForLock(t, db)
	if err := worker.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	equal(t, "second requeue", <-done, "f|it is pending: only dead and cancelled tasks are requeued<nil>")
	equal(t, "generation", db.Task(t, id).Generation, 3)
}

func TestOperatingFunctionsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'A' FROM generate_series(1, 50)`)
	ids := make([]int64, 50)
	for i := range ids {
		ids[i] = int64(i + 1)
	}
	reversed := slices.Clone(ids)
	slices.Reverse(reversed)
	var wg sync.WaitGroup
	for i := range 6 {
		order := [][]int64{ids, reversed}[i%2]
		wg.Go(func() {
			for range 15 {
				if _, err := db.Pool.Exec(t.Context(), `SELECT taskrelay.run_now($1::bigint[], 'why')`, order); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	equal(t, "generations", db.Int(t, `SELECT min(generation) + max(generation) FROM taskrelay.task`), 180)
}

func begin(t *testing.T, db *testenv.Database, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func enqueue(tx pgx.Tx, bizType, bizID string) (id int64, isNew bool, err error) {
	err = tx.QueryRow(context.Background(), `SELECT id, is_new FROM taskrelay.enqueue($1, '{}', $2)`, bizType, bizID).Scan(&id, &isNew)
	return id, isNew, err
}

// waitForLock waits until somebody in this database waits for another's transaction.
func waitForLock(t *testing.T, db *testenv.Database) {
	t.Helper()
	db.WaitCount(t, soon, 1, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)
}
