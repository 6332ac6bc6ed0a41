package schema

import (
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write taskrelay.sql")

func TestSchemaNamesAreSafeToRender(t *testing.T) {
	for _, name := range []string{"taskrelay", "a", "_x", "tasks_2", strings.Repeat("a", 41), ""} {
		if _, err := SQL(Options{Schema: name}); err != nil {
			t.Errorf("%q is refused: %v", name, err)
		}
	}
	for _, name := range []string{
		"Tasks", "1a", "a-b", "a.b", `a"b`, "a b", "a;DROP TABLE x", "a\n", "täsk", "pg_tasks", strings.Repeat("a", 42), "{{schema}}",
	} {
		if _, err := SQL(Options{Schema: name}); err == nil {
			t.Errorf("%q is accepted", name)
		}
		if _, err := RolesSQL(Options{Schema: name}); err == nil {
			t.Errorf("%q is accepted by RolesSQL", name)
		}
	}
}

func TestVersionIsTheNewestMigration(t *testing.T) {
	ms, err := render("x")
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range ms {
		if m.version != int64(i+1) {
			t.Errorf("%s: got version %d, want %d", m.file, m.version, i+1)
		}
	}
	if got := ms[len(ms)-1].version; got != Version {
		t.Errorf("Version is %d, the newest migration %d", Version, got)
	}
}

func TestRenderingLeavesNoPlaceholder(t *testing.T) {
	sql, err := SQL(Options{Schema: "other"})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(sql, "{{") || strings.Contains(sql, "+goose") {
		t.Error("a placeholder or a line of goose is left")
	}
	if strings.Contains(regexp.MustCompile(`(?m)--.*$|taskrelay\.actor|use_taskrelay_requeue|"taskrelay migrate [a-z]+"`).ReplaceAllString(sql, ""), "taskrelay") {
		t.Error("the default schema's name is left in the SQL of another schema")
	}
}

// A function with its owner's rights that looks names up in the caller's search path would run what the caller puts there.
func TestFunctionsWithOwnersRightsPinTheirSearchPath(t *testing.T) {
	sql, err := SQL(Options{})
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	sql = strings.ReplaceAll(sql, "CREATE OR REPLACE FUNCTION ", "CREATE FUNCTION ")
	for _, f := range strings.Split(sql, "CREATE FUNCTION ")[1:] {
		head, _, _ := strings.Cut(strings.ReplaceAll(f, "BEGIN ATOMIC", "AS $$"), "AS $$")
		if strings.Contains(head, "SECURITY DEFINER") {
			found++
			if !strings.Contains(head, "SET search_path = pg_catalog, pg_temp") {
				t.Errorf("no search path is pinned: %s", head)
			}
		}
	}
	if found < 7 {
		t.Errorf("found only %d such functions: does this test still see them?", found)
	}
}

func TestPlainFileIsCurrent(t *testing.T) {
	const file = "taskrelay.sql"
	want, err := SQL(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s differs from the migrations: run go generate ./schema", file)
	}
}

func TestOldServersAreRefusedByName(t *testing.T) {
	if err := checkVersion(150000, "15.0"); err != nil {
		t.Error(err)
	}
	err := checkVersion(140011, "14.11")
	if err == nil || !strings.Contains(err.Error(), "14.11") || !strings.Contains(err.Error(), "15") {
		t.Errorf("got %v, want both versions named", err)
	}
}
