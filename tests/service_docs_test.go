package tests

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/taskrelay/taskrelay/internal/docs"
	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Every nats command of docs/dead-letters.md does what the page says, typed as it stands there.
func TestNATSCommandsInTheDocumentationRun(t *testing.T) {
	t.Parallel()
	blocks, err := docs.Blocks("nats", "docs/dead-letters.md")
	if err != nil || len(blocks) != 1 {
		t.Fatalf("got %d blocks of nats commands, want 1: %v", len(blocks), err)
	}
	page, err := os.ReadFile(filepath.Join(docs.Root(), "docs", "dead-letters.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, looking, _ := strings.Cut(string(page), "\n## Looking\n")
	looking, _, _ = strings.Cut(looking, "\n## ")
	var commands []string
	for _, m := range regexp.MustCompile("`(nats (?:stream|sub|consumer) [^`]+)`").FindAllStringSubmatch(looking, -1) {
		// One pages through on a terminal, one waits for what is to come.
		if !strings.HasPrefix(m[1], "nats stream view") && m[1] != "nats sub 'dead.>'" {
			commands = append(commands, m[1])
		}
	}
	if len(commands) < 7 {
		t.Fatalf("got the commands %q, the page has more", commands)
	}

	e := testenv.New(t)
	relay := e.StartRelay("TASKRELAY_RELAY_OPS=true")
	// No worker: what a task does next shall not depend on how long a command takes. But its consumer, for the commands
	// that look at it.
	e.Exec(t, `SELECT setval(pg_get_serial_sequence('taskrelay.task', 'id'), 41)`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, biz_id, run_at) SELECT 'ORDER_PAYMENT', 'O-' || n, now() + interval '1 hour' FROM generate_series(1, 7) AS n`)
	e.Exec(t, `UPDATE taskrelay.task SET status = 'dead', dead_reason = 'permanent', dead_at = now(), finished_at = now() WHERE id IN (42, 43, 45, 46)`)
	e.WaitCount(t, soon, 4, `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	relay.WaitLog(t, soon, "operator actions over NATS are on")
	worker := e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", "http://127.0.0.1:1/")...)
	e.NATS.WaitStream(t, "TASKS")
	testenv.Eventually(t, soon, func() error {
		_, err := e.NATS.JS.Consumer(t.Context(), "TASKS", "ORDER_PAYMENT-low")
		return err
	})
	worker.Stop(t, soon)
	e.Insert(t, "ORDER_PAYMENT") // the queue holds one for whoever looks
	testenv.Eventually(t, soon, func() error {
		if e.NATS.Messages(t, "TASKS") != 1 {
			return errorf("the task is not published")
		}
		return nil
	})

	nats := testenv.NATSCLI(t, e.NATS.URL)
	for _, c := range commands {
		if out := nats(words(c)[1:]...); strings.TrimSpace(out) == "" && !strings.Contains(c, " sub ") {
			t.Errorf("%s prints nothing", c)
		}
	}
	for c := range strings.Lines(blocks[0].Text) {
		c = strings.TrimSpace(c)
		out := nats(words(c)[1:]...)
		if strings.Contains(c, "request") && !strings.Contains(out, `"changed":1,"skipped":0`) {
			t.Errorf("%s answers %s", c, out)
		}
		if c == "nats micro ls" && !strings.Contains(out, "taskrelay") {
			t.Errorf("the service is not listed: %s", out)
		}
	}
	for id, want := range map[int64]string{42: "pending", 43: "pending", 44: "pending", 45: "cancelled", 48: "cancelled"} {
		equal(t, "status of task "+itoa(id), e.Task(t, id).Status, want)
	}
	equal(t, "actions in the audit", e.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE actor LIKE 'nats%'`), 11)
	waitNoLetter(t, e, "ORDER_PAYMENT", 42)
	waitNoLetter(t, e, "ORDER_PAYMENT", 45)
	waitNoLetter(t, e, "ORDER_PAYMENT", 46)
}

// words splits a command as a shell does, with single quotes.
func words(command string) (list []string) {
	for i, part := range strings.Split(command, "'") {
		if i%2 == 1 {
			list = append(list, part)
			continue
		}
		list = append(list, strings.Fields(part)...)
	}
	return list
}
