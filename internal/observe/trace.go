package observe

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
)

// newTracers returns nil unless the environment asks for traces: an endpoint for them, or OTEL_TRACES_EXPORTER=otlp. What
// else is in OTEL_* (headers, certificates, sampler, limits) the SDK reads by itself.
func newTracers(ctx context.Context, role, version string, logger zerolog.Logger) (*trace.TracerProvider, error) {
	wanted, err := tracesWanted(os.Getenv)
	if err != nil || !wanted {
		return nil, err
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("traces: %w: look at the OTEL_EXPORTER_OTLP_ variables", err)
	}
	// The environment comes last: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
	r, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithHost(), resource.WithAttributes(
		attribute.String("service.name", "taskrelay-"+role), attribute.String("service.version", version)), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("traces: %w: look at OTEL_RESOURCE_ATTRIBUTES", err)
	}
	// A collector that is away is told of by one line now and then, not by one per batch.
	var mu sync.Mutex
	var last time.Time
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); now.Sub(last) > time.Minute {
			last = now
			logger.Warn().Err(err).Msg("spans not sent")
		}
	}))
	logger.Info().Str("exporter", "otlp").Msg("traces are sent")
	return trace.NewTracerProvider(trace.WithBatcher(exporter), trace.WithResource(r)), nil
}

func tracesWanted(env func(string) string) (bool, error) {
	exporter := env("OTEL_TRACES_EXPORTER")
	endpoint := cmp.Or(env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), env("OTEL_EXPORTER_OTLP_ENDPOINT"))
	switch {
	case strings.EqualFold(env("OTEL_SDK_DISABLED"), "true"), exporter == "none":
		return false, nil
	case exporter != "" && exporter != "otlp":
		return false, fmt.Errorf("OTEL_TRACES_EXPORTER=%q: expected otlp or none", exporter)
	case exporter == "" && endpoint == "":
		return false, nil
	}
	protocol := cmp.Or(env("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), env("OTEL_EXPORTER_OTLP_PROTOCOL"), "http/protobuf")
	if protocol != "http/protobuf" {
		return false, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=%q: expected http/protobuf (port 4318 of a collector)", protocol)
	}
	return true, nil
}
