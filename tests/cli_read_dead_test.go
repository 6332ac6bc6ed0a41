package tests

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// insertDead writes tasks that have died, and returns their ids.
func insertDead(t *testing.T, db *testenv.Database, bizType, class, lastError, age string, more string, n int) (ids []string) {
	t.Helper()
	for range n {
		id := db.Insert(t, bizType, "payload", `{"n": 12345678901234567890.10}`)
		db.Exec(t, `UPDATE taskrelay.task SET status = 'dead', attempt = 3, dead_reason = 'max_attempts', finished_at = now() - $2::interval,
			dead_at = now() - $2::interval, dead_lettered_at = now(), error_class = $3, last_error = $4`+more+` WHERE id = $1`, id, age, class, lastError)
		ids = append(ids, itoa(id))
	}
	return ids
}

func TestCLIDeadGroupsNameExactlyTheirTasks(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	var timeouts []string
	for _, text := range []string{"timeout after 1031 ms (request 4f0c2b9e-6f3a-4a52-9a10-77d05a2c1f11)", "timeout after 9 ms (request 00aabbccddee0011)", "timeout  after\n88 ms (request 2026-11-30)"} {
		timeouts = append(timeouts, insertDead(t, db, "PAY", "timeout", text, "2 days", "", 1)...)
	}
	feedback := insertDead(t, db, "PAY", "timeout", "timeout after 1 ms (feedback facade)", "5 min", "", 1)
	undone := insertDead(t, db, "MAIL", "timeout", "timeout after 7 ms (request 5)", "10 days", ", compensation = 'done'", 2)
	db.Insert(t, "PAY")

	type group struct {
		Group       string
		BizType     string `json:"biz_type"`
		Error       string
		Count       int
		Hour        int    `json:"last_hour"`
		Day         int    `json:"last_day"`
		Week        int    `json:"last_7_days"`
		Compensated int    `json:"compensated"`
		Sample      string `json:"sample_id"`
		Requeue     string
	}
	groups := func(args ...string) (list []group) {
		t.Helper()
		r := dbCLI(t, db, "", append([]string{"dead", "groups", "-o", "json"}, args...)...).ok(t, 0)
		if err := json.Unmarshal([]byte(r.out), &list); err != nil {
			t.Fatalf("%v: %s", err, r.out)
		}
		return list
	}
	all := groups()
	if len(all) != 3 {
		t.Fatalf("got %d groups, want 3: %+v", len(all), all)
	}
	for i, want := range []group{
		{BizType: "PAY", Error: "timeout after # ms (request #)", Count: 3, Week: 3, Sample: timeouts[2]},
		{BizType: "MAIL", Error: "timeout after # ms (request #)", Count: 2, Compensated: 2, Sample: undone[1]},
		{BizType: "PAY", Error: "timeout after # ms (feedback facade)", Count: 1, Hour: 1, Day: 1, Week: 1, Sample: feedback[0]},
	} {
		got := all[i]
		ids := timeouts
		if i == 1 {
			ids = undone
		} else if i == 2 {
			ids = feedback
		}
		list := strings.Fields(dbCLI(t, db, "", "dead", "list", "--group", got.Group, "-o", "id").ok(t, 0).out)
		equal(t, "tasks of group "+got.Group, len(list), len(ids))
		for _, id := range ids {
			equal(t, "task "+id+" is in it", strings.Contains(" "+strings.Join(list, " ")+" ", " "+id+" "), true)
		}
		if !strings.Contains(got.Requeue, "--group "+got.Group) || strings.Contains(got.Requeue, "--allow-compensated") != (i == 1) {
			t.Errorf("command of group %d: %s", i, got.Requeue)
		}
		want.Group, want.Requeue = got.Group, got.Requeue
		equal(t, "group", got, want)
	}
	equal(t, "narrowed", len(groups("--type", "PAY", "--newer-than", "1h")), 1)
	equal(t, "narrowed by age", len(groups("--older-than", "3d")), 1)
	narrow := groups("--error", "it's", "--reason", "permanent")
	equal(t, "nothing", len(narrow), 0)
	dbCLI(t, db, "", "dead", "groups").ok(t, 0, "GROUP\tTYPE\tCLASS\tERROR\tCOUNT\t1H\t24H\t7D", all[0].Requeue)

	// The command that is printed is one command, and it does what it says.
	e := testenv.NewEnv(t, db, testenv.NATS(t))
	e.StartRelay()
	words := strings.Fields(strings.Replace(all[0].Requeue, "'...'", "mended", 1))
	cli(t, e, "", append(words[1:], "--yes")...).ok(t, 0)
	equal(t, "dead ones of the group", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'dead' AND biz_type = 'PAY'`), 1)
	equal(t, "dead ones of all", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'dead'`), 3)
}

func TestCLIDeadListPagesAndShowsOne(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	a := insertDead(t, db, "PAY", "net", "no route to host", "2 hours", "", 1)[0]
	b := insertDead(t, db, "PAY", "HTTP 422", "card is closed", "1 hour", ", compensation = 'done', execute_attempts = 3", 1)[0]
	db.Exec(t, `UPDATE taskrelay.task SET dead_lettered_at = NULL WHERE id = $1::bigint`, b)
	c := insertDead(t, db, "MAIL", "net", "no route to host", "1 min", "", 1)[0]
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, title, runbook_url) VALUES ('PAY', 'Take a payment', 'https://runbooks/pay')`)
	db.Exec(t, `INSERT INTO taskrelay.task_attempt (task_id, lease_token, started_at, finished_at, generation, attempt, biz_type, phase, outcome, worker, error, stack)
		VALUES ($1::bigint, 1, now(), now(), 0, 1, 'PAY', 'execute', 'panic', 'pay-7f9c-1-a', 'boom', E'goroutine 1\n\tmain.go:7')`, b)

	ids := func(args ...string) string {
		return strings.Join(strings.Fields(dbCLI(t, db, "", append([]string{"dead", "list", "-o", "id"}, args...)...).ok(t, 0).out), " ")
	}
	equal(t, "the last one first", ids(), c+" "+b+" "+a)
	equal(t, "class", ids("--error-class", "net"), c+" "+a)
	equal(t, "text", ids("--error", "closed"), b)
	equal(t, "older", ids("--older-than", "30m", "--type", "PAY"), b+" "+a)
	equal(t, "first page", ids("--limit", "2"), c+" "+b)
	equal(t, "second page", ids("--limit", "2", "--after", b), a)
	dbCLI(t, db, "", "dead", "list", "--limit", "2").ok(t, 0, "--after "+b+" shows the next ones")
	waiting := itoa(db.Insert(t, "PAY"))
	dbCLI(t, db, "", "dead", "list", "--after", waiting).ok(t, 3, "not dead any more")

	dbCLI(t, db, "", "dead", "show", b).ok(t, 0, "card is closed", "its dead letter follows as soon as NATS takes it", "taskrelay requeue "+b+" --reason '...' --allow-compensated",
		"nats stream get TASKS_DEAD --last-for dead.PAY."+b, "Take a payment", "https://runbooks/pay", "pay-7f9c-1-a")
	dbCLI(t, db, "", "dead", "show", b, "--stack").ok(t, 0, "main.go:7")
	dbCLI(t, db, "", "dead", "show", waiting).ok(t, 4, "it is pending")
	dbCLI(t, db, "", "dead", "show", "999999").ok(t, 3, "not found")
	var shown struct {
		Next   struct{ What, Command string }
		Letter struct {
			Subject string
			OutAt   *string `json:"out_at"`
		}
	}
	if err := json.Unmarshal([]byte(dbCLI(t, db, "", "dead", "show", b, "-o", "json").ok(t, 0).out), &shown); err != nil || shown.Letter.Subject != "dead.PAY."+b || shown.Letter.OutAt != nil || shown.Next.Command == "" {
		t.Errorf("json: %v, %+v", err, shown)
	}
	dbCLI(t, db, "", "show", waiting).ok(t, 0, "until a worker that knows its type is started")
}

func TestCLIDeadExportGoesOnWhereItWasCutOff(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	ids := insertDead(t, db, "PAY", "net", "no route to host", "2 hours", "", 120)
	insertDead(t, db, "MAIL", "net", "no route to host", "2 hours", "", 1)
	file := filepath.Join(t.TempDir(), "dead.jsonl")
	exported := func() (got []string) {
		t.Helper()
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			var task struct {
				ID      string
				Payload struct{ N json.Number }
			}
			if err := json.Unmarshal([]byte(line), &task); err != nil || task.Payload.N != "12345678901234567890.10" {
				t.Fatalf("%v, payload number %s: %s", err, task.Payload.N, line)
			}
			got = append(got, task.ID)
		}
		return got
	}
	dbCLI(t, db, "", "dead", "export", "--type", "PAY", "--file", file, "--limit", "70").ok(t, 0, "70 dead tasks exported", "--after "+ids[69])
	equal(t, "first part", strings.Join(exported(), " "), strings.Join(ids[:70], " "))
	dbCLI(t, db, "", "dead", "export", "--type", "PAY", "--file", file).ok(t, 2, "--resume")
	// Killed in the middle of a line.
	f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"id":"` + ids[70] + `","biz_`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	db.Exec(t, `UPDATE taskrelay.task SET status = 'pending', finished_at = NULL, dead_at = NULL WHERE id = $1::bigint`, ids[100]) // brought back meanwhile
	dbCLI(t, db, "", "dead", "export", "--type", "PAY", "--file", file, "--resume").ok(t, 0, "49 dead tasks exported")
	equal(t, "all parts", strings.Join(exported(), " "), strings.Join(append(append([]string{}, ids[:100]...), ids[101:]...), " "))

	equal(t, "on stdout", strings.Count(dbCLI(t, db, "", "dead", "export", "--after", ids[117]).ok(t, 0).out, "\n"), 3)
	if err := os.WriteFile(file, []byte("not of an export\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dbCLI(t, db, "", "dead", "export", "--file", file, "--resume").ok(t, 2, "line 1")
}
