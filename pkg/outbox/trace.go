package outbox

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// A task carries the context of the span that made it in its row's headers, as W3C Trace Context: traceparent and
// tracestate. The relay copies them unchanged; the span of the worker links to them.
//
// Names follow the semantic conventions for messaging, v1.44.0, which are still in development: they may move.

const (
	headerTraceParent = "traceparent"
	headerTraceState  = "tracestate"
	// maxLinks bounds a span of the relay, as SDKs do.
	maxLinks = 128
)

// oneType is the type of all tasks, or "".
func oneType(tasks []NewTask) string {
	for i := range tasks {
		if tasks[i].BizType != tasks[0].BizType {
			return ""
		}
	}
	if len(tasks) == 0 {
		return ""
	}
	return tasks[0].BizType
}

// created is the span of a producer, or nothing.
type created struct{ span trace.Span }

// createSpan starts the producer's span when ctx carries one that is recorded, and adds its context to the task's
// headers, unless the caller has given a traceparent. The tracer is that of the span in ctx: there is nothing to
// configure, and without a span it costs a look into ctx.
func createSpan(ctx context.Context, bizType string, opts []Option, n int) (created, []Option) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return created{}, opts
	}
	destination, template := "tasks."+bizType, "tasks.{biz_type}"
	attributes := []attribute.KeyValue{
		attribute.String("messaging.system", "nats"),
		attribute.String("messaging.operation.name", "create"),
		attribute.String("messaging.operation.type", "create"),
		attribute.String("messaging.destination.template", template),
		attribute.String("taskrelay.biz_type", bizType),
	}
	if bizType == "" { // a batch of several types
		destination = template
		attributes = attributes[:len(attributes)-1]
	}
	if n > 1 {
		attributes = append(attributes, attribute.Int("messaging.batch.message_count", n))
	}
	ctx, span := parent.TracerProvider().Tracer(scope).Start(ctx, "create "+destination,
		trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(attributes...))
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	// A slice of its own: the caller's may have room behind its end.
	return created{span}, append(append([]Option(nil), opts...), traceHeaders(carrier))
}

func traceHeaders(carrier propagation.MapCarrier) Option {
	return func(r *newRow) error {
		for k := range r.headerMap {
			if strings.EqualFold(k, headerTraceParent) {
				return nil
			}
		}
		size := 0
		for k, v := range r.headerMap {
			size += len(k) + len(v)
		}
		for k, v := range carrier {
			if size += len(k) + len(v); size <= MaxHeaders { // a task is never refused for its trace
				_ = Header(k, v)(r)
			}
		}
		return nil
	}
}

// end ends the span; refs are the tasks it made or found.
func (c created) end(refs []Ref, err error) {
	if c.span == nil {
		return
	}
	switch {
	case err != nil:
		c.span.SetStatus(codes.Error, err.Error())
	case len(refs) == 1:
		c.span.SetAttributes(attribute.Int64("messaging.message.id", refs[0].ID), attribute.Bool("taskrelay.new", refs[0].New))
	}
	c.span.End()
}

// publishSpan is the span of a page, linked to the spans that made its tasks, or nil where none of those is sampled.
func (m *meter) publishSpan(l *lane, rows []pageRow) trace.Span {
	if m.tracer == nil {
		return nil
	}
	var links []trace.Link
	for i := range rows {
		if sc := rowTrace(rows[i].headers); sc.IsSampled() && len(links) < maxLinks {
			links = append(links, trace.Link{SpanContext: sc})
		}
	}
	if len(links) == 0 {
		return nil
	}
	_, span := m.tracer.Start(context.Background(), "publish tasks.{biz_type}",
		trace.WithSpanKind(trace.SpanKindClient), trace.WithNewRoot(), trace.WithLinks(links...), trace.WithAttributes(
			attribute.String("messaging.system", "nats"),
			attribute.String("messaging.operation.name", "publish"),
			attribute.String("messaging.operation.type", "send"),
			attribute.String("messaging.destination.template", "tasks.{biz_type}"),
			attribute.String("messaging.destination.name", m.r.names.Subject(l.bizType, l.priority)),
			attribute.Int("messaging.batch.message_count", len(rows)),
			attribute.String("taskrelay.biz_type", l.bizType),
		))
	return span
}

// left ends the span of a page that goes with its lane: who publishes it again has a span for that.
func (p pageSent) left(why string) {
	if p.span != nil {
		p.span.SetStatus(codes.Error, why)
		p.span.End()
	}
}

// rowTrace reads the trace context from a row's headers. Most rows have none: they are not decoded.
func rowTrace(headers []byte) trace.SpanContext {
	if !bytes.Contains(headers, []byte(`"`+headerTraceParent+`"`)) {
		return trace.SpanContext{}
	}
	var h struct {
		Parent string `json:"traceparent"`
		State  string `json:"tracestate"`
	}
	if err := json.Unmarshal(headers, &h); err != nil {
		return trace.SpanContext{} // its message says so, by a header that is dropped
	}
	carrier := propagation.MapCarrier{headerTraceParent: h.Parent, headerTraceState: h.State}
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
}
