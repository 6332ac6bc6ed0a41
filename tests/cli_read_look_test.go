package tests

import (
	"context"
	"encoding/json"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func TestCLIStatsCountsByTypeAndState(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	for _, state := range []string{"pending", "pending", "scheduled", "listed", "retrying", "running", "asked", "blocked", "succeeded", "dead", "cancelled"} {
		id := db.Insert(t, "PAY")
		db.Exec(t, `UPDATE taskrelay.task SET `+states[state]+` WHERE id = $1`, id)
	}
	db.Insert(t, "MAIL", "priority", "high")
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, status, finished_at, dead_at) VALUES ('OLD', 'dead', now() - interval '2 days', now() - interval '2 days')`)
	// Alive for as long as this test may take on a busy machine.
	db.Exec(t, `INSERT INTO taskrelay.worker (name, host, pid, biz_types, running, seen_at) VALUES ('w1', 'h', 1, '{PAY}', 2, now() + interval '10 minutes')`)
	db.Exec(t, `INSERT INTO taskrelay.worker (name, host, pid, biz_types, seen_at) VALUES ('gone', 'h', 2, '{PAY}', now() - interval '2 minutes')`)
	db.Exec(t, `INSERT INTO taskrelay.relay (name, host, pid, lanes, seen_at) VALUES ('r1', 'h', 3, 4, now() + interval '10 minutes')`)
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, paused_at) VALUES ('MAIL', now())`)
	db.Exec(t, `INSERT INTO taskrelay.task_attempt (task_id, lease_token, started_at, finished_at, generation, attempt, biz_type, phase, outcome) VALUES
		(1, 1, now(), now() + interval '10 minutes', 0, 1, 'PAY', 'execute', 'succeeded'), (2, 1, now(), now() + interval '10 minutes', 0, 1, 'PAY', 'execute', 'failed'), (2, 2, now(), now() + interval '10 minutes', 0, 2, 'PAY', 'execute', 'timeout'),
		(3, 1, now(), now() - interval '2 minutes', 0, 1, 'PAY', 'execute', 'succeeded'), (4, 1, now(), now() + interval '10 minutes', 0, 1, 'PAY', 'execute', 'snoozed')`)

	type counts struct {
		BizType                             string `json:"biz_type"`
		Pending, Running, Retrying, Blocked int
		Backlog                             int
		Succeeded                           int `json:"succeeded_last_minute"`
		Failed                              int `json:"failed_last_minute"`
		Dead                                int `json:"dead_24h"`
		Workers                             int
		PausedAt                            string `json:"paused_at"`
	}
	var got struct {
		Types           []counts
		Dead            int `json:"dead_24h"`
		Workers, Relays []struct {
			Name string
			Load int
		}
	}
	r := dbCLI(t, db, "", "stats", "-o", "json").ok(t, 0)
	if err := json.Unmarshal([]byte(r.out), &got); err != nil || len(got.Types) != 3 {
		t.Fatalf("%v: %s", err, r.out)
	}
	equal(t, "paused", got.Types[0].PausedAt != "", true)
	got.Types[0].PausedAt = ""
	equal(t, "MAIL", got.Types[0], counts{BizType: "MAIL", Pending: 1, Backlog: 1})
	equal(t, "PAY", got.Types[2], counts{BizType: "PAY", Pending: 4, Running: 2, Retrying: 1, Blocked: 1, Backlog: 2, Succeeded: 1, Failed: 2, Dead: 1, Workers: 1})
	equal(t, "OLD", got.Types[1], counts{BizType: "OLD"})
	if len(got.Workers) != 1 || got.Workers[0].Name != "w1" || got.Workers[0].Load != 2 || len(got.Relays) != 1 || got.Relays[0].Load != 4 || got.Dead != 1 {
		t.Errorf("who is alive: %+v", got)
	}
	dbCLI(t, db, "", "stats").ok(t, 0, "TYPE\tPENDING\tRUNNING", "paused since", "no live worker", "workers: 1 alive", "w1", "relays: 1 alive", "dead within 24 h: 1")

	// --watch goes on until Ctrl-C, which is a good end.
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	cmd := exec.CommandContext(ctx, testenv.Binary(t, "taskrelay"), "stats", "--watch", "--interval", "100ms", "-o", "jsonl")
	cmd.Env = []string{"TASKRELAY_DATABASE_URL=" + db.URL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	looks := json.NewDecoder(out)
	for range 3 {
		var look struct{ At string }
		if err := looks.Decode(&look); err != nil || look.At == "" {
			t.Fatalf("%v, look at %q", err, look.At)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after Ctrl-C: %v", err)
	}
}

func TestCLIConfigShowsSourcesAndNoSecrets(t *testing.T) {
	t.Parallel()
	env := []string{"TASKRELAY_DATABASE_URL=postgres://app:hunter2@127.0.0.1/shop", "TASKRELAY_LOG_LEVEL=debug",
		"TASKRELAY_BIZ_TYPES=A", "TASKRELAY_BIZ_A_TARGET=https://u:hunter2@h/x?token=hunter2", "TASKRELAY_BIZ_A_SECRET=hunter2"}
	for _, format := range []string{"table", "json", "jsonl", "csv"} {
		r := runCLI(t, "", env, "config", "-o", format, "--schema", "billing").ok(t, 0, "postgres://xxxxx@127.0.0.1/shop", "flag --schema", "TASKRELAY_BIZ_A_TIMEOUT", "[redacted]")
		if strings.Contains(r.out+r.errOut, "hunter2") {
			t.Errorf("-o %s prints a secret: %s", format, r.out+r.errOut)
		}
	}
	runCLI(t, "", env, "config", "--set").ok(t, 0, "TASKRELAY_LOG_LEVEL\tdebug\tenvironment", "TASKRELAY_NATS_URL\t\trequired, unset")
	runCLI(t, "", env, "config", "--for", "relay").ok(t, 2, "TASKRELAY_NATS_URL: required and not set")
	wrong := runCLI(t, "", append(env, "TASKRELAY_RELAY_BATCH=many"), "config").ok(t, 2, "TASKRELAY_RELAY_BATCH\tmany\tenvironment", "a whole number")
	equal(t, "the rest is shown", strings.Contains(wrong.out, "TASKRELAY_DATABASE_URL"), true)
}

func TestCLICheckTriesAllBeforeADeploy(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	env := []string{"TASKRELAY_DATABASE_URL=" + e.URL, "TASKRELAY_NATS_URL=" + e.NATS.URL}
	const name = "stream TASKS"
	runCLI(t, "", env, "check").ok(t, 0, "ok\tconfiguration of relay", "ok\tpostgres", "ok\tschema", "ok\trights of a relay", "ok\tnats", name+"\tnot there")
	runCLI(t, "", append(env, "TASKRELAY_BIZ_TYPES=A"), "check").ok(t, 2, "ok\tconfiguration of relay", "fail\tconfiguration of worker", "TASKRELAY_BIZ_A_TARGET")
	runCLI(t, "", append(env, "TASKRELAY_BIZ_TYPES=A", "TASKRELAY_BIZ_A_TARGET=noop:"), "check").ok(t, 0, "ok\trights of a worker")
	runCLI(t, "", []string{"TASKRELAY_DATABASE_URL=" + e.URL, "TASKRELAY_NATS_URL=nats://127.0.0.1:1"}, "check").ok(t, 7, "ok\tschema", "fail\tnats")
	runCLI(t, "", []string{"TASKRELAY_DATABASE_URL=postgres://127.0.0.1:1/x", "TASKRELAY_NATS_URL=" + e.NATS.URL}, "check").ok(t, 7, "fail\tpostgres", "ok\tnats")
	runCLI(t, "", append(env, "TASKRELAY_SCHEMA=billing"), "check").ok(t, 6, "fail\tschema", "taskrelay migrate up")

	// A user with the rights of one role only.
	as := []string{"TASKRELAY_DATABASE_URL=" + e.URL + separator(e.URL) + "options=-c%20role%3Dtaskrelay_worker", "TASKRELAY_NATS_URL=" + e.NATS.URL,
		"TASKRELAY_BIZ_TYPES=A", "TASKRELAY_BIZ_A_TARGET=noop:"}
	runCLI(t, "", as, "check", "--for", "operator").ok(t, 6, "fail\trights of an operator", "GRANT taskrelay_operator TO")
	runCLI(t, "", as, "check", "--for", "worker").ok(t, 0, "ok\trights of a worker", "as taskrelay_worker")

	// A stream that would lose tasks, and one of somebody else.
	js, err := jetstream.New(e.NATS.Conn)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "TASKS", Subjects: []string{"tasks.*.*"}, Retention: jetstream.LimitsPolicy}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "TASKS_DEAD", Subjects: []string{"dead.*.*"}, Metadata: map[string]string{"taskrelay-installation": "another"}}); err != nil {
		t.Fatal(err)
	}
	runCLI(t, "", env, "check").ok(t, 6, "fail\t"+name, "would lose tasks", "fail\tstream TASKS_DEAD", "installation another")
	var list []struct{ Check, Status, Fix string }
	r := runCLI(t, "", env, "check", "-o", "json").ok(t, 6)
	if err := json.Unmarshal([]byte(r.out), &list); err != nil || len(list) < 8 {
		t.Errorf("json: %v, %s", err, r.out)
	}
}

func separator(url string) string {
	if strings.Contains(url, "?") {
		return "&"
	}
	return "?"
}
