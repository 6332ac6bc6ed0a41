package observe

import (
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/rs/zerolog"
)

func TestTracesAreOffUnlessTheEnvironmentAsksForThem(t *testing.T) {
	for _, c := range []struct {
		env    map[string]string
		wanted bool
		err    string
	}{
		{env: nil},
		{env: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, wanted: true},
		{env: map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, wanted: true},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, wanted: true},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}},
		{env: map[string]string{"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, err: "OTEL_TRACES_EXPORTER"},
		{env: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, err: "http/protobuf"},
	} {
		wanted, err := tracesWanted(func(name string) string { return c.env[name] })
		if wanted != c.wanted || (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%v: got %v, %v; want %v, %q", c.env, wanted, err, c.wanted, c.err)
		}
	}
}

func TestMetricsOfAProcessAreClean(t *testing.T) {
	tel, err := New(t.Context(), "relay", "v1.2.3", zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer tel.Close()
	if tel.Tracers != nil {
		t.Error("traces are on")
	}
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none") // does not connect
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	nc, err := nats.Connect("nats://127.0.0.1:1", nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	tel.Add(Connections(pool, nc))
	problems, err := testutil.GatherAndLint(tel.Gatherer())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	w := httptest.NewRecorder()
	tel.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	body, err := io.ReadAll(w.Result().Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`taskrelay_build_info{goversion="`, `role="relay"`, `version="v1.2.3"`, "\ntaskrelay_nats_connected 0\n", "\ngo_goroutines ", "\nprocess_cpu_seconds_total "} {
		if !strings.Contains(string(body), want) {
			t.Errorf("/metrics has no %q", want)
		}
	}
}
