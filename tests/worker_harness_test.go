package tests

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// workerLab is the worker alone: rows by SQL, messages published by hand as the relay would, no relay.
type workerLab struct {
	*testenv.Env
	t            *testing.T
	installation string
}

func newWorkerLab(t *testing.T) *workerLab {
	t.Helper()
	l := &workerLab{Env: testenv.New(t), t: t}
	l.installation = installation(t, l.Env)
	l.makeStream(l.installation)
	return l
}

func (l *workerLab) makeStream(owner string) {
	l.t.Helper()
	_, err := l.NATS.JS.CreateStream(l.t.Context(), jetstream.StreamConfig{
		Name: "TASKS", Subjects: []string{"tasks.>"}, Retention: jetstream.WorkQueuePolicy, AllowDirect: true,
		Metadata: map[string]string{outbox.MetadataInstallation: owner},
	})
	if err != nil {
		l.t.Fatal(err)
	}
}

// publish sends the message of a row as it is now.
func (l *workerLab) publish(id int64, change ...func(nats.Header)) {
	l.t.Helper()
	l.publishMsg(l.message(id, change...))
}

func (l *workerLab) message(id int64, change ...func(nats.Header)) *nats.Msg {
	l.t.Helper()
	r := l.Task(l.t, id)
	h := nats.Header{}
	h.Set(outbox.HeaderInstallation, l.installation)
	h.Set(outbox.HeaderID, itoa(id))
	h.Set(outbox.HeaderBizType, r.BizType)
	h.Set(outbox.HeaderGeneration, strconv.Itoa(r.Generation))
	h.Set(outbox.HeaderPhase, r.Phase)
	h.Set(outbox.HeaderPriority, r.Priority)
	h.Set(outbox.HeaderCreatedAt, strconv.FormatInt(r.CreatedAt.UnixMicro(), 10))
	for _, c := range change {
		c(h)
	}
	return &nats.Msg{Subject: "tasks." + r.BizType + "." + r.Priority, Header: h,
		Data: []byte(l.Text(l.t, "SELECT payload::text FROM taskrelay.task WHERE id = $1", id))}
}

func (l *workerLab) publishMsg(m *nats.Msg) {
	l.t.Helper()
	if _, err := l.NATS.JS.PublishMsg(l.t.Context(), m); err != nil {
		l.t.Fatal(err)
	}
}

// task inserts a row and publishes it.
func (l *workerLab) task(bizType string, columns ...any) int64 {
	l.t.Helper()
	id := l.Insert(l.t, bizType, columns...)
	l.publish(id)
	return id
}

// relayDue does what the relay does for handed back rows: it publishes what is due.
func (l *workerLab) relayDue() (n int) {
	l.t.Helper()
	rows, err := l.Pool.Query(l.t.Context(), `UPDATE taskrelay.task SET republish_at = now() + interval '10 min'
		WHERE republish_at <= now() AND status IN ('pending', 'retrying') RETURNING id`)
	if err != nil {
		l.t.Fatal(err)
	}
	var ids []int64
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			l.t.Fatal(err)
		}
		ids = append(ids, id)
	}
	for _, id := range ids {
		l.publish(id)
	}
	return len(ids)
}

// waitStatus waits for a state while acting as the relay.
func (l *workerLab) waitStatus(id int64, want string) testenv.Row {
	l.t.Helper()
	var r testenv.Row
	testenv.Eventually(l.t, soon, func() error {
		l.relayDue()
		if r = l.Task(l.t, id); r.Status != want {
			return errorf("task %d is %s (attempt %d, %s), want %s", id, r.Status, r.Attempt, text(r.LastError), want)
		}
		return nil
	})
	return r
}

func (l *workerLab) waitEmpty() {
	l.t.Helper()
	testenv.Eventually(l.t, soon, func() error {
		if n := l.NATS.Messages(l.t, "TASKS"); n != 0 {
			return errorf("%d messages are left in the stream, want 0", n)
		}
		return nil
	})
}

// runningWorker is a worker of a test. It is stopped at the end.
type runningWorker struct {
	*command.Worker
	t     *testing.T
	nc    *nats.Conn
	stop  context.CancelFunc
	done  chan struct{}
	mu    sync.Mutex
	ended error
}

// worker starts a worker with short leases.
func (l *workerLab) worker(reg *command.Registry, change ...func(*command.WorkerConfig)) *runningWorker {
	l.t.Helper()
	w := l.unstarted(reg, change...)
	w.start()
	testenv.Eventually(l.t, soon, w.Ready)
	return w
}

func (l *workerLab) unstarted(reg *command.Registry, change ...func(*command.WorkerConfig)) *runningWorker {
	l.t.Helper()
	return l.unstartedOn(l.OpenPool("worker"), reg, change...)
}

func (l *workerLab) unstartedOn(pool *pgxpool.Pool, reg *command.Registry, change ...func(*command.WorkerConfig)) *runningWorker {
	l.t.Helper()
	cfg := command.WorkerConfig{Lease: 2 * time.Second, Grace: time.Second, Logger: zerolog.New(zerolog.NewTestWriter(l.t))}
	for _, c := range change {
		c(&cfg)
	}
	nc := l.Connect("worker")
	w, err := command.NewWorker(pool, nc, reg, cfg)
	if err != nil {
		l.t.Fatal(err)
	}
	return &runningWorker{Worker: w, t: l.t, nc: nc, done: make(chan struct{})}
}

func (w *runningWorker) start() {
	ctx, cancel := context.WithCancel(context.Background())
	w.stop = cancel
	go func() {
		defer close(w.done)
		err := w.Run(ctx)
		w.mu.Lock()
		w.ended = err
		w.mu.Unlock()
	}()
	w.t.Cleanup(func() { w.wait(60 * time.Second) })
}

// wait stops the worker, waits for its end and returns what Run returned.
func (w *runningWorker) wait(limit time.Duration) error {
	w.stop()
	select {
	case <-w.done:
	case <-time.After(limit):
		w.t.Errorf("worker did not stop within %v", limit)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ended
}

// fast is a command that retries at once, as many times as it may.
func fast[P any](execute func(context.Context, *command.Task[P]) (any, error)) command.Command[P] {
	return command.Command[P]{Execute: execute, Retry: retry.Fixed{Base: 50 * time.Millisecond}, MaxAttempts: 3}
}

func register[P any](t *testing.T, reg *command.Registry, bizType string, c command.Command[P]) {
	t.Helper()
	if err := command.Register(reg, bizType, c); err != nil {
		t.Fatal(err)
	}
}

type raw = json.RawMessage

var errFlaky = errors.New("flaky")
