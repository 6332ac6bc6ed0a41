// Package leaks runs a relay and a worker in this process, alone, and looks at what goroutines they leave.
package leaks

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// A relay and a worker that have been stopped leave no goroutine behind: not after success, retries, a timeout and a
// compensation, nor while a handler still ran when they were told to stop.
func TestStoppedRelayAndWorkerLeaveNoGoroutine(t *testing.T) {
	n := testenv.StartNATSProcess(t) // a process of its own: its goroutines are none of ours
	e := testenv.NewEnv(t, testenv.DB(t), &n.NATSServer)
	before := goleak.IgnoreCurrent()

	pool, err := pgxpool.New(t.Context(), e.URL)
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect(n.URL, nats.ReconnectBufSize(-1))
	if err != nil {
		t.Fatal(err)
	}
	held := make(chan struct{})
	var reg command.Registry
	err = command.Register(&reg, "ORDER_PAYMENT", command.Command[map[string]string]{
		Execute: func(ctx context.Context, task *command.Task[map[string]string]) (any, error) {
			switch task.Payload["do"] {
			case "fail":
				return nil, errors.New("declined")
			case "hang":
				<-ctx.Done()
				return nil, ctx.Err()
			case "hold":
				close(held)
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return nil, nil
		},
		Compensate: func(context.Context, *command.Task[map[string]string], error) error { return nil },
		Retry:      retry.Fixed{Base: 20 * time.Millisecond}, MaxAttempts: 2, Timeout: 300 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	relay, err := outbox.NewRelay(pool, nc, outbox.RelayConfig{Reconcile: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	worker, err := command.NewWorker(pool, nc, &reg, command.WorkerConfig{Lease: 2 * time.Second, Grace: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- relay.Run(ctx) }()
	go func() { ended <- worker.Run(ctx) }()

	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, payload) SELECT 'ORDER_PAYMENT', json_build_object('do', (ARRAY['well', 'fail', 'hang'])[1 + i % 3])
		FROM generate_series(1, 30) AS i`)
	e.WaitNoneOpen(t, 60*time.Second)
	e.Insert(t, "ORDER_PAYMENT", "payload", `{"do": "hold"}`)
	<-held
	stop()
	for range 2 {
		if err := <-ended; err != nil {
			t.Errorf("ended with %v", err)
		}
	}
	nc.Close()
	pool.Close()
	e.Pool.Reset() // the test's own connections have grown in number
	if err := goleak.Find(before); err != nil {
		t.Errorf("left behind: %v", err)
	}
}
