package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(Root(), path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func pages(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(Root(), "docs", "*.md"))
	if err != nil || len(found) == 0 {
		t.Fatalf("no pages in docs/: %v", err)
	}
	all := []string{"README.md"}
	for _, page := range found {
		all = append(all, "docs/"+filepath.Base(page))
	}
	return all
}

// Examples are compiled, and those with an output are run, so what the README shows of them is true.
func TestGoInTheReadmeIsTakenFromExamples(t *testing.T) {
	blocks, err := Blocks("go", "README.md")
	if err != nil {
		t.Fatal(err)
	}
	if len(blocks) < 4 {
		t.Fatalf("got %d Go blocks, want pgx, database/sql, a command and a worker", len(blocks))
	}
	examples, err := filepath.Glob(filepath.Join(Root(), "pkg", "*", "example*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	var compiled strings.Builder
	for _, path := range examples {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		compiled.WriteString(outdent(string(text)))
	}
	for _, b := range blocks {
		if !strings.Contains(compiled.String(), outdent(b.Text)) {
			t.Errorf("this block of the README is in no example of pkg/*/example*_test.go:\n%s", b.Text)
		}
	}
}

// outdent drops indentation: a block of the README stands at the left edge.
func outdent(s string) string {
	return regexp.MustCompile(`(?m)^[ \t]+`).ReplaceAllString(s, "")
}

// The three systems of the requirements had 41, 101 and 49 rows.
func TestEveryRowOfTheOtherSystemsIsMapped(t *testing.T) {
	var want []string
	for _, system := range []struct {
		letter string
		rows   int
	}{{"A", 41}, {"B", 101}, {"C", 49}} {
		for n := 1; n <= system.rows; n++ {
			want = append(want, fmt.Sprintf("%s%d", system.letter, n))
		}
	}
	var got []string
	for _, m := range regexp.MustCompile(`(?m)^\| ([ABC]\d+) \| [^|]+ \| [^|]`).FindAllStringSubmatch(read(t, "docs/from-other-systems.md"), -1) {
		got = append(got, m[1])
	}
	for _, row := range want {
		if n := len(slices.DeleteFunc(slices.Clone(got), func(s string) bool { return s != row })); n != 1 {
			t.Errorf("row %s is mapped %d times, want once", row, n)
		}
	}
	if len(got) != len(want) {
		t.Errorf("got %d rows, want %d", len(got), len(want))
	}
}

func TestLinksBetweenPagesLeadSomewhere(t *testing.T) {
	heading := regexp.MustCompile(`(?m)^#+ (.+)$`)
	punctuation := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, page := range pages(t) {
		for _, m := range regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]+))?\)`).FindAllStringSubmatch(read(t, page), -1) {
			target := page
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(page), m[1])
			}
			if _, err := os.Stat(filepath.Join(Root(), target)); err != nil {
				t.Errorf("%s links to %s, which is not there", page, m[1])
				continue
			}
			if m[2] == "" {
				continue
			}
			var anchors []string
			for _, h := range heading.FindAllStringSubmatch(read(t, target), -1) {
				// As GitHub makes them: no punctuation, dashes for spaces.
				words := punctuation.ReplaceAllString(strings.ToLower(h[1]), "")
				anchors = append(anchors, strings.ReplaceAll(words, " ", "-"))
			}
			if !slices.Contains(anchors, m[2]) {
				t.Errorf("%s links to heading %q of %s, which has %q", page, m[2], target, anchors)
			}
		}
	}
}

// docs/configuration.md is made from the code, so a variable that it lacks does not exist.
func TestVariablesInTheDocumentationExist(t *testing.T) {
	known := read(t, "docs/configuration.md")
	perType := regexp.MustCompile(`^TASKRELAY_BIZ_(?:ORDER_PAYMENT|USER_REGISTER|<TYPE>)_`)
	variable := regexp.MustCompile(`TASKRELAY_(?:[A-Z]|<TYPE>)(?:[A-Z0-9_]|<TYPE>)*[A-Z0-9]`)
	all := append(pages(t), "compose.yaml")
	for _, page := range all {
		for _, name := range variable.FindAllString(read(t, page), -1) {
			if name == "TASKRELAY_BIZ_ORDER_PAYMENT" || name == "TASKRELAY_BIZ" {
				continue // the prefix of a type's variables
			}
			name = perType.ReplaceAllString(name, "TASKRELAY_BIZ_<TYPE>_")
			if !strings.Contains(known, "`"+name+"`") && !strings.HasPrefix(name, "TASKRELAY_TEST_") {
				t.Errorf("%s names %s, which is no variable", page, name)
			}
		}
	}
}

// Pages say the levels and texts of log lines, so that people can search for them.
func TestLogLinesInTheDocumentationExist(t *testing.T) {
	var code strings.Builder
	for _, pattern := range []string{"pkg/*/*.go", "internal/*/*.go"} {
		files, err := filepath.Glob(filepath.Join(Root(), pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			code.Write(text)
		}
	}
	_, table, _ := strings.Cut(read(t, "docs/operations.md"), "\n## Log lines\n")
	table, _, _ = strings.Cut(table, "\n## ")
	rows := regexp.MustCompile(`(?m)^\| (?:info|warn|error) \| (.+?) \|`).FindAllStringSubmatch(table, -1)
	if len(rows) < 10 {
		t.Fatalf("got %d log lines, want the table of docs/operations.md", len(rows))
	}
	for _, row := range rows {
		for _, m := range regexp.MustCompile(`\x60([^\x60]+)\x60`).FindAllStringSubmatch(row[1], -1) {
			if text := strings.Trim(m[1], "… "); !strings.Contains(code.String(), text) {
				t.Errorf("docs/operations.md explains the log line %q, which no code writes", m[1])
			}
		}
	}
}
