package observe

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/exemplar"
	"go.opentelemetry.io/otel/trace"
)

// maxSeries bounds the series of one metric, beyond what any sane number of biz types needs. The SDK's own limit of 2000
// would be reached with 100.
const maxSeries = 50_000

// Telemetry is where a process counts and traces. Close it.
type Telemetry struct {
	Meters  metric.MeterProvider
	Tracers trace.TracerProvider // nil: traces are off

	registry *prometheus.Registry
	logger   zerolog.Logger
	close    []func(context.Context) error
}

// New makes the Telemetry of a role, such as relay or worker.
func New(ctx context.Context, role, version string, logger zerolog.Logger) (*Telemetry, error) {
	t := &Telemetry{registry: prometheus.NewRegistry(), logger: logger.With().Str("component", "telemetry").Logger()}
	reader, err := exporter.New(exporter.WithRegisterer(t.registry), exporter.WithoutScopeInfo(), exporter.WithoutTargetInfo())
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	meters := sdk.NewMeterProvider(sdk.WithReader(reader), sdk.WithCardinalityLimit(maxSeries),
		sdk.WithExemplarFilter(exemplar.AlwaysOffFilter)) // nobody sees them, and each costs a look at the clock
	t.Meters = meters
	t.close = append(t.close, meters.Shutdown)
	t.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		buildInfo(role, version),
	)
	tracers, err := newTracers(ctx, role, version, t.logger)
	if err != nil {
		return nil, err
	}
	if tracers != nil {
		t.Tracers = tracers
		t.close = append(t.close, tracers.Shutdown)
	}
	return t, nil
}

// Add adds metrics of other kinds, such as a [Pool].
func (t *Telemetry) Add(c ...prometheus.Collector) { t.registry.MustRegister(c...) }

// Gatherer is what Handler serves.
func (t *Telemetry) Gatherer() prometheus.Gatherer { return t.registry }

// Handler serves /metrics.
func (t *Telemetry) Handler() http.Handler {
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{
		ErrorLog:            failures{t.logger},
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: 4,
	})
}

type failures struct{ logger zerolog.Logger }

func (f failures) Println(v ...any) {
	f.logger.Warn().Str("error", fmt.Sprint(v...)).Msg("metrics incomplete")
}

// Close sends what spans are left, for a few seconds at most.
func (t *Telemetry) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	var errs []error
	for _, f := range t.close {
		errs = append(errs, f(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		t.logger.Warn().Err(err).Msg("last spans not sent")
	}
}

func buildInfo(role, version string) prometheus.Collector {
	revision := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = s.Value
			}
		}
	}
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "taskrelay_build_info", Help: "1, with what this process is made of.",
		ConstLabels: prometheus.Labels{"role": role, "version": version, "revision": revision, "goversion": runtime.Version()},
	}, func() float64 { return 1 })
}
