package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/docs"
	"github.com/taskrelay/taskrelay/internal/testenv"
)

// What a runbook tells a person to run at night has been run: SQL as operator, commands of the CLI up to their help.
func TestCommandsOfTheRunbooksRun(t *testing.T) {
	t.Parallel()
	found, err := filepath.Glob(filepath.Join(docs.Root(), "docs", "runbooks", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	var pages []string
	for _, page := range found {
		pages = append(pages, filepath.Join("docs", "runbooks", filepath.Base(page)))
	}
	sql, err := docs.Blocks("sql", pages...)
	if err != nil {
		t.Fatal(err)
	}
	shell, err := docs.Blocks("sh", pages...)
	if err != nil {
		t.Fatal(err)
	}
	if len(sql) < 15 || len(shell) < 10 {
		t.Fatalf("got %d blocks of SQL and %d of commands", len(sql), len(shell))
	}

	db := testenv.DB(t)
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	db.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('ORDER_PAYMENT', 'test')`)
	for _, b := range sql {
		if _, err := conn.PgConn().Exec(t.Context(), "BEGIN; SET LOCAL ROLE taskrelay_operator;\n"+b.Text+";\nROLLBACK").ReadAll(); err != nil {
			t.Errorf("%s: %v\n%s", b.Page, err, b.Text)
			if _, err := conn.PgConn().Exec(t.Context(), "ROLLBACK").ReadAll(); err != nil {
				t.Fatal(err)
			}
		}
	}

	comment := regexp.MustCompile(`\s+#.*$`)
	seen := map[string]bool{}
	for _, b := range shell {
		for line := range strings.Lines(b.Text) {
			line = comment.ReplaceAllString(strings.TrimSpace(line), "")
			if !strings.HasPrefix(line, "taskrelay ") || seen[line] {
				continue
			}
			seen[line] = true
			// With --help the flags are parsed, and nothing is done.
			cmd := exec.CommandContext(t.Context(), "sh", "-c", line+" --help")
			cmd.Env = []string{"PATH=" + filepath.Dir(testenv.Binary(t, "taskrelay")) + ":" + os.Getenv("PATH")}
			out, err := cmd.CombinedOutput()
			words := strings.Fields(line)
			if usage := regexp.MustCompile(`(?m)^\s+taskrelay ` + regexp.QuoteMeta(words[1]) + `\b`); err != nil || !usage.Match(out) {
				t.Errorf("%s: %s: %v\n%s", b.Page, line, err, out)
			}
		}
	}
	if len(seen) < 5 {
		t.Errorf("got %d commands of the CLI", len(seen))
	}
}
