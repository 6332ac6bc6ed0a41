package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// testNames lists the top-level tests of the module and its tools, whatever build tag they need.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir(Root(), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != Root() {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				names[f.Name.Name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

var testName = regexp.MustCompile("`(Test[A-Z][A-Za-z0-9]*)(…?)`")

// Pages name tests as witnesses. A name that ends in … stands for all that begin with it.
func TestTestsNamedInTheDocumentationExist(t *testing.T) {
	names := testNames(t)
	for _, page := range pages(t) {
		for _, m := range testName.FindAllStringSubmatch(read(t, page), -1) {
			found := names[m[1]]
			for name := range names {
				found = found || m[2] != "" && strings.HasPrefix(name, m[1])
			}
			if !found {
				t.Errorf("%s names %s, which is no test", page, m[0])
			}
		}
	}
}

// The numbers that are missing were merged into others where the cases were collected.
func TestEveryFieldCaseIsListed(t *testing.T) {
	left := []string{"C-019", "C-024", "C-025", "C-027", "C-030", "C-031", "C-032", "C-040", "C-047", "C-052", "C-056", "C-068",
		"C-074", "C-077", "C-085", "C-087", "C-100", "C-101", "C-107", "C-117", "C-128", "C-130"}
	var want []string
	for n := 1; n <= 132; n++ {
		if id := "C-" + string(rune('0'+n/100)) + string(rune('0'+n/10%10)) + string(rune('0'+n%10)); !slices.Contains(left, id) {
			want = append(want, id)
		}
	}
	if len(want) != 110 {
		t.Fatalf("%d cases, want 110", len(want))
	}
	var got []string
	for _, row := range regexp.MustCompile(`(?m)^\| (C-\d{3}) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$`).FindAllStringSubmatch(read(t, "docs/field-cases.md"), -1) {
		got = append(got, row[1])
		if !testName.MatchString(row[4]) && row[4] != "none: cannot happen" {
			t.Errorf("%s names no test and gives no reason: %s", row[1], row[4])
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("docs/field-cases.md has %d cases %v, want each once, in order: %v", len(got), got, want)
	}
}
