package tests

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// C-001, C-004, C-005, C-007: whatever the json type takes arrives as it was written; the rest is refused at INSERT,
// and a savepoint keeps the transaction of the business.
func TestPayloadsArriveAsWritten(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	nested := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	sent := map[int64]string{}
	for _, p := range []string{
		`{"a":"x\u0000y"}`, `{"a":"\ud800"}`, `null`, `{}`, `""`, `[]`, `0`, `"text"`, `true`,
		`{"id":1970670598291982290}`, `99.990`, `{"b":1,"a":2,"b":3}`, "\t{\n \"a\" :\r 1 }  ", `{"支付":"é😀"}`,
		nested(6_000), `"` + strings.Repeat("x", 512<<10-2) + `"`,
	} {
		id, err := e.TryInsert(t, "ORDER_PAYMENT", "payload", p)
		if err != nil {
			t.Errorf("payload of %d bytes (%.30s…): %v", len(p), p, err)
			continue
		}
		sent[id] = p
	}
	// Without a payload a task has {}.
	sent[e.Insert(t, "ORDER_PAYMENT", "biz_id", "no payload")] = `{}`
	for id, want := range sent {
		e.WaitStatus(t, soon, id, "succeeded")
		if calls := sink.CallsOf(id); len(calls) != 1 || calls[0].Body != want {
			t.Errorf("task %d: %d calls, want one with the %d bytes %.40s…", id, len(calls), len(want), want)
		}
	}

	tx, err := e.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	for _, bad := range []string{`{`, ``, `{"a":}`, `NaN`, `{'a':1}`, "\x01", `"` + strings.Repeat("x", 512<<10) + `"`} {
		if _, err := tx.Exec(t.Context(), "SAVEPOINT s"); err != nil {
			t.Fatal(err)
		}
		_, err := tx.Exec(t.Context(), "INSERT INTO taskrelay.task (biz_type, payload) VALUES ('ORDER_PAYMENT', $1::text::json)", bad)
		if err == nil {
			t.Errorf("payload %.20q of %d bytes is not refused", bad, len(bad))
		} else if len(bad) > 1000 && !strings.Contains(err.Error(), "512_kib") {
			t.Errorf("a payload that is too large: %v", err)
		}
		if _, err := tx.Exec(t.Context(), "ROLLBACK TO s"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tx.Exec(t.Context(), "INSERT INTO taskrelay.task (biz_type, biz_id) VALUES ('ORDER_PAYMENT', 'after bad ones')"); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.WaitStatus(t, soon, e.Int(t, "SELECT id FROM taskrelay.task WHERE biz_id = 'after bad ones'"), "succeeded")
	if _, err := e.TryInsert(t, "ORDER_PAYMENT", "payload", nil); err == nil {
		t.Error("payload SQL NULL is not refused")
	}
}

// C-002, A21: an error text that is no UTF-8 is stored cleaned; attempts in the table are the calls that were made.
func TestErrorTextsThatAreNoUTF8(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("bytes", testenv.Reply{Status: 500, Body: "\xff\xfe\x80\x41"})
	sink.Script("latin1", testenv.Reply{Status: 422, Body: "na\xefve caf\xe9"})
	sink.Script("zero", testenv.Reply{Status: 422, Body: "a\x00b"})
	sink.Script("json", testenv.Reply{Status: 200, Body: `{"a":"\u0000"}`})
	sink.Script("nojson", testenv.Reply{Status: 200, Body: "\xff{"})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "3")...)
	for bizID, want := range map[string]struct {
		status string
		calls  int
	}{"bytes": {"dead", 3}, "latin1": {"dead", 1}, "zero": {"dead", 1}, "json": {"succeeded", 1}, "nojson": {"succeeded", 1}} {
		id := e.Insert(t, "ORDER_PAYMENT", "biz_id", bizID)
		row := e.WaitStatus(t, soon, id, "dead", "succeeded")
		equal(t, bizID+": status", row.Status, want.status)
		equal(t, bizID+": calls", len(sink.CallsOf(id)), want.calls)
		equal(t, bizID+": attempts in the log", len(e.Attempts(t, id)), want.calls)
		if want.status == "dead" {
			if text(row.LastError) == "" {
				t.Errorf("%s: no last_error", bizID)
			}
			waitLetter(t, e, "ORDER_PAYMENT", id)
		}
	}
}

// C-003, B70: rows whose message is too large for the server are dead with both sizes; their neighbours run.
func TestOversizeRowsDieAlone(t *testing.T) {
	t.Parallel()
	const limit = 64 << 10
	e := testenv.New(t, func(o *server.Options) { o.MaxPayload = limit })
	sink := testenv.NewSink(t)
	var small, large []int64
	insert := func(payload int, columns ...any) int64 {
		return e.Insert(t, "ORDER_PAYMENT", append([]any{"payload", `"` + strings.Repeat("x", payload) + `"`}, columns...)...)
	}
	for i := range 100 {
		small = append(small, insert(10))
		if i%30 == 0 {
			large = append(large, insert(limit), insert(400_000))
		}
	}
	large = append(large, insert(10, "headers", `{"big": "`+strings.Repeat("h", 70_000)+`"}`))
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	for _, id := range small {
		e.WaitStatus(t, soon, id, "succeeded")
	}
	for _, id := range large {
		row := e.WaitStatus(t, soon, id, "dead")
		equal(t, "reason", text(row.DeadReason), "oversize")
		equal(t, "attempt", row.Attempt, 0)
		if !strings.ContainsAny(text(row.LastError), "0123456789") {
			t.Errorf("last_error does not give the sizes: %q", text(row.LastError))
		}
		// The letter is there, cut if it must be, and says so.
		letter := waitLetter(t, e, "ORDER_PAYMENT", id)
		equal(t, "Task-Reason", letter.Header.Get("Task-Reason"), "oversize")
		if letter.Header.Get("Task-Cut") == "" {
			t.Error("the letter of an oversize task does not say what was left out")
		}
	}
	equal(t, "calls", len(sink.Calls()), len(small))
}

// C-010, C-011, C-008, A15, B18: names that are no subject token are refused at INSERT with the rule in the error;
// allowed ones are used as they are, and nothing reaches the wire that steers it.
func TestNames(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	evil, err := e.Connect("listener").SubscribeSync("evil")
	if err != nil {
		t.Fatal(err)
	}
	good := []string{"order_created", "Refund-Sent", "A", "0", strings.Repeat("a", 63)}
	var vars [][]string
	sinks := map[string]*testenv.Sink{}
	for _, name := range good {
		sinks[name] = testenv.NewSink(t)
		vars = append(vars, testenv.HTTPType(name, sinks[name].URL))
	}
	e.StartRelay()
	e.StartWorker(testenv.Types(vars...)...)
	for _, bad := range []string{
		"order.created", "order created", "заказ", "a*b", "a>b", ".a", "a..b", "a.", "", strings.Repeat("a", 64),
		strings.Repeat("a", 300), "_a", "-a", "a\tb", "a\n", "x\r\nPUB evil 1\r\nA", "$SYS", "a/b", "a\\b",
	} {
		_, err := e.TryInsert(t, bad)
		wantConstraint(t, err, "biz_type_is_1_to_63_letters_digits_underscores_dashes")
	}
	for _, bad := range []string{"x\r\nPUB evil 1\r\nA", "a\x7f", "", strings.Repeat("x", 256), strings.Repeat("😀", 64)} {
		_, err := e.TryInsert(t, "A", "biz_id", bad)
		wantConstraint(t, err, "biz_id_is_1_to_255_bytes_without_control_characters")
		_, err = e.TryInsert(t, "A", "ordering_key", bad)
		wantConstraint(t, err, "ordering_key_is_1_to_255_bytes_without_control_characters")
	}
	_, err = e.TryInsert(t, "A", "priority", "urgent")
	wantConstraint(t, err, "priority_is_high_or_low")
	for _, n := range []int{0, -1, 1001} {
		_, err = e.TryInsert(t, "A", "max_attempts", n)
		wantConstraint(t, err, "max_attempts_is_1_to_1000")
	}
	_, err = e.TryInsert(t, "A", "headers", `["a"]`)
	wantConstraint(t, err, "headers_is_an_object")

	for _, name := range good {
		id := e.Insert(t, name, "biz_id", strings.Repeat("é", 127))
		e.WaitStatus(t, soon, id, "succeeded")
		calls := sinks[name].Calls()
		if len(calls) != 1 || calls[0].BizType != name || calls[0].BizID != strings.Repeat("é", 127) {
			t.Errorf("%s: %d calls at its own target", name, len(calls))
		}
	}
	if m, err := evil.NextMsg(10 * time.Millisecond); err == nil {
		t.Errorf("a message on subject evil: %q", m.Data)
	}
}

// Interleaving 10: what a row's headers say neither steers the server nor forges ours, and the lane goes on.
func TestRowHeadersCannotSteer(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	var ids []int64
	for _, h := range []string{
		`{"Nats-Expected-Last-Sequence": "99"}`, `{"nats-rollup": "all"}`, `{"NATS-TTL": "1s"}`, `{"Nats-Msg-Id": "same"}`, `{"Nats-Msg-Id": "same"}`,
		`{"Nats-Expected-Last-Msg-Id": "x"}`, `{"Nats-Schedule": "@at 2030-01-01T00:00:00Z"}`, `{"Nats-Batch-Id": "b"}`, `{"Nats-Expected-Stream": "X"}`,
		`{"Task-Generation": "7", "Task-Id": "1", "task-phase": "compensate", "TASK-INSTALLATION": "x"}`,
		`{"a b": "x", "a:b": "y", "": "z", "é": "w"}`, `{"n": 1, "o": {}, "l": [1], "z": null}`,
		`{"v": "line\r\nNats-Rollup: all"}`, `{"Idempotency-Key": "forged", "Content-Length": "3", "Connection": "close", "Transfer-Encoding": "x"}`,
	} {
		ids = append(ids, e.Insert(t, "ORDER_PAYMENT", "headers", h))
	}
	for _, id := range ids {
		e.WaitStatus(t, soon, id, "succeeded")
		calls := sink.CallsOf(id)
		if len(calls) != 1 {
			t.Errorf("task %d: %d calls, want 1", id, len(calls))
			continue
		}
		equal(t, "Idempotency-Key", calls[0].Key, installation(t, e)+"-"+itoa(id))
		equal(t, "Task-Phase", calls[0].Phase, "execute")
		equal(t, "body", calls[0].Body, "{}")
	}
}

// Messages that are no tasks, and those of another installation, run nothing and stop nobody (interleaving 5, C-113).
func TestForeignMessagesRunNothing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	worker := e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	first := e.Insert(t, "ORDER_PAYMENT")
	row := e.WaitStatus(t, soon, first, "succeeded")
	publish := func(h nats.Header) {
		_, err := e.NATS.JS.PublishMsg(t.Context(), &nats.Msg{Subject: "tasks.ORDER_PAYMENT.low", Header: h, Data: []byte("{}")})
		if err != nil {
			t.Fatal(err)
		}
	}
	header := func(installation string, id int64, created int64, generation string) nats.Header {
		h := nats.Header{}
		h.Set("Task-Installation", installation)
		h.Set("Task-Id", itoa(id))
		h.Set("Task-Biz-Type", "ORDER_PAYMENT")
		h.Set("Task-Generation", generation)
		h.Set("Task-Created-At", itoa(created))
		h.Set("Task-Phase", "execute")
		h.Set("Task-Priority", "low")
		return h
	}
	own := installation(t, e)
	publish(nil)
	publish(nats.Header{"Task-Id": {"x"}})
	publish(header(own, 999_999, row.CreatedAt.UnixMicro(), "0")) // no such row
	publish(header(own, first, row.CreatedAt.UnixMicro()+1, "0")) // another row that had this id
	publish(header(own, first, row.CreatedAt.UnixMicro(), "9"))   // a generation that never was
	// Rows removed by hand.
	deleted := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(700*time.Millisecond))
	e.Exec(t, "DELETE FROM taskrelay.task WHERE id = $1", deleted)
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left, want 0", n)
		}
		return nil
	})
	// A foreign message is not ours to remove.
	foreign := "00000000-0000-4000-8000-000000000000"
	publish(header(foreign, first, row.CreatedAt.UnixMicro(), "0"))
	worker.WaitLog(t, soon, foreign)
	second := e.Insert(t, "ORDER_PAYMENT")
	e.WaitStatus(t, soon, second, "succeeded")
	testenv.Eventually(t, soon, func() error { // the acknowledgement comes after the row
		if n := e.NATS.Messages(t, "TASKS"); n != 1 {
			return errorf("%d messages are left, want the foreign one", n)
		}
		return nil
	})
	equal(t, "calls", len(sink.Calls()), 2)
}

// C-012: a stream that already captures the subjects stops the start with its name; rows stay.
func TestOverlappingStreamIsNamed(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	if _, err := e.NATS.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "SOMEBODY_ELSES", Subjects: []string{"tasks.>"}}); err != nil {
		t.Fatal(err)
	}
	id := e.Insert(t, "ORDER_PAYMENT")
	relay := e.StartRelay()
	relay.WaitLog(t, soon, "SOMEBODY_ELSES")
	equal(t, "state of the task", e.Task(t, id).Status, "pending")
	if _, err := e.NATS.JS.Stream(t.Context(), "TASKS"); err == nil {
		t.Error("a half-made stream TASKS exists")
	}
}

// C-029, C-033, C-034, C-021, C2, B50, B55, C-131: a wrong variable stops the start with its name and what is expected.
func TestWrongConfigurationStopsTheStart(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	worker := func(kv ...string) []string {
		return e.Vars(append(testenv.HTTPType("ORDER_PAYMENT", "http://127.0.0.1:1/x"), kv...)...)
	}
	for _, c := range []struct {
		binary string
		vars   []string
		names  string // what the output must name
	}{
		{"relay", e.Vars("TASKRELAY_DATABASE_URL="), "TASKRELAY_DATABASE_URL"},
		{"relay", e.Vars("TASKRELAY_NATS_URL="), "TASKRELAY_NATS_URL"},
		{"relay", e.Vars("TASKRELAY_RELAY_ENABLED=yes"), "TASKRELAY_RELAY_ENABLED"},
		{"relay", e.Vars("TASKRELAY_RELAY_ENABLED=2"), "TASKRELAY_RELAY_ENABLED"},
		{"relay", e.Vars("TASKRELAY_RELAY_BATCH=0"), "TASKRELAY_RELAY_BATCH"},
		{"relay", e.Vars("TASKRELAY_RELAY_POLL_MAX=20"), "TASKRELAY_RELAY_POLL_MAX"},
		{"relay", e.Vars("TASKRELAY_RELAY_BIZ_TYPES=a.b"), "TASKRELAY_RELAY_BIZ_TYPES"},
		{"relay", e.Vars("TASKRELAY_NAMESPACE=a.b"), "TASKRELAY_NAMESPACE"},
		{"relay", e.Vars("TASKRELAY_SCHEMA=a-b"), "TASKRELAY_SCHEMA"},
		{"relay", e.Vars("TASKRELAY_RELAY_BATSH=5"), "TASKRELAY_RELAY_BATCH"}, // the nearest known one
		{"relay", e.Vars("TASKRELAY_LOG_LEVEL=loud"), "TASKRELAY_LOG_LEVEL"},
		{"relay", e.Vars("TASKRELAY_STREAM_REPLICAS=6"), "TASKRELAY_STREAM_REPLICAS"},
		{"worker", e.Vars(), "TASKRELAY_BIZ_TYPES"},
		{"worker", e.Vars("TASKRELAY_BIZ_TYPES="), "TASKRELAY_BIZ_TYPES"},
		{"worker", e.Vars("TASKRELAY_BIZ_TYPES=X"), "TASKRELAY_BIZ_X_TARGET"},
		{"worker", e.Vars("TASKRELAY_BIZ_TYPES=*"), "TASKRELAY_BIZ_TYPES"},
		{"worker", worker("TASKRELAY_WORKER_LEASE=60"), "TASKRELAY_WORKER_LEASE"},
		{"worker", worker("TASKRELAY_WORKER_LEASE=1d"), "TASKRELAY_WORKER_LEASE"},
		{"worker", worker("TASKRELAY_WORKER_LEASE="), "TASKRELAY_WORKER_LEASE"},
		{"worker", worker("TASKRELAY_WORKER_LEASE=0"), "TASKRELAY_WORKER_LEASE"},
		{"worker", worker("TASKRELAY_WORKER_LEASE=-5s"), "TASKRELAY_WORKER_LEASE"},
		{"worker", worker("TASKRELAY_WORKER_CONCURRENCY=0"), "TASKRELAY_WORKER_CONCURRENCY"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_STRATEGY=nonsense"), "random"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_BASE_DELAY=0"), "TASKRELAY_BIZ_ORDER_PAYMENT_BASE_DELAY"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_BASE_DELAY=-2s"), "TASKRELAY_BIZ_ORDER_PAYMENT_BASE_DELAY"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_MAX_DELAY=0"), "TASKRELAY_BIZ_ORDER_PAYMENT_MAX_DELAY"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_MAX_DELAY=10ms"), "TASKRELAY_BIZ_ORDER_PAYMENT_MAX_DELAY"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_MAX_ATTEMPTS=0"), "TASKRELAY_BIZ_ORDER_PAYMENT_MAX_ATTEMPTS"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_MAX_ATTEMPTS=-1"), "TASKRELAY_BIZ_ORDER_PAYMENT_MAX_ATTEMPTS"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_JITTER=1.5"), "TASKRELAY_BIZ_ORDER_PAYMENT_JITTER"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_TARGET=ftp://x"), "TASKRELAY_BIZ_ORDER_PAYMENT_TARGET"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_PRIORITY=urgent"), "TASKRELAY_BIZ_ORDER_PAYMENT_PRIORITY"},
		{"worker", worker("TASKRELAY_BIZ_ORDER_PAYMENT_BASE_DELEY=1s"), "TASKRELAY_BIZ_ORDER_PAYMENT_BASE_DELAY"},
		{"worker", testenv.Types(worker(), testenv.HTTPType("ORDER-PAYMENT", "http://127.0.0.1:1/x")), "ORDER-PAYMENT"},
		{"relay", e.Vars("TASKRELAY_DATABASE_URL=postgres://u:hunter2@127.0.0.1:1/db?sslmode=disable&connect_timeout=1", "TASKRELAY_MIGRATE=never"), "TASKRELAY_MIGRATE"},
	} {
		t.Run(fmt.Sprintf("%s %s", c.binary, c.names), func(t *testing.T) {
			out, code := testenv.Run(t, c.binary, nil, c.vars...)
			if code == 0 {
				t.Errorf("exit code 0, want another\n%s", out)
			}
			if !strings.Contains(out, c.names) {
				t.Errorf("the output does not name %s:\n%s", c.names, out)
			}
			if strings.Contains(out, "hunter2") || strings.Contains(out, "goroutine ") {
				t.Errorf("the output shows a password or a stack:\n%s", out)
			}
		})
	}
}

// What is written with blanks around it is meant; lists are trimmed; a URL with a port, a query and a comma is whole.
func TestGenerousConfiguration(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay("TASKRELAY_RELAY_ENABLED=TRUE",
		// One env file serves all binaries, and Kubernetes adds its own.
		"TASKRELAY_WORKER_LEASE=60s", "TASKRELAY_BIZ_A_TARGET=noop:", "TASKRELAY_BIZ_TYPES=A",
		"TASKRELAY_SERVICE_HOST=10.0.0.1", "TASKRELAY_PORT=tcp://10.0.0.1:80", "TASKRELAY_PORT_80_TCP=tcp://10.0.0.1:80")
	e.StartWorker("TASKRELAY_BIZ_TYPES= A , B ", "TASKRELAY_BIZ_A_TARGET="+sink.URL+"/x?y=a=b,c", "TASKRELAY_BIZ_B_TARGET=noop:", "TASKRELAY_RELAY_BATCH=7")
	a, b := e.Insert(t, "A"), e.Insert(t, "B")
	e.WaitStatus(t, soon, a, "succeeded")
	e.WaitStatus(t, soon, b, "succeeded")
	equal(t, "path", sink.Calls()[0].Path, "/x")
}
