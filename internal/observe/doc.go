// Package observe shows what a process does: Prometheus metrics over HTTP, and OpenTelemetry traces.
//
// Properties:
//   - Packages under pkg/ count by OpenTelemetry's API alone. Here is the SDK, and the exporter to Prometheus.
//   - A scrape that meets a slow Postgres or NATS ends all the same, without what these would have told.
//   - Traces are off unless the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT and its like) name a collector. They are
//     sent in the background; a collector that is away costs spans, never tasks.
package observe
