package tests

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// What an operator at three in the morning meets first: a login without the right, a task that was compensated, a server
// that is away. Each answer is one line that says what to do.
func TestCLIRefusalsSayWhatToDo(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-1", "payload", `{"n": 12345678901234567890.10}`)
	nats := "TASKRELAY_NATS_URL=" + e.NATS.URL
	as := func(role string) []string { return []string{"TASKRELAY_DATABASE_URL=" + withRole(e.URL, role), nats} }
	for _, c := range []struct {
		role string
		args []string
	}{
		{"taskrelay_viewer", []string{"list"}},
		{"taskrelay_viewer", []string{"show", itoa(id)}},
		{"taskrelay_viewer", []string{"cancel", itoa(id), "--reason", "x"}},
		{"taskrelay_viewer", []string{"enqueue", "A"}},
		{"taskrelay_producer", []string{"list"}},
	} {
		r := runCLI(t, "", as(c.role), c.args...)
		r.ok(t, 1, "permission denied", "taskrelay_operator", "taskrelay_producer")
	}
	runCLI(t, "", as("taskrelay_viewer"), "dead", "list").ok(t, 0)
	runCLI(t, "", as("taskrelay_producer"), "enqueue", "A").ok(t, 0)
	runCLI(t, "", as("taskrelay_operator"), "list", "--type", "ORDER_PAYMENT").ok(t, 0, "O-1")
	runCLI(t, "", []string{"TASKRELAY_DATABASE_URL=postgres://u:hunter2@127.0.0.1:1/app", nats}, "list").ok(t, 7, "127.0.0.1:1/app", "refused")

	e.Exec(t, `UPDATE taskrelay.task SET status = 'dead', compensation = 'done', compensations = 1, finished_at = now(), dead_at = now(),
		dead_reason = 'permanent' WHERE id = $1`, id)
	cli(t, e, "", "requeue", itoa(id), "--reason", "x").ok(t, 4, "compensation was done", "add --allow-compensated")
	cli(t, e, "", "requeue", itoa(id), "--reason", "x", "--allow-compensated").ok(t, 0)
	e.Exec(t, `UPDATE taskrelay.task SET status = 'succeeded', finished_at = now() WHERE id = $1`, id)
	cli(t, e, "", "reset", "ORDER_PAYMENT/O-1", "--reason", "x").ok(t, 4, "add --allow-succeeded")
	refused := cli(t, e, "", "requeue", itoa(id), "--reason", "x")
	refused.ok(t, 4, "has succeeded")
	if strings.Contains(refused.errOut, "--allow-succeeded") {
		t.Errorf("requeue has no such flag: %s", refused.errOut)
	}
	for _, format := range []string{"json", "jsonl"} {
		shown := cli(t, e, "", "show", itoa(id), "-o", format)
		shown.ok(t, 0, "12345678901234567890.10")
		if !json.Valid([]byte(shown.out)) {
			t.Errorf("-o %s is no JSON: %s", format, shown.out)
		}
	}
	cli(t, e, "", "--version").ok(t, 0, "taskrelay")
}
