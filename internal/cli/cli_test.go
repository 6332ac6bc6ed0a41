package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// clean hides the variables of whoever runs the tests.
func clean(t *testing.T) {
	for _, kv := range os.Environ() {
		if k, v, _ := strings.Cut(kv, "="); strings.HasPrefix(k, "TASKRELAY_") {
			t.Setenv(k, v) // puts it back
			os.Unsetenv(k)
		}
	}
	for _, name := range []string{"DATABASE_URL", "NATS_URL", "SCHEMA", "NAMESPACE"} {
		// Flags set them for the process.
		k := "TASKRELAY_" + name
		t.Setenv(k, "")
		os.Unsetenv(k)
	}
}

func run(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = Main(t.Context(), "v0.0.0", args, strings.NewReader(stdin), &out, &errs)
	return code, out.String(), errs.String()
}

func TestWrongUsageIsExitCode2AndSaysWhatIsExpected(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"unknown command":    {[]string{"lisst"}, `did you mean "list"?`},
		"unknown subcommand": {[]string{"migrate", "upp"}, `did you mean "up"?`},
		"unknown flag":       {[]string{"list", "--nope"}, "unknown flag: --nope (taskrelay list --help)"},
		"too few arguments":  {[]string{"show"}, "taskrelay show ID|TYPE/BIZ_ID"},
		"too many arguments": {[]string{"list", "x"}, "taskrelay list"},
		"format":             {[]string{"list", "-o", "xml"}, "table, json, jsonl, csv, id"},
		"status":             {[]string{"list", "--status", "failed"}, "pending, running"},
		"limit":              {[]string{"list", "--limit", "0"}, "1 or more"},
		"priority":           {[]string{"list", "--priority", "middle"}, "want high or low"},
		"age":                {[]string{"list", "--older-than", "soon"}, "10m, 12h or 2d"},
		"no age":             {[]string{"list", "--newer-than", "0s"}, "10m, 12h or 2d"},
		"payload value":      {[]string{"list", "--payload", "order"}, "expected path=value"},
		"payload path":       {[]string{"list", "--payload", ".a=1"}, "expected path=value"},
		"export format":      {[]string{"dead", "export", "-o", "csv"}, "jsonl only"},
		"resume":             {[]string{"dead", "export", "--resume"}, "needs --file"},
		"stats interval":     {[]string{"stats", "--watch", "--interval", "1ms"}, "at least 100ms"},
		"watch json":         {[]string{"stats", "--watch", "-o", "json"}, "table or jsonl"},
		"config for":         {[]string{"config", "--for", "boss"}, "relay, worker, taskrelay"},
		"check for":          {[]string{"check", "--for", "boss"}, "expected any of relay"},
		"enqueue nothing":    {[]string{"enqueue"}, "--from FILE"},
		"enqueue both":       {[]string{"enqueue", "PAY", "--from", "-", "--biz-id", "x"}, "--biz-id is for one task"},
		"enqueue skip":       {[]string{"enqueue", "--from", "-", "--skip", "-1"}, "0 or more"},
		"ref":                {[]string{"show", "-1"}, "unknown shorthand flag"},
		"ref zero":           {[]string{"show", "0"}, "expected a task's id, or TYPE/BIZ_ID"},
		"ref without biz id": {[]string{"show", "ORDER/"}, "ORDER_PAYMENT/O-1"},
		"no reason":          {[]string{"requeue", "1"}, "--reason is required"},
		"no tasks":           {[]string{"reset", "--reason", "x"}, "expected tasks (ids, TYPE/BIZ_ID, or - for stdin) or a filter"},
		"tasks and filter":   {[]string{"cancel", "1", "--older-than", "1h", "--reason", "x"}, "give tasks or a filter (--older-than), not both"},
		"filter, no reason":  {[]string{"run", "--type", "A"}, "--reason is required"},
		"empty filter":       {[]string{"requeue", "--error", "", "--reason", "x"}, "--error is empty"},
		"no rate":            {[]string{"requeue", "--all", "--rate", "0", "--reason", "x"}, "more than 0 tasks a second"},
		"detach by id":       {[]string{"requeue", "1", "--detach", "--reason", "x"}, "go with a filter"},
		"no priority":        {[]string{"priority", "1"}, "expected high or low"},
		"bulk id":            {[]string{"bulk", "watch", "seven"}, "the number of a bulk"},
		"several":            {[]string{"cancel", "1", "2"}, "cancel 2 tasks: add --yes to confirm"},
		"no ids":             {[]string{"run", "-"}, "no ids on stdin"},
		"no delay":           {[]string{"delay", "1"}, "more than 0"},
		"payload":            {[]string{"enqueue", "A", "--payload", "{"}, "the payload is no JSON"},
		"payload file":       {[]string{"enqueue", "A", "--payload", "@/no/such/file"}, "no such file"},
		"header":             {[]string{"enqueue", "A", "--header", "x"}, "expected name=value"},
		"at":                 {[]string{"enqueue", "A", "--at", "tomorrow"}, "2026-12-01T09:00:00Z"},
		"in and at":          {[]string{"enqueue", "A", "--at", "2026-12-01T09:00:00Z", "--in", "1s"}, "give one of them"},
		"no database":        {[]string{"list"}, "TASKRELAY_DATABASE_URL"},
		"no such database":   {[]string{"list", "--database-url", "mysql://x"}, "postgres://"},
		"dev and database":   {[]string{"dev", "--database-url", "postgres://x"}, "starts its own Postgres"},
		"exit without demo":  {[]string{"dev", "--exit-when-done"}, "--demo"},
		"schema":             {[]string{"migrate", "sql", "--schema", "A; DROP"}, "lower-case"},
	} {
		t.Run(name, func(t *testing.T) {
			clean(t)
			code, out, errs := run(t, "", tt.args...)
			if code != exitUsage || !strings.Contains(errs, tt.want) || out != "" {
				t.Errorf("got exit code %d, stdout %q, stderr %q; want %d and %q", code, out, errs, exitUsage, tt.want)
			}
		})
	}
}

func TestUnreachablePostgresIsExitCode7(t *testing.T) {
	clean(t)
	code, _, errs := run(t, "", "list", "--database-url", "postgres://bob:hunter2@127.0.0.1:1/x")
	if code != exitConnect || !strings.Contains(errs, "connect to Postgres at 127.0.0.1:1/x") || strings.Contains(errs, "hunter2") || strings.Count(errs, "\n") != 1 {
		t.Errorf("got exit code %d, stderr %q", code, errs)
	}
}

func TestEveryCommandHasHelpWithAnExample(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Name() == "completion" || c.Name() == "help" || strings.HasPrefix(c.Name(), "__") {
			return
		}
		if c.Short == "" || c.Example == "" {
			t.Errorf("%q lacks help or an example", c.CommandPath())
		}
		for line := range strings.Lines(c.Example) {
			if strings.Contains(line, "taskrelay ") && len(line) > 125 {
				t.Errorf("%q: a line of the example is too long to read: %s", c.CommandPath(), line)
			}
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk((&app{flags: map[string]*string{}}).root())
}

func TestExitCodes(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{errors.New("x"), 1},
		{usage("x"), 2},
		{fmt.Errorf("show: %w", outbox.ErrNotFound), 3},
		{changeResult([]outbox.Change{{WhyNot: noSuchTask}}), 3},
		{changeResult([]outbox.Change{{WhyNot: "it is running"}}), 4},
		{changeResult([]outbox.Change{{WhyNot: "it is running"}, {WhyNot: noSuchTask}}), 4},
		{changeResult([]outbox.Change{{Changed: true}, {WhyNot: noSuchTask}}), 5},
		{changeResult([]outbox.Change{{Changed: true, WhyNot: "its worker is asked to stop"}}), 0},
		{context.Canceled, 130},
	} {
		if got := exitCode(tt.err); got != tt.want {
			t.Errorf("exit code of %v: got %d, want %d", tt.err, got, tt.want)
		}
	}
}

func TestFormats(t *testing.T) {
	at := time.Date(2026, 11, 30, 12, 0, 0, 123_456_000, time.UTC)
	tasks := []outbox.Task{
		{ID: 9007199254740993, BizType: "A", BizID: `x "y", z`, Status: "retrying", Attempt: 2, CreatedAt: at, NextAttemptAt: &at, LastError: "line one\nline\ttwo \x1b[2J"},
		{ID: 2, BizType: "A", Status: "succeeded", CreatedAt: at, FinishedAt: &at},
	}
	print := func(format string, terminal bool) string {
		var b bytes.Buffer
		p := &printer{out: &b, format: format, terminal: terminal}
		if err := printAll(p, tasks, taskID, taskColumns(map[int64]string{9007199254740993: "published"})); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}

	want := "ID\tTYPE\tBIZ ID\tSTATUS\tATTEMPT\tDUE\tDELIVERY\tFINISHED\tERROR\n" +
		"9007199254740993\tA\tx \"y\", z\tretrying\t2\t2026-11-30T12:00:00.123Z\tpublished\t\tline one line two \ufffd[2J\n" +
		"2\tA\t\tsucceeded\t0\t\t\t2026-11-30T12:00:00.123Z\t\n"
	if got := print("table", false); got != want {
		t.Errorf("piped:\ngot  %q\nwant %q", got, want)
	}
	if got := print("table", true); !strings.Contains(got, "│ 9007199254740993 │ A ") || strings.Contains(got, "\x1b") {
		t.Errorf("terminal:\n%s", got)
	}
	if got, want := print("id", false), "9007199254740993\n2\n"; got != want {
		t.Errorf("id: got %q, want %q", got, want)
	}
	var list []map[string]any
	if err := json.Unmarshal([]byte(print("json", false)), &list); err != nil || list[0]["id"] != "9007199254740993" || list[0]["created_at"] != "2026-11-30T12:00:00.123456Z" {
		t.Errorf("json: %v, %v", err, list)
	}
	if lines := strings.Split(strings.TrimSpace(print("jsonl", false)), "\n"); len(lines) != 2 || !json.Valid([]byte(lines[1])) {
		t.Errorf("jsonl: %q", lines)
	}
	if got := print("csv", false); !strings.HasPrefix(got, "ID,TYPE,") || !strings.Contains(got, `"x ""y"", z"`) {
		t.Errorf("csv: %q", got)
	}

	tasks = nil
	if got := print("json", false); got != "[]\n" {
		t.Errorf("no tasks: got %q, want an empty array", got)
	}
}

func TestPayloadGoesThroughByteForByte(t *testing.T) {
	const want = `{ "amount": 12345678901234567890.10,  "b":1, "b":2 }`
	path := filepath.Join(t.TempDir(), "p.json")
	if err := os.WriteFile(path, []byte(want+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, arg := range []string{want, "@" + path, "-"} {
		a := &app{in: strings.NewReader(want + "\n")}
		if got, err := a.payload(arg); err != nil || string(got) != want {
			t.Errorf("%s: got %s, %v", arg, got, err)
		}
	}
}

func TestRefs(t *testing.T) {
	a := &app{in: strings.NewReader("12\n\n ORDER/x/y \n")}
	got, err := a.refs([]string{"-"})
	want := []ref{{id: 12}, {bizType: "ORDER", bizID: "x/y"}}
	if err != nil || len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func TestSQLNeedsNoDatabase(t *testing.T) {
	clean(t)
	code, out, errs := run(t, "", "migrate", "sql", "--schema", "eu_tasks")
	if code != 0 || errs != "" || !strings.Contains(out, "CREATE TABLE eu_tasks.task (") {
		t.Errorf("got exit code %d, stderr %q, %d bytes", code, errs, len(out))
	}
}

func TestMisspelledVariableIsRefused(t *testing.T) {
	clean(t)
	t.Setenv("TASKRELAY_DATABSE_URL", "postgres://127.0.0.1/x")
	if code, _, errs := run(t, "", "list"); code != exitUsage || !strings.Contains(errs, "TASKRELAY_DATABASE_URL") {
		t.Errorf("got exit code %d, stderr %q", code, errs)
	}
}

// Operators think of 2d: the filter of a bulk takes ages as list does.
func TestBulkFilterTakesDays(t *testing.T) {
	for _, args := range [][]string{{"requeue", "--older-than", "2d", "--dry-run"}, {"dead", "discard", "--newer-than", "1d", "--dry-run"}} {
		clean(t)
		code, _, stderr := run(t, "", args...)
		if code != exitUsage || !strings.Contains(stderr, "TASKRELAY_DATABASE_URL") {
			t.Errorf("%v: exit %d, %s", args, code, stderr)
		}
	}
}

// A migration by a user who may not make roles names this command.
func TestMigrateRolesPrintsThem(t *testing.T) {
	clean(t)
	code, stdout, stderr := run(t, "", "migrate", "roles", "--schema", "billing")
	if code != exitOK || !strings.Contains(stdout, "billing_operator") || strings.Contains(stdout, "CREATE TABLE") {
		t.Errorf("exit %d, %s: %.300s", code, stderr, stdout)
	}
}
