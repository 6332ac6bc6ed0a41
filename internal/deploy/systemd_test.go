package deploy_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// unit reads a unit file: every value of each section's keys.
func unit(t *testing.T, path string) map[string]map[string][]string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sections, current := map[string]map[string][]string{}, ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		switch key, value, isKey := strings.Cut(line, "="); {
		case line == "", strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "[") && strings.HasSuffix(line, "]"):
			current = strings.Trim(line, "[]")
			sections[current] = map[string][]string{}
		case !isKey || current == "" || strings.ContainsAny(key, " \t"):
			t.Errorf("%s: no setting: %q", path, line)
		default:
			sections[current][key] = append(sections[current][key], value)
		}
	}
	return sections
}

func TestSystemdUnits(t *testing.T) {
	for name, atLeast := range map[string]int{"relay": 30, "worker": 30} {
		path := filepath.Join(root, "deploy", "systemd", "taskrelay-"+name+".service")
		u := unit(t, path)
		service := u["Service"]
		want := map[string]string{"ExecStart": "/usr/bin/taskrelay-" + name, "DynamicUser": "yes", "NoNewPrivileges": "yes", "ProtectSystem": "strict",
			"Restart": "on-failure", "RestartPreventExitStatus": "2", "EnvironmentFile": "/etc/taskrelay/" + name + ".env"}
		for key, value := range want {
			if !slices.Equal(service[key], []string{value}) {
				t.Errorf("%s: %s is %v, want %s", name, key, service[key], value)
			}
		}
		if len(service["TimeoutStopSec"]) != 1 {
			t.Fatalf("%s: no TimeoutStopSec", name)
		}
		if s, err := strconv.Atoi(strings.TrimSuffix(service["TimeoutStopSec"][0], "s")); err != nil || s < atLeast {
			t.Errorf("%s: TimeoutStopSec %v, want at least %d s: a worker's grace is 25 s", name, service["TimeoutStopSec"], atLeast)
		}
		verify(t, path)
	}
}

// verify has systemd read the unit, where there is one. It says what it does not know on stderr only, with exit code 0.
func verify(t *testing.T, path string) {
	t.Helper()
	program, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Logf("no systemd-analyze here: %s was read by this test alone", path)
		return
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// The program is not installed here.
	lines := strings.Split(string(text), "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, "ExecStart=") {
			lines[i] = "ExecStart=/bin/true"
		}
	}
	copied := filepath.Join(t.TempDir(), filepath.Base(path))
	if err := os.WriteFile(copied, []byte(strings.Join(lines, "\n")), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "verify", "--man=no", copied)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Errorf("systemd-analyze verify: %v: %s", err, out.String())
	}
	for line := range strings.Lines(out.String()) {
		if strings.Contains(line, filepath.Base(path)) { // not what it says of the machine
			t.Errorf("systemd-analyze verify: %s", line)
		}
	}
}
