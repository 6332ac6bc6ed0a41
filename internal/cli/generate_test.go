package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/taskrelay/taskrelay/deploy"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func generate(t *testing.T, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	if got := Main(t.Context(), "test", append([]string{"generate"}, args...), strings.NewReader(""), &out, &err); got != code {
		t.Fatalf("generate %v: exit code %d, want %d: %s", args, got, code, err.String())
	}
	return out.String(), err.String()
}

// What generate prints are the files of the repository, byte for byte.
func TestGeneratePrintsTheShippedFiles(t *testing.T) {
	root := filepath.Join("..", "..")
	folders := map[string]string{"compose": ".", "k8s": "deploy/kubernetes", "systemd": "deploy/systemd", "grafana": "deploy/observability",
		"alerts": "deploy/observability", "nats": "deploy/nats"}
	for _, kind := range deploy.Kinds() {
		files := deploy.Files(kind, outbox.Names{})
		if len(files) == 0 || folders[kind] == "" {
			t.Errorf("%s: %d files in %q", kind, len(files), folders[kind])
		}
		for _, f := range files {
			shipped, err := os.ReadFile(filepath.Join(root, folders[kind], f.Path))
			if err != nil {
				t.Fatal(err)
			}
			if got, _ := generate(t, 0, kind, f.Path); got != string(shipped) {
				t.Errorf("%s %s is not what is shipped (of compose.yaml deploy/ holds a copy: cp compose.yaml deploy/)", kind, f.Path)
			}
			if all, _ := generate(t, 0, kind); f.Path != "kustomization.yaml" && !strings.Contains(all, string(shipped)) {
				t.Errorf("%s does not print %s", kind, f.Path)
			}
		}
	}
	shipped, err := os.ReadFile(filepath.Join(root, "schema", "taskrelay.sql"))
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := generate(t, 0, "sql"); got != string(shipped) {
		t.Error("sql is not schema/taskrelay.sql")
	}
}

func TestGenerateWritesFilesAndOverwritesNone(t *testing.T) {
	dir := t.TempDir()
	if _, stderr := generate(t, 0, "compose", "--dir", dir); strings.Count(stderr, "written:") != 6 {
		t.Errorf("got %s", stderr)
	}
	if _, err := os.Stat(filepath.Join(dir, "deploy", "observability", "alerts.yaml")); err != nil {
		t.Error(err)
	}
	mine := filepath.Join(dir, "compose.yaml")
	if err := os.WriteFile(mine, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, stderr := generate(t, exitRefused, "compose", "--dir", dir); !strings.Contains(stderr, mine) || strings.Count(stderr, "is there:") != 5 {
		t.Errorf("got %s", stderr)
	}
	if text, err := os.ReadFile(mine); err != nil || string(text) != "mine" {
		t.Errorf("compose.yaml was overwritten: %s, %v", text, err)
	}
	if _, stderr := generate(t, exitUsage, "k8s", "no.yaml"); !strings.Contains(stderr, "relay.yaml") {
		t.Errorf("got %s", stderr)
	}
}

func TestGenerateNATSWithANamespace(t *testing.T) {
	t.Setenv("TASKRELAY_NAMESPACE", "none-yet") // the flag is put into the environment
	got, _ := generate(t, 0, "nats", "permissions.conf", "--namespace", "eu-west")
	for _, want := range []string{`"eu-west.tasks.*.*"`, `"$JS.API.STREAM.INFO.EU_WEST_TASKS_DEAD"`, `CREATE.EU_WEST_TASKS.*.eu-west.tasks.*.*"`,
		`"eu-west.taskrelay.ops.*"`, `"_INBOX_taskrelay.>"`, `"eu-west.dead.>"`, `"eu-west.taskrelay.wake"`} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is missing", want)
		}
	}
	for _, bad := range []string{`"tasks.`, `"dead.`, `"events.`, `"taskrelay.`, `.TASKS`} {
		if strings.Contains(got, bad) {
			t.Errorf("%s is still there", bad)
		}
	}
	if err := os.Unsetenv("TASKRELAY_NAMESPACE"); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TASKRELAY_NATS_API_PREFIX", "$JS.hub.API")
	if got, _ := generate(t, 0, "nats", "permissions.conf"); !strings.Contains(got, `"$JS.hub.API.STREAM.INFO.TASKS"`) || strings.Contains(got, `"$JS.API.`) {
		t.Error("the prefix of JetStream's API is not in place")
	}
}
