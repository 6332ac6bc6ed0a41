package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// cliRun is what one run of the real binary gave.
type cliRun struct {
	code        int
	out, errOut string
}

// cli runs cmd/taskrelay with both streams apart, on an environment's servers.
func cli(t *testing.T, e *testenv.Env, stdin string, args ...string) cliRun {
	t.Helper()
	return runCLI(t, stdin, []string{"TASKRELAY_DATABASE_URL=" + e.URL, "TASKRELAY_NATS_URL=" + e.NATS.URL, "USER=alice"}, args...)
}

func runCLI(t *testing.T, stdin string, env []string, args ...string) cliRun {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, testenv.Binary(t, "taskrelay"), args...)
	cmd.Env = env
	cmd.Stdin = strings.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		t.Fatalf("taskrelay %v: %v", args, err)
	}
	return cliRun{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
}

// ok fails the test unless the run ended with the code and printed all texts, on either stream.
func (r cliRun) ok(t *testing.T, code int, texts ...string) cliRun {
	t.Helper()
	if r.code != code {
		t.Fatalf("exit code: got %d, want %d\nstdout: %s\nstderr: %s", r.code, code, r.out, r.errOut)
	}
	for _, text := range texts {
		if !strings.Contains(r.out+r.errOut, text) {
			t.Errorf("%q is not in the output\nstdout: %s\nstderr: %s", text, r.out, r.errOut)
		}
	}
	return r
}

func TestCLIEnqueuesListsAndShows(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	const payload = `{"amount": 12345678901234567890.10, "a":1}`

	id := strings.TrimSpace(cli(t, e, "", "enqueue", "ORDER_PAYMENT", "--biz-id", "O-1", "--payload", payload, "--high",
		"--header", "tenant=acme", "--max-attempts", "3", "-o", "id").ok(t, 0).out)
	again := cli(t, e, payload, "enqueue", "ORDER_PAYMENT", "--biz-id", "O-1", "--payload", "-", "-o", "json").ok(t, 0, "nothing changed")
	var ref struct {
		ID  string
		New bool
	}
	if err := json.Unmarshal([]byte(again.out), &ref); err != nil || ref.ID != id || ref.New {
		t.Errorf("second enqueue: got %s (%v), want id %q as a string, not new", again.out, err, id)
	}
	cli(t, e, "", "enqueue", "REPORT", "--in", "1h").ok(t, 0)

	equal(t, "payload", cli(t, e, "", "show", "ORDER_PAYMENT/O-1", "--payload").ok(t, 0).out, payload)
	cli(t, e, "", "show", id).ok(t, 0, "ORDER_PAYMENT/O-1", "pending", "unknown type", "high", "of 3", `{"tenant": "acme"}`, payload)

	equal(t, "ids of one type", cli(t, e, "", "list", "--type", "ORDER_PAYMENT", "-o", "id").ok(t, 0).out, id+"\n")
	lines := strings.Split(strings.TrimSpace(cli(t, e, "", "list", "--status", "pending").ok(t, 0).out), "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[0], "ID\tTYPE\tBIZ ID\t") || !strings.Contains(lines[1], "REPORT") {
		t.Errorf("piped list: got %q, want a header and two tab-separated lines, the newest first", lines)
	}
	equal(t, "no match", cli(t, e, "", "list", "--biz-id", "nope", "-o", "json").ok(t, 0).out, "[]\n")

	// What cannot work is refused with the reason, and nothing is written.
	cli(t, e, "", "enqueue", "no dots.please").ok(t, 2, "biz type")
	cli(t, e, "", "enqueue", "A", "--payload", `{"a":}`).ok(t, 2, "no JSON", "byte")
	cli(t, e, "", "enqueue", "A", "--header", "Nats-Msg-Id=x").ok(t, 2, "reserved")
	cli(t, e, "", "enqueue", "A", "--max-attempts", "0").ok(t, 2, "1 to 1000")
	equal(t, "tasks", e.Int(t, "SELECT count(*) FROM taskrelay.task"), 2)
}

func TestCLIChangesAreGuardedAndAudited(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-1")
	other := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-2")

	cli(t, e, "", "requeue", itoa(id), "--reason", "x").ok(t, 4, "only dead and cancelled")
	cli(t, e, "", "requeue", "999999", "--reason", "x").ok(t, 3, "no such task")
	cli(t, e, "", "show", "ORDER_PAYMENT/nope").ok(t, 3, "not found")
	cli(t, e, "", "delay", itoa(id), "--by", "2h").ok(t, 0)
	equal(t, "due in two hours", e.Int(t, "SELECT round(extract(epoch FROM next_attempt_at - now()) / 600) FROM taskrelay.task WHERE id = $1", id), 12)
	cli(t, e, "", "run", "ORDER_PAYMENT/O-1").ok(t, 0)
	equal(t, "due now", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE id = $1 AND next_attempt_at <= now()", id), 1)

	// Several tasks need a confirmation, and without a terminal nobody can give it.
	cli(t, e, "", "cancel", itoa(id), itoa(other)).ok(t, 2, "cancel 2 tasks: add --yes")
	equal(t, "cancelled without confirmation", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'cancelled'"), 0)
	cli(t, e, itoa(id)+"\n"+itoa(other)+"\n", "cancel", "-", "--yes", "--reason", "ordered by mistake").ok(t, 0)
	equal(t, "cancelled", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'cancelled'"), 2)
	cli(t, e, "", "cancel", itoa(id)).ok(t, 4, "cancelled already")

	cli(t, e, "", "requeue", itoa(id), "999999", "--reason", "bank is back", "-y").ok(t, 5, "no such task")
	cli(t, e, "", "reset", "ORDER_PAYMENT/O-2", "--reason", "start over").ok(t, 0)
	cli(t, e, "", "reset", "ORDER_PAYMENT/O-3", "--reason", "start over").ok(t, 3, "not found")

	equal(t, "audit", e.Text(t, "SELECT string_agg(action, ' ' ORDER BY id) FROM taskrelay.audit WHERE task_id = $1", id), "delay run_now cancel requeue")
	equal(t, "reason", e.Text(t, "SELECT reason FROM taskrelay.audit WHERE task_id = $1 AND action = 'requeue'", id), "bank is back")
	if actor := e.Text(t, "SELECT max(actor) FROM taskrelay.audit"); !strings.HasPrefix(actor, "cli:alice@") {
		t.Errorf("actor: got %q, want cli:alice@<host>", actor)
	}
	cli(t, e, "", "show", itoa(id)).ok(t, 0, "changes (4)", "requeue by cli:alice@", "bank is back")
}

func TestCLIRelayRunOncePublishesAllThatIsDue(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	for range 3 {
		e.Insert(t, "ORDER_PAYMENT")
	}
	e.Insert(t, "REFUND_CARD")
	counts := func(args ...string) (published int) {
		t.Helper()
		var c struct{ Published int }
		r := cli(t, e, "", append([]string{"relay", "run-once", "-o", "json"}, args...)...).ok(t, 0)
		if err := json.Unmarshal([]byte(r.out), &c); err != nil {
			t.Fatalf("%v: %s", err, r.out)
		}
		return c.Published
	}
	equal(t, "published of one type", counts("--biz-type", "ORDER_PAYMENT"), 3)
	equal(t, "published of all", counts(), 1)
	equal(t, "published when nothing is due", counts(), 0)
}

func TestCLIListsDeadTasksAndBringsThemBack(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("O-1", testenv.Reply{Status: 422, Body: "card is closed"}, testenv.Reply{})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-1")
	e.WaitStatus(t, soon, id, "dead")
	waitLetter(t, e, "ORDER_PAYMENT", id)
	if _, err := e.Pool.Exec(t.Context(), "UPDATE taskrelay.biz_type SET title = 'Take a payment', runbook_url = 'https://runbooks/x'"); err != nil {
		t.Fatal(err)
	}

	var dead []map[string]any
	r := cli(t, e, "", "dead", "list", "-o", "json").ok(t, 0)
	if err := json.Unmarshal([]byte(r.out), &dead); err != nil || len(dead) != 1 {
		t.Fatalf("%v: %s", err, r.out)
	}
	for k, want := range map[string]string{"id": itoa(id), "biz_id": "O-1", "reason": "permanent", "title": "Take a payment",
		"runbook_url": "https://runbooks/x", "subject": "dead.ORDER_PAYMENT." + itoa(id)} {
		if dead[0][k] != want {
			t.Errorf("%s: got %v, want %s", k, dead[0][k], want)
		}
	}

	// The commands that the table hints at work as they are.
	hint := cli(t, e, "", "dead", "list").ok(t, 0, "permanent", "card is closed").errOut
	nats := testenv.NATSCLI(t, e.NATS.URL)
	shown := 0
	for line := range strings.Lines(hint) {
		args, ok := strings.CutPrefix(strings.TrimSpace(line), "nats --server "+e.NATS.URL+" ")
		if !ok {
			continue
		}
		out := nats(strings.Fields(strings.ReplaceAll(args, "'", ""))...)
		if !strings.Contains(out, "dead.ORDER_PAYMENT."+itoa(id)) && !strings.Contains(out, "TASKS_DEAD") {
			t.Errorf("nats %s shows nothing of it: %s", args, out)
		}
		shown++
	}
	equal(t, "hinted commands", shown, 4)

	cli(t, e, "", "requeue", itoa(id), "--reason", "card is open again").ok(t, 0)
	e.WaitStatus(t, soon, id, "succeeded")
	cli(t, e, "", "show", itoa(id)).ok(t, 0, "succeeded", "attempts (2)", "execute 1  failed", "execute 1  succeeded")
	equal(t, "dead tasks", cli(t, e, "", "dead", "list", "-o", "id").ok(t, 0).out, "")
}

func TestCLIMigratesAndRefusesAnOldSchema(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDB(t)
	env := []string{"TASKRELAY_DATABASE_URL=" + db.URL}
	runCLI(t, "", env, "list").ok(t, 1, `run "taskrelay migrate up"`)
	runCLI(t, "", env, "migrate", "validate").ok(t, 6, `run "taskrelay migrate up"`)
	runCLI(t, "", env, "migrate", "status").ok(t, 0, "0001_tables.sql", "pending")
	runCLI(t, "", env, "migrate", "up").ok(t, 0, "applied 1")
	runCLI(t, "", env, "migrate", "up").ok(t, 0, "up to date")
	runCLI(t, "", env, "migrate", "validate").ok(t, 0)
	runCLI(t, "", env, "list", "-o", "json").ok(t, 0, "[]")
	runCLI(t, "", append(env, "TASKRELAY_SCHEMA=billing"), "migrate", "up").ok(t, 0, "schema billing: applied 1")
	runCLI(t, "", env, "enqueue", "A", "--schema", "billing").ok(t, 0)
	equal(t, "tasks in the other schema", db.Int(t, "SELECT count(*) FROM billing.task"), 1)
}

func TestCLIStopsAtTheFirstSignal(t *testing.T) {
	t.Parallel()
	p := testenv.Start(t, "taskrelay", []string{"dev"}, "PATH="+os.Getenv("PATH"), "HOME="+t.TempDir())
	p.WaitLog(t, soon, "In another terminal:")
	p.WaitLog(t, soon, "relay started")
	equal(t, "exit code", p.Stop(t, soon), 0)
}

// A6: the demo is the whole main job in one process, and it checks itself.
func TestCLIDemoHoldsItsInvariants(t *testing.T) {
	t.Parallel()
	r := runCLI(t, "", []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()},
		"dev", "--demo", "--exit-when-done", "--demo-events", "80")
	r.ok(t, 0, "tasks committed", "none of them ran", "attempts logged", "body byte for byte", "every check above held")
	if strings.Contains(r.out, "FAIL") {
		t.Errorf("a check failed:\n%s", r.out)
	}
}
