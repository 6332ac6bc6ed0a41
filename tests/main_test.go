// Package tests looks at taskrelay from outside: real Postgres, real nats-server, the public API and the real binaries.
package tests

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// soon is how long a test waits for something that normally takes milliseconds, on a busy machine.
const soon = 30 * time.Second

// outcomes lists the outcomes in the attempt log of a task.
func outcomes(t *testing.T, e *testenv.Env, id int64) string {
	t.Helper()
	var all []string
	for _, a := range e.Attempts(t, id) {
		all = append(all, a.Outcome)
	}
	return fmt.Sprint(all)
}

// text is a nullable text, null as "".
func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// noOverlaps checks that no task was ever called twice at once.
func noOverlaps(t *testing.T, sink *testenv.Sink) {
	t.Helper()
	if o := sink.Overlaps(); len(o) > 0 {
		t.Errorf("tasks with two calls at once: %v", o)
	}
}

// noDoubleSuccess is the check of requirement B85: one success per task in the attempt log.
func noDoubleSuccess(t *testing.T, e *testenv.Env) {
	t.Helper()
	n := e.Int(t, `SELECT count(*) FROM (SELECT task_id FROM taskrelay.task_attempt WHERE outcome = 'succeeded'
		GROUP BY 1 HAVING count(*) > 1) AS twice`)
	equal(t, "tasks with two successes in the attempt log", n, 0)
}

func installation(t *testing.T, e *testenv.Env) string {
	t.Helper()
	return e.Text(t, "SELECT id::text FROM taskrelay.installation")
}

func itoa(id int64) string { return strconv.FormatInt(id, 10) }

var errorf = fmt.Errorf

// containsNumber finds a whole number in a text.
func containsNumber(s string, n int64) bool {
	return slices.Contains(strings.FieldsFunc(s, func(r rune) bool { return r < '0' || r > '9' }), itoa(n))
}
