package tests

import (
	"encoding/json"
	"strings"
	"syscall"
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func TestCLIChangesByID(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	id := inState(t, e.Database, "pending")
	dead := inState(t, e.Database, "dead")
	done := inState(t, e.Database, "succeeded")

	cli(t, e, "", "priority", itoa(id), "--to", "high", "--dry-run").ok(t, 0, "WOULD CHANGE", "dry run: nothing was changed")
	equal(t, "priority after a dry run", e.Task(t, id).Priority, "low")
	cli(t, e, "", "priority", itoa(id), "--to", "high").ok(t, 0)
	equal(t, "priority", e.Task(t, id).Priority, "high")
	cli(t, e, "", "priority", itoa(id), "--to", "urgent").ok(t, 2, "expected high or low")
	cli(t, e, "", "rerun", itoa(done), "--reason", "x").ok(t, 4, "add --allow-succeeded")
	cli(t, e, "", "rerun", itoa(done), "--reason", "report was lost", "--allow-succeeded").ok(t, 0)
	equal(t, "status", e.Task(t, done).Status, "pending")
	cli(t, e, "", "reset", itoa(done), "--reason", "counted wrong").ok(t, 0)
	cli(t, e, "", "cancel", itoa(id), "--compensate").ok(t, 0)
	equal(t, "status", e.Task(t, id).Status, "cancelled")
	cli(t, e, "", "dead", "discard", itoa(dead)).ok(t, 2, "--reason is required")
	cli(t, e, "", "dead", "discard", itoa(dead), itoa(id), "--reason", "paid by hand", "--yes").ok(t, 5, "cancelled already")
	cli(t, e, "", "dead", "requeue", itoa(dead), "--reason", "not paid after all").ok(t, 0)
	cli(t, e, "", "delete", itoa(dead), "--reason", "x").ok(t, 2, "add --yes")

	undo := inState(t, e.Database, "pending")
	e.Exec(t, `UPDATE taskrelay.task SET `+states["compensating"]+` WHERE id = $1`, undo)
	cli(t, e, "", "cancel", itoa(undo)).ok(t, 4, "it is being compensated", "add --allow-uncompensated")
	cli(t, e, "", "cancel", itoa(undo), "--compensate", "--allow-uncompensated").ok(t, 2, "give one of them")
	cli(t, e, "", "cancel", itoa(undo), "--allow-uncompensated", "--reason", "refunded by hand").ok(t, 0, "what it began is not undone")
	cli(t, e, "", "show", itoa(undo)).ok(t, 0, "what it began was not undone")

	// Many ids are several transactions, each short.
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'MANY' FROM generate_series(1, 1200)`)
	ids := e.Text(t, `SELECT string_agg(id::text, E'\n') FROM taskrelay.task WHERE biz_type = 'MANY'`)
	r := cli(t, e, ids, "cancel", "-", "--yes", "--reason", "test data", "-o", "csv").ok(t, 0)
	equal(t, "lines", strings.Count(r.out, "\n"), 1201)
	equal(t, "transactions", e.Int(t, `SELECT count(DISTINCT at) FROM taskrelay.audit WHERE biz_type = 'MANY'`), 3)
}

func TestCLIBulk(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	deadTasks(t, e.Database, "REFUND", 60)
	e.Exec(t, `UPDATE taskrelay.task SET last_error = 'card ' || id || ' was blocked', error_class = 'card' WHERE biz_id IN ('D-1', 'D-2', 'D-3')`)
	e.Exec(t, `UPDATE taskrelay.task SET compensation = 'done', compensations = 1 WHERE biz_id = 'D-60'`)

	var preview struct {
		Action string
		Found  int
		More   bool
		Sample []map[string]any
	}
	r := cli(t, e, "", "requeue", "--type", "REFUND", "--error", "bank is down", "--dry-run", "-o", "json").ok(t, 0)
	noError(t, "dry run "+r.out, json.Unmarshal([]byte(r.out), &preview))
	if preview.Action != "requeue" || preview.Found != 57 || preview.More || len(preview.Sample) != 5 || preview.Sample[0]["status"] != "dead" {
		t.Errorf("dry run: %s", r.out)
	}
	cli(t, e, "", "dead", "requeue", "--type", "REFUND", "--dry-run").ok(t, 0, "would requeue 60 tasks", "D-1")
	cli(t, e, "", "requeue", "--type", "REFUND", "--reason", "x").ok(t, 2, "requeue 60 tasks", "add --yes")
	cli(t, e, "", "requeue", "--type", "REFUND", "--yes").ok(t, 2, "--reason is required")
	cli(t, e, "", "run", "--type", "REFUND", "--yes").ok(t, 2, "--reason is required")
	cli(t, e, "", "requeue", "--type", "NOBODY", "--reason", "x", "--yes").ok(t, 3, "no task matches")
	cli(t, e, "", "requeue", "1", "--type", "REFUND", "--reason", "x").ok(t, 2, "not both")
	cli(t, e, "", "requeue", "--type", "", "--reason", "x", "--yes").ok(t, 2, "--type is empty")
	cli(t, e, "", "requeue", "--status", "dead", "--reason", "x", "--yes").ok(t, 2, "the filter is empty", "--all")
	cli(t, e, "", "delete", "--type", "REFUND", "--reason", "x", "--yes").ok(t, 2, "needs a status", "--status")
	cli(t, e, "", "requeue", "--type", "REFUND", "--status", "running", "--reason", "x", "--yes").ok(t, 2, "not for tasks that are running")
	equal(t, "bulks", e.Int(t, `SELECT count(*) FROM taskrelay.bulk`), 0)

	// Nobody works it off yet: it can be watched, found again, and cancelled.
	started := cli(t, e, "", "requeue", "--type", "REFUND", "--reason", "bank is back", "--yes", "--detach", "-o", "json").ok(t, 0, "started", "taskrelay bulk watch")
	var bulks []struct{ ID, State, Actor, Reason string }
	noError(t, started.out, json.Unmarshal([]byte(started.out), &bulks))
	id := bulks[0].ID
	if bulks[0].State != "open" || !strings.HasPrefix(bulks[0].Actor, "cli:alice@") || bulks[0].Reason != "bank is back" {
		t.Errorf("got %s", started.out)
	}
	equal(t, "second press", cli(t, e, "", "requeue", "--type", "REFUND", "--reason", "again", "--yes", "--detach", "-o", "id").ok(t, 0, "doing this already").out, id+"\n")
	cli(t, e, "", "bulk", "watch", id, "--timeout", "1s").ok(t, 1, "waiting for a relay: none has been seen", "detached", "taskrelay bulk cancel "+id)
	cli(t, e, "", "bulk", "list", "--open").ok(t, 0, "waiting for relay", `"type": "REFUND"`)
	watch := testenv.Start(t, "taskrelay", []string{"bulk", "watch", id}, "TASKRELAY_DATABASE_URL="+e.URL)
	watch.WaitLog(t, soon, "waiting for a relay")
	watch.Signal(t, syscall.SIGINT)
	equal(t, "exit code of an interrupted watch", watch.Wait(t, soon), 130)
	watch.WaitLog(t, soon, "detached: bulk "+id)
	cli(t, e, "", "bulk", "cancel", id, "--reason", "wrong filter").ok(t, 0, "cancelled")
	cli(t, e, "", "bulk", "cancel", id).ok(t, 4, "it is cancelled already")
	cli(t, e, "", "bulk", "watch", id).ok(t, 4, "cancelled by cli:alice@", "wrong filter")
	cli(t, e, "", "bulk", "watch", "999").ok(t, 3, "not found")
	cli(t, e, "", "bulk", "watch", "x").ok(t, 2, "number of a bulk")

	// With a relay: one group is discarded, the rest requeued, and what was skipped is explained.
	e.RunRelay()
	var groups []struct {
		Group, Requeue string
		Count          int
	}
	r = cli(t, e, "", "dead", "groups", "--type", "REFUND", "-o", "json").ok(t, 0)
	noError(t, r.out, json.Unmarshal([]byte(r.out), &groups))
	if len(groups) != 2 || groups[0].Count != 57 || groups[1].Count != 3 ||
		!strings.HasPrefix(groups[0].Requeue, "taskrelay dead requeue --group "+groups[0].Group+" ") || !strings.Contains(groups[0].Requeue, "--allow-compensated") {
		t.Fatalf("groups: %s", r.out)
	}
	cli(t, e, "", "dead", "discard", "--group", groups[1].Group, "--reason", "cards are blocked", "--yes").ok(t, 0, "done")
	equal(t, "discarded", e.Text(t, `SELECT string_agg(biz_id, ' ' ORDER BY id) FROM taskrelay.task WHERE status = 'cancelled'`), "D-1 D-2 D-3")
	cli(t, e, "", "dead", "requeue", "--group", groups[0].Group, "--reason", "bank is back", "--yes").ok(t, 5, "56", "skipped 1: its compensation was done")
	cli(t, e, "", "dead", "requeue", "--all", "--reason", "bank is back", "--yes").ok(t, 4, "skipped 1")
	cli(t, e, "", "dead", "requeue", "--all", "--allow-compensated", "--reason", "bank takes it", "--yes").ok(t, 0)
	cli(t, e, "", "dead", "requeue", "--all", "--reason", "bank is back", "--yes").ok(t, 3, "no task matches")
	equal(t, "pending", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'pending'`), 57)
	cli(t, e, "", "cancel", "--older-than", "1ms", "--reason", "test is over", "--yes", "-o", "jsonl").ok(t, 0, `"changed":57`)
	list := cli(t, e, "", "bulk", "list", "-o", "csv").ok(t, 0)
	equal(t, "bulks listed", strings.Count(list.out, "\n"), 7)
}
