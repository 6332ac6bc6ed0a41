package tests

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
	"github.com/taskrelay/taskrelay/internal/testenv"
)

// psql runs one statement as a person would, and returns what it printed.
func psql(t *testing.T, url, sql string) string {
	t.Helper()
	bin, err := pgtemp.Find()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(bin, "psql")
	if _, err := exec.LookPath(path); err != nil {
		if path, err = exec.LookPath("psql"); err != nil {
			t.Fatalf("psql is not in %s nor in PATH: install the PostgreSQL client programs", bin)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", url, "-c", sql).CombinedOutput()
	if err != nil {
		t.Fatalf("psql: %v\n%s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// A plain INSERT by psql becomes one call with exactly that body, and the row and its log tell so.
func TestInsertByPsqlIsDeliveredByteForByte(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL+"/pay")...)

	const body = `{"amount": 12345678901234567890.10}`
	psql(t, e.URL, `INSERT INTO taskrelay.task (biz_type, biz_id, payload) VALUES ('ORDER_PAYMENT', 'O-1', '`+body+`')`)
	id := e.Int(t, "SELECT id FROM taskrelay.task WHERE biz_id = 'O-1'")
	e.WaitStatus(t, soon, id, "succeeded")

	calls := sink.Calls()
	if len(calls) != 1 {
		t.Fatalf("calls: got %d, want 1", len(calls))
	}
	equal(t, "body", calls[0].Body, body)
	equal(t, "path", calls[0].Path, "/pay")
	equal(t, "content type", calls[0].Header.Get("Content-Type"), "application/json")
	equal(t, "outcomes", outcomes(t, e, id), "[succeeded]")
	equal(t, "state", psql(t, e.URL, "SELECT status FROM taskrelay.task WHERE biz_id = 'O-1'"), "succeeded")
}

// 500 three times, then 200: four attempts with growing delays under one key.
func TestRetriesUseOneKeyAndGrowingDelays(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("O-2", testenv.Statuses(500, 500, 500, 200)...)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "BASE_DELAY", "200ms")...)

	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-2")
	row := e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "attempt", row.Attempt, 4)
	equal(t, "outcomes", outcomes(t, e, id), "[failed failed failed succeeded]")
	calls := sink.CallsOf(id)
	if len(calls) != 4 {
		t.Fatalf("calls: got %d, want 4", len(calls))
	}
	for i, c := range calls {
		equal(t, "key", c.Key, installation(t, e)+"-"+itoa(id))
		equal(t, "Task-Attempt", c.Attempt, i+1)
		if i == 0 {
			continue
		}
		want := 200 * time.Millisecond << (i - 1)
		if gap := c.At.Sub(calls[i-1].Ended); gap < want-10*time.Millisecond || gap > want+15*time.Second { // late by what a busy machine takes, never early
			t.Errorf("gap before attempt %d: got %v, want %v", i+1, gap, want)
		}
	}
}

// 422 is permanent: dead after one attempt, and in TASKS_DEAD.
func TestPermanentStatusIsDeadAfterOneAttempt(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422, Body: "no such order"})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)

	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-3", "payload", `{ "order": "O-3" }`)
	row := e.WaitStatus(t, soon, id, "dead")
	equal(t, "attempt", row.Attempt, 1)
	equal(t, "reason", text(row.DeadReason), "permanent")
	equal(t, "calls", len(sink.CallsOf(id)), 1)
	letter := waitLetter(t, e, "ORDER_PAYMENT", id)
	equal(t, "body of the dead letter", string(letter.Data), `{ "order": "O-3" }`)
	equal(t, "Task-Reason", letter.Header.Get("Task-Reason"), "permanent")
}

// B73, B87: what a row says about its target is ignored. C-125: redirects are not followed.
func TestOnlyTheConfiguredTargetIsCalled(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink, evil := testenv.NewSink(t), testenv.NewSink(t)
	sink.Script("redirected", testenv.Reply{Status: 307, Header: map[string]string{"Location": evil.URL}}, testenv.Reply{Status: 302, Header: map[string]string{"Location": evil.URL}})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "2")...)
	id := e.Insert(t, "ORDER_PAYMENT", "headers", `{"Target": "`+evil.URL+`", "Host": "evil", "tenant": "t1", "traceparent": "00-a-b-01"}`)
	redirected := e.Insert(t, "ORDER_PAYMENT", "biz_id", "redirected")
	e.WaitStatus(t, soon, id, "succeeded")
	e.WaitStatus(t, soon, redirected, "dead")
	equal(t, "calls to a target named by a row or a redirect", len(evil.Calls()), 0)
	c := sink.CallsOf(id)[0]
	equal(t, "header tenant", c.Header.Get("tenant"), "t1")
	equal(t, "header traceparent", c.Header.Get("traceparent"), "00-a-b-01")
}

// C-028: Retry-After is honoured as seconds and as a date; without it the normal delay holds.
func TestRetryAfterIsHonoured(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	date := time.Now().Add(4 * time.Second).UTC().Truncate(time.Second)
	sink.Script("seconds", testenv.Reply{Status: 429, Header: map[string]string{"Retry-After": "2"}}, testenv.Reply{})
	sink.Script("date", testenv.Reply{Status: 503, Header: map[string]string{"Retry-After": date.Format("Mon, 02 Jan 2006 15:04:05 GMT")}}, testenv.Reply{})
	sink.Script("none", testenv.Reply{Status: 503}, testenv.Reply{})
	sink.Script("nonsense", testenv.Reply{Status: 503, Header: map[string]string{"Retry-After": "tomorrow"}}, testenv.Reply{})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	wait := func(bizID string) (gap time.Duration, second time.Time) {
		id := e.Int(t, "SELECT id FROM taskrelay.task WHERE biz_id = $1", bizID)
		e.WaitStatus(t, soon, id, "succeeded")
		calls := sink.CallsOf(id)
		if len(calls) != 2 {
			t.Fatalf("%s: %d calls, want 2", bizID, len(calls))
		}
		return calls[1].At.Sub(calls[0].Ended), calls[1].At
	}
	for _, id := range []string{"seconds", "date", "none", "nonsense"} {
		e.Insert(t, "ORDER_PAYMENT", "biz_id", id)
	}
	if gap, _ := wait("seconds"); gap < 2*time.Second-20*time.Millisecond {
		t.Errorf("Retry-After: 2: the second call came after %v", gap)
	}
	if _, at := wait("date"); at.Before(date) {
		t.Errorf("Retry-After with a date: the second call came at %v, asked for %v", at, date)
	}
	for _, id := range []string{"none", "nonsense"} {
		if gap, _ := wait(id); gap > 2*time.Second {
			t.Errorf("%s: the second call came after %v, want the normal delay of 100ms", id, gap)
		}
	}
}

// C-127, C-126, B91: an endless body is read to a cap; a silent target ends at the limit.
func TestBadTargetsDoNotHoldTheWorker(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("huge", testenv.Reply{Status: 200, Body: strings.Repeat("x", 32<<20)})
	sink.Script("huge error", testenv.Reply{Status: 422, Body: strings.Repeat("é", 16<<20)})
	sink.Script("silent", testenv.Reply{Hang: true})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "TIMEOUT", "2s", "MAX_ATTEMPTS", "1")...)
	huge := e.Insert(t, "ORDER_PAYMENT", "biz_id", "huge")
	hugeError := e.Insert(t, "ORDER_PAYMENT", "biz_id", "huge error")
	silent := e.Insert(t, "ORDER_PAYMENT", "biz_id", "silent")
	e.WaitStatus(t, soon, huge, "succeeded")
	dead := e.WaitStatus(t, soon, hugeError, "dead")
	if n := len(text(dead.LastError)); n == 0 || n > 8<<10 {
		t.Errorf("last_error of a huge body has %d bytes, want 1 to 8192", n)
	}
	e.WaitStatus(t, soon, silent, "dead")
	equal(t, "outcome of a silent target", outcomes(t, e, silent), "[timeout]")
	for _, a := range e.Attempts(t, silent) {
		if d := a.FinishedAt.Sub(a.StartedAt); d < 1900*time.Millisecond || d > 8*time.Second {
			t.Errorf("an attempt with a limit of 2s took %v", d)
		}
	}
}
