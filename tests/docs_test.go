package tests

import (
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/docs"
	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Each SQL block of the documentation is run as the role that the page names for it, never as more.
func TestSQLInTheDocumentationRuns(t *testing.T) {
	blocks, err := docs.Blocks("sql", "README.md", "docs/sql.md", "docs/operations.md", "docs/dead-letters.md", "docs/notices.md", "docs/guarantees.md")
	if err != nil {
		t.Fatal(err)
	}
	if len(blocks) < 15 {
		t.Fatalf("got %d SQL blocks, the documentation has more", len(blocks))
	}
	db := testenv.DB(t)
	db.Exec(t, `CREATE TABLE orders (id bigint PRIMARY KEY, paid boolean NOT NULL DEFAULT false)`)
	db.Exec(t, `INSERT INTO orders VALUES (10001), (10002)`)
	db.Exec(t, `GRANT SELECT, UPDATE ON orders TO taskrelay_producer`)

	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	for _, b := range blocks {
		role := roleFor(b.Text)
		text := b.Text
		if role != "" {
			text = "SET ROLE " + role + ";\n" + text + ";\nRESET ROLE"
		}
		if _, err := conn.PgConn().Exec(t.Context(), text).ReadAll(); err != nil {
			t.Errorf("%s, as role %q: %v\n%s", b.Page, role, err, b.Text)
			if _, err := conn.PgConn().Exec(t.Context(), "ROLLBACK; RESET ROLE").ReadAll(); err != nil {
				t.Fatal(err)
			}
		}
	}

	// The trigger of docs/sql.md is there now, and does what the page says.
	db.Exec(t, `UPDATE taskrelay.installation SET strict_types = false`) // docs/operations.md has set it
	db.Exec(t, `UPDATE orders SET paid = true WHERE id = 10002`)
	if n := db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id = 'O-10002'`); n != 1 {
		t.Errorf("the trigger made %d tasks, want 1", n)
	}
}

var changesATask = regexp.MustCompile(`taskrelay\.(requeue|reset|run_now|delay|cancel|pause|resume|set_type|rerun|discard|set_priority|delete_task|start_bulk|preview_bulk)\(`)

func roleFor(sql string) string {
	switch {
	case strings.Contains(sql, "CREATE "), strings.Contains(sql, "DELETE "), strings.Contains(sql, "FROM taskrelay.task WHERE"):
		return "" // the owner
	case changesATask.MatchString(sql), strings.Contains(sql, "taskrelay.audit"), strings.Contains(sql, "UPDATE taskrelay."), strings.Contains(sql, "INSERT INTO taskrelay.biz_type"):
		return "taskrelay_operator"
	case strings.Contains(sql, "INSERT INTO taskrelay.task"), strings.Contains(sql, "taskrelay.enqueue("):
		return "taskrelay_producer"
	}
	return "taskrelay_viewer"
}
