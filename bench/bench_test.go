package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The children of a test are the test binary in another role.
func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// Every scenario runs through on both systems and fills in what it is about. The figures themselves are not judged:
// they are of a machine that does something else at the same time.
func TestAllScenariosMeasure(t *testing.T) {
	file := filepath.Join(t.TempDir(), "out.json")
	var out strings.Builder
	if err := run(t.Context(), []string{"-full", "-tasks", "1000", "-runs", "1", "-window", "1s", "-out", file}, &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var rows []row
	if err := json.Unmarshal(text, &rows); err != nil {
		t.Fatal(err)
	}
	got := make(map[string]row)
	for _, r := range rows {
		got[r.Scenario+" "+r.System] = r
	}
	drains := []string{"drain", "scheduled", "snapshot", "retry", "types"}
	for _, system := range []string{"taskrelay", "river"} {
		for _, scenario := range append(drains, "steady") {
			r := got[scenario+" "+system]
			if r.Rate <= 0 || r.CPUPostgres <= 0 || r.CPUClient <= 0 || r.CPU < r.CPUPostgres || r.WAL <= 0 || r.Memory <= 0 {
				t.Errorf("%s of %s lacks figures: %+v", scenario, system, r)
			}
			if (r.CPUNATS > 0) != (system == "taskrelay") {
				t.Errorf("%s of %s: NATS used %v µs", scenario, system, r.CPUNATS)
			}
		}
		if r := got["latency "+system]; r.P50 <= 0 || r.P99 < r.P95 || r.P95 < r.P50 {
			t.Errorf("latency of %s: %+v", system, r)
		}
		if r := got["enqueue "+system]; r.Slowdown <= 0 || r.Rate <= 0 {
			t.Errorf("enqueue of %s: %+v", system, r)
		}
		if r := got["idle "+system]; r.CPU <= 0 {
			t.Errorf("idle of %s: %+v", system, r)
		}
	}
	if r := got["drain taskrelay"]; r.HOT <= 0.5 {
		t.Errorf("hardly any update of a drain is HOT: %+v", r)
	}
	for _, name := range []string{"latency-wake taskrelay", "enqueue-outbox taskrelay", "enqueue-function taskrelay",
		"floor-copy machine", "floor-hot-update machine", "floor-publish machine", "floor-consume-ack machine"} {
		if r, ok := got[name]; !ok || r.Rate <= 0 {
			t.Errorf("%s: got %+v", name, r)
		}
	}
	if !strings.Contains(out.String(), "fsync=on") || !strings.Contains(out.String(), "× River") {
		t.Errorf("settings or table are missing:\n%s", out.String())
	}
}

func TestMistakenFlagsAreRefused(t *testing.T) {
	for _, args := range [][]string{{"-scenarios", "drian"}, {"-systems", "asynq"}, {"-tasks", "5"}, {"-runs", "0"}, {"drain"}} {
		if _, err := parse(args, &strings.Builder{}); err == nil {
			t.Errorf("%v: got no error", args)
		}
	}
}
