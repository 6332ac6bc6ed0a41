package command

import (
	"cmp"
	"fmt"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/taskrelay/taskrelay/internal/process"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// maxConcurrency keeps slots × prefetch within what a consumer and a batch can carry.
const maxConcurrency = 100_000

// WorkerConfig says how a worker works. The zero value is a worker for the default schema.
type WorkerConfig struct {
	// Schema is where the installation lives. By default "taskrelay".
	Schema outbox.Schema
	// Namespace precedes every stream and subject name; the relay's must be the same. By default none.
	Namespace string
	// APIPrefix is the prefix of JetStream's API: $JS.hub.API for domain hub. By default $JS.API.
	APIPrefix string
	// Concurrency is how many handlers run at once per type whose command names none. By default 50.
	Concurrency int
	// Lease is how long a task stays with a worker that gives no sign of life. A running task's lease is renewed
	// every third of it, so it need not be longer than a handler. By default 30 s, at least 1 s.
	Lease time.Duration
	// Grace is how long running handlers may go on after Run's context is cancelled. By default 25 s; negative: none.
	Grace time.Duration
	// NakMax is the longest delay that is left to JetStream; a longer one goes through the table. By default 30 s.
	NakMax time.Duration
	// Name of this worker in the tables worker, task and task_attempt; must be unique. By default <host>-<pid>-<random>.
	Name string
	// Version of the program, shown in the table worker. Optional.
	Version string
	// Logger by default is silent.
	Logger zerolog.Logger
	// MeterProvider counts what the worker does: docs/observability.md lists it. Optional, by default nothing is counted.
	MeterProvider metric.MeterProvider
	// TracerProvider makes a span of each attempt, which the handler's context carries. Optional, by default there are none.
	TracerProvider trace.TracerProvider
	// ChildSpans makes these spans children of the span that made the task. By default they link to it.
	ChildSpans bool
}

func (c WorkerConfig) withDefaults() (WorkerConfig, error) {
	c.Concurrency = cmp.Or(c.Concurrency, 50)
	c.Lease = cmp.Or(c.Lease, 30*time.Second)
	c.Grace = max(cmp.Or(c.Grace, 25*time.Second), 0)
	c.NakMax = cmp.Or(c.NakMax, 30*time.Second)
	c.Name = cmp.Or(c.Name, process.Name())
	if err := c.Schema.Validate(); err != nil {
		return c, err
	}
	if err := (outbox.Names{Namespace: c.Namespace, APIPrefix: c.APIPrefix}).Validate(); err != nil {
		return c, err
	}
	if c.Concurrency < 1 || c.Concurrency > maxConcurrency {
		return c, fmt.Errorf("concurrency is %d, must be 1 to %d", c.Concurrency, maxConcurrency)
	}
	if c.Lease < time.Second || c.Lease > 24*time.Hour {
		return c, fmt.Errorf("lease is %v, must be 1s to 24h", c.Lease)
	}
	if c.NakMax < 0 || c.NakMax > time.Hour {
		return c, fmt.Errorf("nak max is %v, must be 0 to 1h", c.NakMax)
	}
	return c, nil
}
