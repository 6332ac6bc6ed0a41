package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

const (
	relaySilence  = 6 * time.Second // a relay's lanes are others' then
	workerSilence = 30 * time.Second
	long          = time.Hour   // an attempt that runs for longer is named
	late          = time.Minute // what should be out by then
)

// Servers are the two that are looked at; one that did not answer is nil, with the reason.
type Servers struct {
	Pool          *pgxpool.Pool
	PostgresError error
	NATS          *nats.Conn
	NATSError     error
}

// examination is one look.
type examination struct {
	report *Report
	table  table
	broker *broker // nil: NATS is away
	every  time.Duration
	held   map[string]*Member // what rows say of the leases of each worker
}

// Examine looks at both servers. cfg names the schema, the namespace and the settings of the streams. What cannot be
// looked at is in the report; it always returns one.
func Examine(ctx context.Context, s Servers, cfg outbox.RelayConfig) *Report {
	r := &Report{At: time.Now().UTC(), Schema: cfg.Schema.String(), Lanes: []Lane{}, Relays: []Member{}, Workers: []Member{}, Findings: []Finding{}}
	r.Postgres.SchemaNeeded = schema.Version
	r.NATS.Streams = []Stream{}
	e := &examination{report: r, every: cfg.Reconcile, held: make(map[string]*Member)}
	e.tableAlone(ctx, s, cfg)
	e.brokerAlone(ctx, s, cfg)
	if r.Postgres.Reachable && r.installation != "" {
		if err := e.both(ctx); err != nil {
			r.add(Finding{Level: Problem, Code: "not_compared", Where: "both", What: "table and stream could not be compared: " + err.Error(),
				Relay: "nothing", You: "run this command again, with a longer --timeout if that was too short"})
		}
	}
	r.Healthy = true
	for _, f := range r.Findings {
		r.Healthy = r.Healthy && f.Level != Problem
	}
	return r
}

// tableAlone looks at Postgres.
func (e *examination) tableAlone(ctx context.Context, s Servers, cfg outbox.RelayConfig) {
	r := e.report
	if s.Pool == nil {
		r.Postgres.Error = s.PostgresError.Error()
		r.add(Finding{Level: Problem, Code: "postgres_down", Where: "postgres", What: s.PostgresError.Error(),
			Relay: "waits and tries again, and so do workers; nothing is marked as failed meanwhile", You: "bring Postgres back"})
		return
	}
	r.Postgres.Reachable = true
	e.table = table{pool: s.Pool, schema: cfg.Schema}
	err := e.table.server(ctx, r)
	if err == nil {
		err = e.table.lanes(ctx, r)
	}
	if err == nil {
		r.Relays, err = e.table.members(ctx, relaysSQL)
	}
	if err == nil {
		r.Workers, err = e.table.members(ctx, workersSQL)
	}
	if err != nil {
		r.installation = "" // what is half known is compared with nothing
		r.Postgres.Error = err.Error()
		r.add(Finding{Level: Problem, Code: "table_not_read", Where: "postgres", What: err.Error(),
			Relay: "nothing", You: "mend that and run this command again; it needs role " + r.Schema + "_operator"})
	}
}

// brokerAlone looks at NATS.
func (e *examination) brokerAlone(ctx context.Context, s Servers, cfg outbox.RelayConfig) {
	r := e.report
	if s.NATS == nil {
		r.NATS.Error = s.NATSError.Error()
		r.add(Finding{Level: Problem, Code: "nats_down", Where: "nats", What: s.NATSError.Error(),
			Relay: "waits and tries again, tasks stay in the table; what is lost of the streams is published again", You: "bring NATS back"})
		return
	}
	r.NATS.Reachable, r.NATS.Server, r.NATS.Version = true, s.NATS.ConnectedServerName(), s.NATS.ConnectedServerVersion()
	names := outbox.Names{Namespace: cfg.Namespace, APIPrefix: cfg.APIPrefix}
	js, err := names.JetStream(s.NATS)
	if err == nil {
		e.broker = &broker{nc: s.NATS, js: js, names: names, cfg: cfg}
		err = e.broker.streams(ctx, r)
	}
	if err != nil {
		e.broker = nil
		r.NATS.Error = err.Error()
		r.add(Finding{Level: Problem, Code: "streams_not_read", Where: "nats", What: err.Error(),
			Relay: "nothing", You: "see whether JetStream is on, and whether this user may ask for streams and consumers"})
	}
}

// both compares.
func (e *examination) both(ctx context.Context) error {
	r := e.report
	for i := range r.Lanes {
		if err := e.compareLane(ctx, &r.Lanes[i]); err != nil {
			return fmt.Errorf("lane %s: %w", r.Lanes[i].key(), err)
		}
	}
	for i := range r.Lanes {
		e.judgeLane(&r.Lanes[i])
	}
	e.judgeRelays()
	e.judgeWorkers()
	if e.broker == nil || e.broker.tasks == nil {
		return nil
	}
	e.judgeSequence()
	return e.judgeOrphans(ctx)
}

// hold adds a lease that a row says a worker holds.
func (e *examination) hold(o row) {
	m := e.held[o.owner]
	if m == nil {
		m = &Member{Name: o.owner}
		e.held[o.owner] = m
	}
	m.Leases++
	if o.runningForMS >= m.OldestMS {
		m.OldestMS, m.OldestID = o.runningForMS, ID(o.id)
	}
}
