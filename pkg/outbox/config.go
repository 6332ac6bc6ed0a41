package outbox

import (
	"cmp"
	"fmt"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/taskrelay/taskrelay/internal/process"
)

// RelayConfig says how a relay works. The zero value is a relay for the default schema.
type RelayConfig struct {
	// Schema is where the installation lives. By default "taskrelay".
	Schema Schema
	// Namespace precedes every stream and subject name. By default none.
	Namespace string
	// APIPrefix is the prefix of JetStream's API: $JS.hub.API for domain hub. By default $JS.API.
	APIPrefix string
	// Replicas of the streams the relay creates, 1 to 5. By default 1.
	Replicas int
	// MaxPerSubject is how many messages a lane may hold in the stream before it waits. By default 10,000.
	MaxPerSubject int64
	// BizTypes limits the relay to these types. By default all.
	BizTypes []string
	// Disabled makes Run do nothing but wait: alive and ready, publishing nothing.
	Disabled bool
	// Batch is how many rows of a lane one read takes at most. By default 500.
	Batch int
	// PollMin is the time between two reads while there is work. By default 5 ms.
	PollMin time.Duration
	// PollMax is the time between two reads when nothing happens. By default 20 ms.
	PollMax time.Duration
	// Reconcile is the time between two comparisons of table and stream. By default 30 s.
	Reconcile time.Duration
	// Notifiers that types may name in biz_type.notifier, beside "log", which is there by itself. Optional.
	Notifiers map[string]Notifier
	// DefaultNotifier tells of types that name none. By default "log".
	DefaultNotifier string
	// NoticeInterval is the least time between two notices about one type. By default 1 minute.
	NoticeInterval time.Duration
	// Retain is how long finished rows are kept. By default 30 days, dead ones until a person decides.
	Retain Retention
	// Name of this relay in the tables relay and lane; must be unique. By default <host>-<pid>-<random>.
	Name string
	// Version of the program, shown in the table relay. Optional.
	Version string
	// Logger by default is silent.
	Logger zerolog.Logger
	// MeterProvider counts what the relay does: docs/observability.md lists it. Optional, by default nothing is counted.
	MeterProvider metric.MeterProvider
	// TracerProvider makes a span of each batch that has tasks of sampled traces. Optional, by default there are none.
	TracerProvider trace.TracerProvider
}

func (c RelayConfig) withDefaults() (RelayConfig, error) {
	c.Replicas = cmp.Or(c.Replicas, 1)
	c.MaxPerSubject = cmp.Or(c.MaxPerSubject, 10_000)
	c.Batch = cmp.Or(c.Batch, 500)
	c.PollMin = cmp.Or(c.PollMin, 5*time.Millisecond)
	c.PollMax = cmp.Or(c.PollMax, 20*time.Millisecond)
	c.Reconcile = cmp.Or(c.Reconcile, 30*time.Second)
	c.Name = cmp.Or(c.Name, process.Name())
	var err error
	if c.Retain, err = c.Retain.withDefaults(); err != nil {
		return c, err
	}
	if err := c.Schema.Validate(); err != nil {
		return c, err
	}
	if err := (Names{Namespace: c.Namespace, APIPrefix: c.APIPrefix}).Validate(); err != nil {
		return c, err
	}
	for _, t := range c.BizTypes {
		if err := ValidateBizType(t); err != nil {
			return c, err
		}
	}
	if c.Replicas < 1 || c.Replicas > 5 {
		return c, fmt.Errorf("replicas is %d, must be 1 to 5", c.Replicas)
	}
	if c.MaxPerSubject < 1 || c.Batch < 1 || c.Batch > 10_000 {
		return c, fmt.Errorf("max per subject (%d) must be at least 1, batch (%d) 1 to 10000", c.MaxPerSubject, c.Batch)
	}
	if c.PollMin < time.Millisecond || c.PollMax < c.PollMin {
		return c, fmt.Errorf("poll times (%v, %v) must be at least 1ms and in order", c.PollMin, c.PollMax)
	}
	if c.Reconcile < 100*time.Millisecond {
		return c, fmt.Errorf("reconcile time %v must be at least 100ms", c.Reconcile)
	}
	return c, c.checkNotices()
}
