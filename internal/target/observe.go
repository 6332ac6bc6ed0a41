package target

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Count makes the Maker count what its HTTP targets answer. Call it before Command.
func (m *Maker) Count(provider metric.MeterProvider) error {
	h, err := provider.Meter("github.com/taskrelay/taskrelay/internal/target").Float64Histogram("taskrelay.http.delivery.duration",
		metric.WithUnit("s"), metric.WithDescription("Time of an HTTP call to a target, by its host and the class of its answer."),
		metric.WithExplicitBucketBoundaries(.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60))
	if err != nil {
		return fmt.Errorf("metrics of targets: %w", err)
	}
	m.client.took = h
	return nil
}

// answered gives the time of a call; status 0: no answer.
func (c client) answered(ctx context.Context, host string, status int, began time.Time) {
	if c.took == nil {
		return
	}
	code := "none"
	if status > 0 {
		code = strconv.Itoa(status/100) + "xx"
	}
	c.took.Record(ctx, time.Since(began).Seconds(), metric.WithAttributes(attribute.String("target", host), attribute.String("code", code)))
}

// propagate puts the attempt's span into a call's headers, in the place of the producer's that the row has. Without a span
// of the attempt, the row's stays.
func propagate(ctx context.Context, header map[string]string) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return
	}
	for name := range header {
		if strings.EqualFold(name, "traceparent") || strings.EqualFold(name, "tracestate") {
			delete(header, name)
		}
	}
	propagation.TraceContext{}.Inject(ctx, propagation.MapCarrier(header))
}
