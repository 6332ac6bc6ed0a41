package tests

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// recorder keeps spans in memory.
func recorder(t *testing.T) (*tracetest.SpanRecorder, *sdk.TracerProvider) {
	t.Helper()
	r := tracetest.NewSpanRecorder()
	return r, sdk.NewTracerProvider(sdk.WithSpanProcessor(r))
}

func spansNamed(r *tracetest.SpanRecorder, name string) (found []sdk.ReadOnlySpan) {
	for _, s := range r.Ended() {
		if s.Name() == name {
			found = append(found, s)
		}
	}
	return found
}

func attributeOf(s sdk.ReadOnlySpan, key string) string {
	for _, a := range s.Attributes() {
		if a.Key == attribute.Key(key) {
			return a.Value.String()
		}
	}
	return ""
}

// A request, the task it made, the relay's batch and the attempt find each other.
func TestTraceLeadsFromTheRequestToTheAttempt(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	spans, provider := recorder(t)

	ctx, request := provider.Tracer("shop").Start(t.Context(), "POST /orders")
	var traced, byHand, untraced outbox.Ref
	err := pgx.BeginFunc(ctx, e.Pool, func(tx pgx.Tx) (err error) {
		if traced, err = outbox.Enqueue(ctx, tx, "ORDER_PAYMENT", nil); err != nil {
			return err
		}
		const given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		if byHand, err = outbox.Enqueue(ctx, tx, "ORDER_PAYMENT", nil, outbox.Header("Traceparent", given)); err != nil {
			return err
		}
		untraced, err = outbox.Enqueue(context.Background(), tx, "ORDER_PAYMENT", nil)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	request.End()

	created := spansNamed(spans, "create tasks.ORDER_PAYMENT")
	if len(created) != 2 {
		t.Fatalf("got %d create spans, want 2: the third task was made without a span", len(created))
	}
	first := created[0]
	if first.Parent().SpanID() != request.SpanContext().SpanID() || first.SpanKind() != trace.SpanKindProducer {
		t.Errorf("create span: parent %s, kind %s; want the request and producer", first.Parent().SpanID(), first.SpanKind())
	}
	equal(t, "message id of the create span", attributeOf(first, "messaging.message.id"), itoa(traced.ID))
	parent := func(id int64) string {
		return e.Text(t, "SELECT coalesce(headers->>'traceparent', headers->>'Traceparent', '') FROM taskrelay.task WHERE id = $1", id)
	}
	equal(t, "traceparent in the row", parent(traced.ID), "00-"+first.SpanContext().TraceID().String()+"-"+first.SpanContext().SpanID().String()+"-"+first.SpanContext().TraceFlags().String())
	equal(t, "traceparent given by the caller", parent(byHand.ID), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	equal(t, "traceparent of the untraced task", parent(untraced.ID), "")

	var inHandler trace.SpanContext
	var reg command.Registry
	register(t, &reg, "ORDER_PAYMENT", fast(func(ctx context.Context, task *command.Task[raw]) (any, error) {
		if task.ID == traced.ID {
			inHandler = trace.SpanContextFromContext(ctx)
			if task.Attempt == 1 {
				return nil, errFlaky
			}
		}
		return nil, nil
	}))
	e.RunRelay(func(c *outbox.RelayConfig) { c.TracerProvider = provider })
	e.RunWorker(&reg, func(c *command.WorkerConfig) { c.TracerProvider = provider })
	e.WaitNoneOpen(t, soon)

	links := func(s sdk.ReadOnlySpan) (ids []string) {
		for _, l := range s.Links() {
			ids = append(ids, l.SpanContext.SpanID().String())
		}
		return ids
	}
	want := first.SpanContext().SpanID().String()
	testenv.Eventually(t, soon, func() error {
		for _, s := range spansNamed(spans, "publish tasks.{biz_type}") {
			if slices.Contains(links(s), want) {
				return nil
			}
		}
		return errorf("no span of the relay links to the one that made the task")
	})
	var attempts []sdk.ReadOnlySpan
	for _, s := range spansNamed(spans, "process tasks.ORDER_PAYMENT") {
		if attributeOf(s, "messaging.message.id") == itoa(traced.ID) {
			attempts = append(attempts, s)
		}
	}
	if len(attempts) != 2 {
		t.Fatalf("got %d spans of attempts, want 2", len(attempts))
	}
	for i, s := range attempts {
		if s.SpanKind() != trace.SpanKindConsumer || !slices.Equal(links(s), []string{want}) || s.Parent().IsValid() {
			t.Errorf("attempt %d: kind %s, links %v, parent %v; want consumer, %s and none", i+1, s.SpanKind(), links(s), s.Parent().SpanID(), want)
		}
		equal(t, "attempt", attributeOf(s, "taskrelay.attempt"), itoa(int64(i+1)))
		equal(t, "outcome", attributeOf(s, "taskrelay.outcome"), []string{"failed", "succeeded"}[i])
	}
	if inHandler.SpanID() != attempts[1].SpanContext().SpanID() {
		t.Error("the handler's context does not carry the attempt's span")
	}
}

// Where children are asked for, the attempt is in the trace of the request.
func TestAttemptIsAChildWhereThatIsAskedFor(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	spans, provider := recorder(t)
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	e.Insert(t, "ORDER_PAYMENT", "headers", `{"traceparent": "`+parent+`"}`) // a producer in another language
	var reg command.Registry
	register(t, &reg, "ORDER_PAYMENT", fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, nil }))
	e.RunRelay()
	e.RunWorker(&reg, func(c *command.WorkerConfig) { c.TracerProvider, c.ChildSpans = provider, true })
	e.WaitNoneOpen(t, soon)
	attempts := spansNamed(spans, "process tasks.ORDER_PAYMENT")
	if len(attempts) != 1 || attempts[0].Parent().SpanID().String() != "b7ad6b7169203331" || len(attempts[0].Links()) != 0 {
		t.Errorf("got %d spans, want one below the producer's", len(attempts))
	}
}

// The stock worker sends spans where OTEL_EXPORTER_OTLP_ENDPOINT says, and its own span's context to the target.
func TestStockWorkerSendsSpansAndItsTraceParent(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	got := make(chan string, 100)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- r.URL.Path + " " + r.Header.Get("Content-Type")
	}))
	defer collector.Close()
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	e.Insert(t, "PAY", "headers", `{"traceparent": "`+parent+`", "tracestate": "shop=1"}`)
	e.StartRelay()
	worker := e.StartWorker(append(testenv.HTTPType("PAY", sink.URL), "OTEL_EXPORTER_OTLP_ENDPOINT="+collector.URL, "OTEL_BSP_SCHEDULE_DELAY=100")...)
	e.WaitNoneOpen(t, soon)
	calls := sink.Calls()
	if len(calls) != 1 {
		t.Fatalf("got %d calls, want 1", len(calls))
	}
	sent := calls[0].Header.Values("Traceparent")
	if len(sent) != 1 || sent[0] == parent || !strings.HasPrefix(sent[0], "00-") {
		t.Errorf("traceparent sent to the target: got %q, want one of the attempt's own span", sent)
	}
	if s := calls[0].Header.Get("Tracestate"); s != "" {
		t.Errorf("tracestate of another trace was sent: %q", s)
	}
	testenv.Eventually(t, soon, func() error {
		select {
		case line := <-got:
			if line != "/v1/traces application/x-protobuf" {
				return errorf("the collector got %q", line)
			}
			return nil
		default:
			return errorf("the collector got nothing; worker: %.500s", worker.Logs())
		}
	})
}
