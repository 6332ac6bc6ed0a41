package tests

import (
	"context"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// gates holds handlers until the test lets them go.
type gates struct {
	mu   sync.Mutex
	all  map[int64]chan struct{}
	runs map[int64]int
}

func (g *gates) of(id int64) chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.all == nil {
		g.all, g.runs = map[int64]chan struct{}{}, map[int64]int{}
	}
	if g.all[id] == nil {
		g.all[id] = make(chan struct{})
	}
	return g.all[id]
}

func (g *gates) execute(ctx context.Context, t *command.Task[raw]) (any, error) {
	gate := g.of(t.ID)
	g.mu.Lock()
	g.runs[t.ID]++
	g.mu.Unlock()
	select {
	case <-gate:
		return nil, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (g *gates) waitRunning(t *testing.T, id int64) {
	t.Helper()
	g.of(id)
	testenv.Eventually(t, soon, func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.runs[id] == 0 {
			return errorf("task %d does not run yet", id)
		}
		return nil
	})
}

// A stream is deleted and made anew while a task runs. The ack of its message names sequence 1, which in the new stream is
// the message of another task that runs now: it must stay there until that one is settled.
func TestLateAckDoesNotReachTheStreamMadeAnew(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	var g gates
	register(t, &reg, "ORDER_PAYMENT", fast(g.execute))
	w := l.worker(&reg, func(c *command.WorkerConfig) { c.Lease = 10 * time.Second })
	old := l.task("ORDER_PAYMENT")
	g.waitRunning(t, old)

	if err := l.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	l.makeStream(l.installation)
	testenv.Eventually(t, soon, func() error {
		_, err := l.NATS.JS.Consumer(t.Context(), "TASKS", "ORDER_PAYMENT-low")
		return err
	})
	other := l.task("ORDER_PAYMENT")
	g.waitRunning(t, other)
	close(g.of(old))
	l.waitStatus(old, "succeeded")
	if err := w.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	testenv.Never(t, 300*time.Millisecond, func() error {
		if n := l.NATS.Messages(t, "TASKS"); n != 1 {
			return errorf("the new stream has %d messages, want the one of the task that runs", n)
		}
		return nil
	})
	close(g.of(other))
	l.waitStatus(other, "succeeded")
	l.waitEmpty()
}

// Messages of a type with large payloads are fetched in pieces of some megabytes, and all are.
func TestLargePayloadsAreFetchedInPieces(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	register(t, &reg, "ORDER_PAYMENT", fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, nil }))
	payload := `{"x": "` + strings.Repeat("y", 500<<10) + `"}`
	var ids []int64
	for range 40 { // 20 MB
		id := l.task("ORDER_PAYMENT", "payload", payload)
		ids = append(ids, id)
	}
	refused := make(chan string, 100)
	sub, err := l.NATS.Conn.Subscribe("_INBOX.>", func(m *nats.Msg) {
		if m.Header.Get("Status") == "409" {
			refused <- m.Header.Get("Description")
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	w := l.worker(&reg)
	for _, id := range ids {
		l.waitStatus(id, "succeeded")
	}
	select {
	case why := <-refused:
		equal(t, "why the server ended a pull", why, "Message Size Exceeds MaxBytes")
	default:
		t.Error("all came in one pull: it has no limit of bytes")
	}
	if err := w.Ready(); err != nil {
		t.Errorf("after pulls that ended by their bytes: %v", err)
	}
}

// A handler that goes on after its transaction with Complete has committed holds no lease any more, and that is as it should be.
func TestCommittedCompleteIsNoLostLease(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var reg command.Registry
	done := make(chan error, 1)
	register(t, &reg, "ORDER_PAYMENT", command.Command[raw]{Execute: func(ctx context.Context, task *command.Task[raw]) (any, error) {
		err := pgx.BeginFunc(ctx, e.Pool, func(tx pgx.Tx) error { return command.Complete(ctx, tx, task) })
		if err != nil {
			return nil, err
		}
		select { // longer than a beat takes to come by
		case <-ctx.Done():
			done <- context.Cause(ctx)
		case <-time.After(2 * time.Second):
			done <- nil
		}
		return nil, nil
	}})
	e.RunRelay()
	w := e.RunWorker(&reg)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	if err := <-done; err != nil {
		t.Errorf("its context ended: %v", err)
	}
	if strings.Contains(w.Logs(), "lease lost") {
		t.Errorf("log of the worker:\n%s", w.Logs())
	}
}

// Relay and worker at a leaf of a hub: JetStream's API of the hub has another prefix there. The leaf has streams of its own,
// so whatever were asked without the prefix would be found missing.
func TestAPIPrefixOfADomainIsUsedEverywhere(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().(*net.TCPAddr)
	_ = l.Close()
	hub := testenv.NATS(t, func(o *server.Options) {
		o.ServerName, o.JetStreamDomain = "hub", "hub"
		o.LeafNode.Host, o.LeafNode.Port = "127.0.0.1", address.Port
	})
	e := testenv.New(t, func(o *server.Options) {
		o.ServerName, o.JetStreamDomain = "leaf", "leaf"
		o.LeafNode.Remotes = []*server.RemoteLeafOpts{{URLs: []*url.URL{{Scheme: "nats-leaf", Host: address.String()}}}}
	})
	prefix := "TASKRELAY_NATS_API_PREFIX=$JS.hub.API"
	sink := testenv.NewSink(t)
	sink.Default(testenv.Statuses(500, 200)...)
	e.StartRelay(prefix, "TASKRELAY_RELAY_RECONCILE=1s")
	e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), prefix)...)
	e.WaitStatus(t, 2*soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.lane WHERE biz_type = 'ORDER_PAYMENT' AND priority = 'low' AND low_snapshot::text <> '1:1:'`) // reconciled
	hub.WaitStream(t, "TASKS")
	// The lines that the command line prints for the nats CLI find the hub's streams as well.
	dead := e.Insert(t, "ORDER_PAYMENT", "max_attempts", 1)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	nats, shown := testenv.NATSCLI(t, e.NATS.URL), 0
	for _, args := range [][]string{{"dead", "list"}, {"show", itoa(dead)}} {
		r := runCLI(t, "", e.Vars(prefix), args...).ok(t, 0)
		for line := range strings.Lines(r.out + r.errOut) {
			command, ok := strings.CutPrefix(strings.TrimSpace(line), "nats --server "+e.NATS.URL+" ")
			if !ok {
				continue
			}
			shown++
			if out := nats(strings.Fields(strings.ReplaceAll(command, "'", ""))...); !strings.Contains(out, "dead.ORDER_PAYMENT."+itoa(dead)) && !strings.Contains(out, "TASKS_DEAD") {
				t.Errorf("nats %s shows nothing of it: %s", command, out)
			}
		}
	}
	equal(t, "commands", shown, 5)
	streams := e.NATS.JS.ListStreams(t.Context())
	for s := range streams.Info() {
		t.Errorf("the leaf has stream %s", s.Config.Name)
	}
	for _, bad := range []string{"a b", "$JS.*", "x..y", ".x"} {
		if _, err := outbox.NewRelay(e.Pool, e.NATS.Conn, outbox.RelayConfig{APIPrefix: bad, Logger: zerolog.Nop()}); err == nil {
			t.Errorf("API prefix %q is accepted", bad)
		}
	}
}
