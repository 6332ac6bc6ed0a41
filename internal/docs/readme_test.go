package docs

import (
	"strings"
	"testing"
)

// A38: a second task type is a command of its own, in less than 15 lines.
func TestSecondTaskTypeTakesFewLines(t *testing.T) {
	_, after, found := strings.Cut(read(t, "README.md"), "A second task type in less than 15 lines")
	if !found {
		t.Fatal("the README does not show a second task type")
	}
	_, code, _ := strings.Cut(after, "```go\n")
	code, _, found = strings.Cut(code, "```")
	if n := strings.Count(code, "\n"); !found || n < 3 || n >= 15 {
		t.Errorf("the second task type takes %d lines, want less than 15:\n%s", n, code)
	}
}

// B1, B3: what it is not for, and that calls repeat under one key, stands on the first page.
func TestReadmeSaysWhatIsNotPromised(t *testing.T) {
	readme := read(t, "README.md")
	for _, want := range []string{"Not for: exact cron, DAGs", "**At least once.**", "`Idempotency-Key`", "`task.Key()`", "Not promised:", "Exactly one call."} {
		if !strings.Contains(readme, want) {
			t.Errorf("the README does not say %q", want)
		}
	}
}
