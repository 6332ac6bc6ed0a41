package tests

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func dbCLI(t *testing.T, db *testenv.Database, stdin string, args ...string) cliRun {
	t.Helper()
	return runCLI(t, stdin, []string{"TASKRELAY_DATABASE_URL=" + db.URL, "USER=alice"}, args...)
}

func TestCLIListFindsByEveryFilter(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	ids := map[string]string{}
	insert := func(name, bizType, set string, columns ...any) {
		t.Helper()
		id := db.Insert(t, bizType, append([]any{"biz_id", name}, columns...)...)
		if set != "" {
			db.Exec(t, `UPDATE taskrelay.task SET `+set+` WHERE id = $1`, id)
		}
		ids[name] = itoa(id)
	}
	insert("old", "PAY", `created_at = now() - interval '3 hours'`)
	insert("O-1", "PAY", `status = 'retrying', attempt = 2, last_error = 'connection refused: 10.0.0.7', error_class = 'net', republish_at = now() + interval '1 hour', next_attempt_at = now() + interval '1 hour'`,
		"payload", `{"order": {"id": 10001, "items": ["a", "b"]}, "note": "caf\u00e9 \ud83d\ude00"}`)
	insert("O-2", "PAY", `status = 'running', lease_owner = 'pay-7f9c-12-abcdef', lease_until = now() + interval '1 min'`, "payload", `{"order": {"id": "10001"}}`)
	insert("O_3", "MAIL", `status = 'dead', finished_at = now(), dead_at = now(), dead_reason = 'permanent', last_error = 'no such user', error_class = 'HTTP 404'`, "priority", "high",
		"payload", `{"order": {"id": 2}, "x": 10001, "ok": true, "nothing": null, "list": [1, 2]}`)
	insert("done", "MAIL", `status = 'succeeded', finished_at = now()`)
	// Rows that end a careless statement over all payloads.
	insert("nul", "ODD", "", "payload", `{"order": {"id": 10001}, "s": "\u0000"}`)
	insert("half", "ODD", "", "payload", `{"order": {"id": 10001}, "s": "\ud800"}`)
	insert("text", "ODD", "", "payload", `"10001"`)

	value := func(path, v string) []outbox.PayloadValue {
		return []outbox.PayloadValue{{Path: strings.Split(path, "."), Value: v}}
	}
	for _, tt := range []struct {
		f    outbox.Filter
		want string
	}{
		{outbox.Filter{}, "text half nul done O_3 O-2 O-1 old"},
		{outbox.Filter{Status: "pending", BizType: "PAY"}, "old"},
		{outbox.Filter{Statuses: []string{"pending", "running", "retrying"}, BizType: "PAY"}, "O-2 O-1 old"},
		{outbox.Filter{Statuses: []string{"running", "retrying"}}, "O-2 O-1"},
		{outbox.Filter{Statuses: []string{"dead"}}, "O_3"},
		{outbox.Filter{Statuses: []string{"dead", "succeeded"}}, "done O_3"},
		{outbox.Filter{BizID: "O-1"}, "O-1"},
		{outbox.Filter{BizID: "O-1", BizType: "MAIL"}, ""},
		{outbox.Filter{BizIDPrefix: "O-"}, "O-2 O-1"},
		{outbox.Filter{BizIDPrefix: "O_", BizType: "MAIL"}, "O_3"},
		{outbox.Filter{BizIDPrefix: "O%"}, ""},
		{outbox.Filter{BizIDPrefix: "O-", BizID: "old"}, ""},
		{outbox.Filter{ErrorContains: "refused"}, "O-1"},
		{outbox.Filter{ErrorContains: "Refused"}, ""},
		{outbox.Filter{ErrorClass: "net", Status: "retrying"}, "O-1"},
		{outbox.Filter{Priority: "high"}, "O_3"},
		{outbox.Filter{Worker: "pay-7f9c"}, "O-2"},
		{outbox.Filter{Worker: "7f9c"}, ""},
		{outbox.Filter{OlderThan: time.Hour}, "old"},
		{outbox.Filter{OlderThan: 24 * time.Hour}, ""},
		{outbox.Filter{NewerThan: 10 * time.Minute, BizType: "PAY"}, "O-2 O-1"},
		{outbox.Filter{Payload: value("order.id", "10001")}, "O-2 O-1"},
		{outbox.Filter{Payload: value("order.items.1", "b")}, "O-1"},
		{outbox.Filter{Payload: value("note", "café 😀")}, "O-1"}, // it is written with escapes
		{outbox.Filter{Payload: append(value("ok", "true"), value("x", "10001")...)}, "O_3"},
		{outbox.Filter{Payload: value("list", "[1, 2]")}, "O_3"},
		{outbox.Filter{Payload: value("nothing", "null")}, ""},
		{outbox.Filter{Payload: value("order.id", "1000")}, ""},
	} {
		tasks, err := outbox.List(t.Context(), db.Pool, tt.f)
		if err != nil {
			t.Fatalf("%+v: %v", tt.f, err)
		}
		var got []string
		for _, task := range tasks {
			got = append(got, task.BizID)
		}
		equal(t, fmt.Sprintf("%+v", tt.f), strings.Join(got, " "), tt.want)
	}

	// The flags are the filter's fields.
	for _, tt := range []struct{ args, want string }{
		{"--status retrying,running --type PAY --priority low --newer-than 1d --biz-id-prefix O- --error refused --error-class net --payload order.id=10001", "O-1"},
		{"--worker pay-7f9c --biz-id O-2 --status running", "O-2"},
		{"--older-than 1h", "old"},
		{"--newer-than 1d --type PAY", "O-2 O-1 old"},
		{"--limit 2", "text half"},
	} {
		want := ""
		for name := range strings.FieldsSeq(tt.want) {
			want += ids[name] + "\n"
		}
		equal(t, tt.args, dbCLI(t, db, "", append([]string{"list", "-o", "id"}, strings.Fields(tt.args)...)...).ok(t, 0).out, want)
	}

	// Page by page is everything once, and more says so.
	var paged []string
	after := "0"
	for range 5 {
		r := dbCLI(t, db, "", "list", "-o", "id", "--limit", "5", "--after", after).ok(t, 0)
		paged = append(paged, strings.Fields(r.out)...)
		if !strings.Contains(r.errOut, "--after") {
			break
		}
		after = paged[len(paged)-1]
		if !strings.Contains(r.errOut, "--after "+after+" ") {
			t.Fatalf("the hint does not name the last id %s: %s", after, r.errOut)
		}
	}
	equal(t, "all pages", strings.Join(paged, "\n")+"\n", dbCLI(t, db, "", "list", "-o", "id").ok(t, 0).out)

	var list []map[string]any
	if err := json.Unmarshal([]byte(dbCLI(t, db, "", "list", "-o", "json", "--biz-id", "O-1").ok(t, 0).out), &list); err != nil || len(list) != 1 || list[0]["id"] != ids["O-1"] || list[0]["payload"] != nil {
		t.Errorf("json: %v, %v", err, list)
	}
}

// Unfinished tasks are found through the lanes, so each place where one may be must be looked at.
func TestCLIListFindsUnfinishedTasksBehindThePosition(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	low := db.Insert(t, "A") // below the low-water and not on the list: finished, as the reconciler promises
	db.Exec(t, `UPDATE taskrelay.task SET status = 'succeeded', finished_at = now() WHERE id = $1`, low)
	listed := db.Insert(t, "A")
	db.Exec(t, `UPDATE taskrelay.task SET republish_at = now() WHERE id = $1`, listed)
	scheduled := db.Insert(t, "A", "run_at", "2090-01-01")
	open := begin(t, db, "read committed")
	var late int64
	if err := open.QueryRow(t.Context(), `INSERT INTO taskrelay.task (biz_type) VALUES ('A') RETURNING id`).Scan(&late); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority, low_snapshot, low_at) VALUES ('A', 'low', pg_current_snapshot(), now())`)
	if err := open.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	fresh := db.Insert(t, "A")
	// So many finished ones that the search leaves its first window.
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'B' FROM generate_series(1, 25000)`)
	db.Exec(t, `UPDATE taskrelay.task SET status = 'succeeded', finished_at = now() WHERE biz_type = 'B'`)
	want := []string{itoa(fresh), itoa(late), itoa(scheduled), itoa(listed)}
	equal(t, "unfinished", strings.Join(strings.Fields(dbCLI(t, db, "", "list", "--status", "pending", "-o", "id").ok(t, 0).out), " "), strings.Join(want, " "))
	equal(t, "of a small type", strings.Join(strings.Fields(dbCLI(t, db, "", "list", "--type", "A", "-o", "id").ok(t, 0).out), " "), strings.Join(append(want, itoa(low)), " "))
	equal(t, "found by windows", dbCLI(t, db, "", "list", "--priority", "low", "--limit", "25002", "-o", "id").ok(t, 0, "there are more").out != "", true)
	equal(t, "the first of all", strings.TrimSpace(dbCLI(t, db, "", "list", "--priority", "low", "--after", strconv.Itoa(int(low)+1), "-o", "id").ok(t, 0).out), itoa(low))

	// Out of time: what was found is shown, and where to go on. The server is slow at the oldest row only.
	db.Exec(t, `CREATE FUNCTION public.strpos(text, text) RETURNS int LANGUAGE sql VOLATILE AS
		'SELECT pg_catalog.strpos($1, $2) + CASE WHEN $1 = ''slow'' THEN length(pg_sleep(60)::text) ELSE 0 END'`)
	db.Exec(t, `ALTER DATABASE `+db.Name+` SET search_path = public, pg_catalog`)
	db.Exec(t, `UPDATE taskrelay.task SET last_error = 'slow' WHERE id = $1`, low)
	db.Exec(t, `UPDATE taskrelay.task SET last_error = 'no route to host' WHERE id = (SELECT max(id) FROM taskrelay.task)`)
	r := dbCLI(t, db, "", "list", "--error", "no route", "--timeout", "3s", "-o", "id").ok(t, 5, "go on with --after ")
	equal(t, "found in time", r.out, db.Text(t, `SELECT max(id)::text FROM taskrelay.task`)+"\n")
}
