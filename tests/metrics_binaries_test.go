package tests

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

var updateMetrics = flag.Bool("update-metrics", false, "write deploy/observability/metrics.txt")

func get(t *testing.T, url string) (code int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

// scrape reads /metrics as Prometheus would, and fails the test for what promtool check metrics would complain of.
func scrape(t *testing.T, url string) map[string]*dto.MetricFamily {
	t.Helper()
	code, body := get(t, url+"/metrics")
	if code != http.StatusOK {
		t.Fatalf("/metrics: %d %s", code, body)
	}
	problems, err := promlint.New(strings.NewReader(body)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// The list of all metrics, by which queries of alerts and dashboard are checked, is what the real binaries show.
func TestMetricsOfTheBinariesAreThoseInTheList(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("flaky", testenv.Statuses(500, 200)...)
	sink.Script("hopeless", testenv.Statuses(422)...)
	relay := e.StartRelay()
	worker := e.StartWorker(append(testenv.HTTPType("PAY", sink.URL+"/pay", "COMPENSATE", sink.URL+"/undo"), "TASKRELAY_PPROF_ADDR=127.0.0.1:0")...)
	relayURL, workerURL := adminURL(t, relay), adminURL(t, worker)
	for _, bizID := range []string{"fine", "flaky", "hopeless"} {
		e.Insert(t, "PAY", "biz_id", bizID)
	}
	e.WaitNoneOpen(t, soon)

	var all map[string]*dto.MetricFamily
	testenv.Eventually(t, soon, func() error { // gauges of the servers are read every 10 s at most
		all = scrape(t, relayURL)
		maps.Copy(all, scrape(t, workerURL))
		for _, late := range []string{"taskrelay_stream_pending_messages", "taskrelay_outbox_oldest_due_age_seconds", "taskrelay_notices_total",
			"taskrelay_task_end_to_end_seconds", "taskrelay_relay_lag_seconds"} {
			if all[late] == nil {
				return errorf("no %s", late)
			}
		}
		return nil
	})
	counted := 0.0
	for key, n := range flatten(slices.Collect(maps.Values(scrape(t, workerURL)))) {
		if strings.HasPrefix(key, "taskrelay_task_attempts_total") {
			counted += n
		}
	}
	equal(t, "attempts counted", int64(counted), e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt"))

	var list bytes.Buffer
	list.WriteString("# name, type, labels. Made by go test ./tests -run TestMetricsOfTheBinariesAreThoseInTheList -update-metrics\n")
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !strings.HasPrefix(name, "taskrelay_") { // go_ and process_ are client_golang's
			continue
		}
		labels := map[string]bool{}
		for _, m := range all[name].Metric {
			for _, l := range m.Label {
				labels[l.GetName()] = true
			}
		}
		fmt.Fprintf(&list, "%s %s %s\n", name, strings.ToLower(all[name].GetType().String()), cmp.Or(strings.Join(slices.Sorted(maps.Keys(labels)), ","), "-"))
	}
	list.WriteString("taskrelay_stream_limit_bytes gauge stream\n") // only where a stream has a limit
	path := filepath.Join(testenv.Root(), "deploy", "observability", "metrics.txt")
	if *updateMetrics {
		if err := os.WriteFile(path, list.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if list.String() != string(want) {
		t.Errorf("the binaries show other metrics than %s lists (go test ./tests -run %s -update-metrics writes it anew, then look at docs/observability.md): got\n%s\nwant\n%s",
			path, t.Name(), list.String(), want)
	}

	if code, body := get(t, workerURL+"/readyz?verbose"); code != http.StatusOK || !strings.Contains(body, "[+] postgres ok") || !strings.Contains(body, "[+] worker ok") {
		t.Errorf("/readyz?verbose: got %d %q", code, body)
	}
	// Profiles are at an address of their own, and only where they are asked for.
	if code, _ := get(t, workerURL+"/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("the admin address serves profiles: %d", code)
	}
	var pprof string
	for _, line := range worker.LogLines("profiles are served (TASKRELAY_PPROF_ADDR)") {
		pprof = fmt.Sprint("http://", line["address"])
	}
	if code, body := get(t, pprof+"/debug/pprof/goroutine?debug=1"); code != http.StatusOK || !strings.Contains(body, "goroutine profile") {
		t.Errorf("goroutine profile: got %d %.100q", code, body)
	}
	// The command line may hold secrets: the index answers for what it does not know.
	if _, body := get(t, pprof+"/debug/pprof/cmdline"); strings.Contains(body, "worker") {
		t.Errorf("cmdline is served: %q", body)
	}
	if lines := relay.LogLines("profiles are served (TASKRELAY_PPROF_ADDR)"); len(lines) != 0 {
		t.Error("the relay serves profiles although nobody asked for them")
	}
	equal(t, "worker's exit code", worker.Stop(t, 40*time.Second), 0)
}
