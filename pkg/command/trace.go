package command

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// A tracer makes the span of each attempt. It links to the span that made the task, by the row's traceparent; a child of
// that span only where the config says so: a retry tomorrow would stretch the trace of today's request over two days.
//
// Names follow the semantic conventions for messaging, v1.44.0, which are still in development: they may move.
type tracer struct {
	tracer trace.Tracer
	child  bool
}

func newTracer(cfg WorkerConfig) *tracer {
	if cfg.TracerProvider == nil {
		return nil
	}
	return &tracer{tracer: cfg.TracerProvider.Tracer(scope), child: cfg.ChildSpans}
}

// begin starts the span of an attempt; the handler's context carries it.
func (t *tracer) begin(ctx context.Context, a *attempt) context.Context {
	if t == nil {
		return ctx
	}
	carrier := propagation.MapCarrier{
		"traceparent": header(a.msg.Header, "traceparent"), "tracestate": header(a.msg.Header, "tracestate")}
	parent := propagation.TraceContext{}.Extract(ctx, carrier)
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(
		attribute.String("messaging.system", "nats"),
		attribute.String("messaging.operation.name", "process"),
		attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.destination.template", "tasks.{biz_type}"),
		attribute.String("messaging.destination.name", a.msg.Subject),
		attribute.String("messaging.consumer.group.name", a.lane.name()),
		attribute.Int64("messaging.message.id", a.id),
		attribute.String("taskrelay.biz_type", a.lane.bizType),
		attribute.String("taskrelay.phase", a.phase),
		attribute.Int("taskrelay.attempt", a.number),
	)}
	if link := trace.SpanContextFromContext(parent); link.IsValid() {
		if t.child {
			ctx = parent
		} else {
			options = append(options, trace.WithLinks(trace.Link{SpanContext: link}))
		}
	}
	ctx, a.span = t.tracer.Start(ctx, "process tasks."+a.lane.bizType, options...)
	return ctx
}

// endSpan says what became of the attempt. Payloads and texts of errors stay out: they may hold secrets, and the row has
// them.
func (a *attempt) endSpan(s *settlement) {
	if a.span == nil {
		return
	}
	a.span.SetAttributes(attribute.String("taskrelay.outcome", s.outcome))
	if s.class != "" {
		a.span.SetAttributes(attribute.String("error.type", s.class))
		a.span.SetStatus(codes.Error, s.class)
	}
	if s.action == actNak || s.action == actHandBack {
		a.span.SetAttributes(attribute.Int64("taskrelay.retry_delay_ms", int64(s.delay/time.Millisecond)))
	}
	a.span.End()
}
