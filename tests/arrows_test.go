package tests

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// A5, K10: imports point one way, and what users import brings nothing but the packages that were agreed on.
func TestImportsPointOneWay(t *testing.T) {
	t.Parallel()
	const module = "github.com/taskrelay/taskrelay/"
	allowed := []string{"github.com/nats-io/", "github.com/jackc/", "github.com/cenkalti/backoff/v4", "github.com/kelseyhightower/envconfig",
		"github.com/rs/zerolog", "github.com/mattn/go-", "github.com/klauspost/compress", "golang.org/x/",
		"go.opentelemetry.io/otel/", "github.com/cespare/xxhash/v2"} // the API of OpenTelemetry and what it needs // the agreed ones and what these need
	imports := func(pkg string) []string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", module+pkg)
		cmd.Dir = testenv.Root()
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go list %s: %v", pkg, err)
		}
		return strings.Fields(string(out))
	}
	for pkg, forbidden := range map[string][]string{
		"pkg/retry":   {"pkg/outbox", "pkg/command", "schema", "cmd/"},
		"pkg/outbox":  {"pkg/command", "schema", "cmd/"},
		"pkg/command": {"schema", "cmd/"},
		"schema":      {"pkg/", "internal/", "cmd/"},
	} {
		deps := imports(pkg)
		if len(deps) < 2 {
			t.Errorf("%s: go list names only %v", pkg, deps)
		}
		for _, dep := range deps {
			own, isOwn := strings.CutPrefix(dep, module)
			for _, f := range forbidden {
				if isOwn && strings.HasPrefix(own, f) {
					t.Errorf("%s imports %s", pkg, own)
				}
			}
			if isOwn || pkg == "schema" {
				continue
			}
			ok := false
			for _, a := range allowed {
				ok = ok || strings.HasPrefix(dep, a)
			}
			if !ok {
				t.Errorf("%s brings %s", pkg, dep)
			}
		}
	}
}
