package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func TestCLIEnqueuesManyFromAFile(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	var lines []string
	for i := range 2500 {
		lines = append(lines, fmt.Sprintf(`{"biz_type": "PAY", "biz_id": "O-%d", "payload": {"n": 12345678901234567890.10,  "i":%d}}`, i, i))
	}
	text := strings.Join(lines, "\n")
	dbCLI(t, db, text, "enqueue", "--from", "-").ok(t, 0, "LINES\tNEW\tDUPLICATES\tFAILED\n2500\t2500\t0\t0\n")
	equal(t, "payload byte for byte", db.Text(t, `SELECT payload::text FROM taskrelay.task WHERE biz_id = 'O-7'`), `{"n": 12345678901234567890.10,  "i":7}`)
	equal(t, "ids in the order of the lines", db.Int(t, `SELECT count(*) FROM (SELECT biz_id, 'O-' || (row_number() OVER (ORDER BY id) - 1) AS want FROM taskrelay.task) AS x WHERE biz_id <> want`), 0)
	// Sent again, it changes nothing.
	dbCLI(t, db, text, "enqueue", "--from", "-", "-o", "json").ok(t, 0, `"new": 0`, `"duplicates": 2500`, `"done_to_line": 2500`)
	equal(t, "tasks", db.Int(t, `SELECT count(*) FROM taskrelay.task`), 2500)
}

func TestCLIBulkEnqueueNamesBadLinesAndGoesOn(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `UPDATE taskrelay.installation SET strict_types = true; INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('PAY', 'w'), ('MAIL', 'w')`)
	lines := []string{
		"\ufeff" + `{"biz_id": "O-1"}`,
		``,
		`{"biz_id": "O-2", "payload": "text", "priority": "high", "run_at": "2090-01-01T00:00:00Z", "max_attempts": 3, "headers": {"tenant": "acme"}}`,
		`{"biz_id": "O-3", "payload": {"a":}}`,
		`{"bizid": "O-4"}`,
		`{"biz_type": "NOBODY", "biz_id": "O-5"}`, // only the server knows
		`{"biz_id": "O-1"}`,
		`{"biz_type": "MAIL", "biz_id": "O-1", "delay": "1h"}`,
		`{"biz_id": ""}`,
		`{"biz_id": "O-6"} {"biz_id": "O-7"}`,
		`[1]`,
		`{"biz_id": "` + "\xff" + `"}`,
		`{"biz_id": "O-8", "payload": "` + strings.Repeat("x", 9<<20) + `"}`,
		`{"biz_id": "O-9", "run_at": "2090-01-01T00:00:00Z", "delay": "1h"}`,
		`{"biz_id": "O-10", "headers": {"Nats-Msg-Id": "x"}}`,
		`{"biz_id": "last", "payload": null}`,
	}
	text := strings.Join(lines, "\r\n")
	r := dbCLI(t, db, text, "enqueue", "PAY", "--from", "-", "-o", "jsonl").ok(t, 5, "line 4: ", "line 5: ", "bizid", "line 6: unknown biz type", "line 9: ", "line 10: more than one",
		"line 11: ", "line 12: not valid UTF-8", "line 13: longer than 8 MiB", "line 14: run_at and delay", "line 15: ", "reserved", "15 lines: 4 new, 1 duplicates, 10 failed")
	var got []string
	for line := range strings.Lines(r.out) {
		var result struct {
			Line  int
			ID    string
			New   bool
			Error string
		}
		if err := json.Unmarshal([]byte(line), &result); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		switch {
		case result.Error != "" && result.ID == "":
			got = append(got, fmt.Sprintf("%d-", result.Line))
		case result.New && result.ID != "":
			got = append(got, fmt.Sprintf("%d+", result.Line))
		case result.ID != "":
			got = append(got, fmt.Sprintf("%d=", result.Line))
		}
	}
	equal(t, "a result for each line, in order", strings.Join(got, " "), "1+ 3+ 4- 5- 6- 7= 8+ 9- 10- 11- 12- 13- 14- 15- 16+")
	equal(t, "what a line says", db.Text(t, `SELECT concat_ws(' ', priority, run_at AT TIME ZONE 'UTC', max_attempts, headers, payload) FROM taskrelay.task WHERE biz_id = 'O-2'`),
		`high 2090-01-01 00:00:00 3 {"tenant": "acme"} "text"`)
	equal(t, "delayed", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'MAIL' AND run_at > now() + interval '50 min'`), 1)

	// With --stop-on-error what is before the line stays, and the next run goes on behind it.
	stop := "{\"biz_id\": \"s1\"}\n{\"biz_id\": \"s2\"}\nbroken\n{\"biz_id\": \"s3\"}\n"
	dbCLI(t, db, stop, "enqueue", "PAY", "--from", "-", "--stop-on-error").ok(t, 5, "line 3: ", "--skip 2", "harmless")
	equal(t, "before the bad line", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id ^@ 's'`), 2)
	dbCLI(t, db, stop, "enqueue", "PAY", "--from", "-", "--skip", "3", "-o", "csv").ok(t, 0, "LINE,ID,NEW,ERROR\n4,")
	equal(t, "behind it", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id ^@ 's'`), 3)
	dbCLI(t, db, "{}\nbroken\n", "enqueue", "PAY", "--from", "-", "--stop-on-error").ok(t, 5, "would be made twice", "--skip 1")

	dbCLI(t, db, "", "enqueue", "--from", "/no/such/file").ok(t, 2, "no such file")
	dbCLI(t, db, "{}", "enqueue", "--from", "-").ok(t, 2, "no biz_type")
}

// A commit whose answer does not come: the task may be there or not, and that is what is said. It is no wrong usage.
func TestCLIEnqueueSaysThatItDoesNotKnow(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Exec(t, `CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$`)
	db.Exec(t, `CREATE CONSTRAINT TRIGGER die_at_commit AFTER INSERT ON taskrelay.task DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
		WHEN (NEW.biz_type = 'LOST') EXECUTE FUNCTION die()`)
	dbCLI(t, db, "", "enqueue", "LOST", "--biz-id", "O'1").ok(t, 1, "may be written or not", `taskrelay show 'LOST/O'\''1' tells`, "it is made once")
	dbCLI(t, db, "", "enqueue", "LOST").ok(t, 1, "may be written or not", "taskrelay show 2", "there would be two")
	dbCLI(t, db, `{"biz_type": "LOST"}`, "enqueue", "--from", "-").ok(t, 1, "lines 1 to 1", "would be made twice")
	dbCLI(t, db, "", "show", "2").ok(t, 3)

	// One that is lost before, or that the server has refused, is known to be nothing.
	db.Exec(t, `CREATE TRIGGER die_before_commit BEFORE INSERT ON taskrelay.task FOR EACH ROW WHEN (NEW.biz_type = 'EARLY') EXECUTE FUNCTION die()`)
	dbCLI(t, db, "", "enqueue", "EARLY").ok(t, 1, "nothing was written")
	db.Exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not today'; END $$`)
	db.Exec(t, `CREATE CONSTRAINT TRIGGER refuse_at_commit AFTER INSERT ON taskrelay.task DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
		WHEN (NEW.biz_type = 'REFUSED') EXECUTE FUNCTION refuse()`)
	dbCLI(t, db, "", "enqueue", "REFUSED", "--biz-id", "O-1").ok(t, 1, "nothing was written", "not today")
	equal(t, "tasks", db.Int(t, `SELECT count(*) FROM taskrelay.task`), 0)

	// The link is cut while the server commits.
	db.Exec(t, `CREATE FUNCTION hesitate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$`)
	db.Exec(t, `CREATE CONSTRAINT TRIGGER hesitate_at_commit AFTER INSERT ON taskrelay.task DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
		WHEN (NEW.biz_type = 'SLOW') EXECUTE FUNCTION hesitate()`)
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(4711)`); err != nil {
		t.Fatal(err)
	}
	link, address := through(t, db.URL)
	ended := make(chan cliRun, 1)
	go func() {
		ended <- runCLI(t, "", []string{"TASKRELAY_DATABASE_URL=" + address}, "enqueue", "SLOW", "--biz-id", "O-1")
	}()
	db.WaitCount(t, soon, 1, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'`)
	link.Cut()
	(<-ended).ok(t, 1, "may be written or not", "taskrelay show SLOW/O-1 tells")
}
