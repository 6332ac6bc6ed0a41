package tests

import (
	"context"
	"errors"
	"net"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
)

// cable is the network between a client and NATS. It can be pulled out.
type cable struct {
	mu    sync.Mutex
	out   bool
	conns []net.Conn
}

func (c *cable) Dial(network, addr string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out {
		return nil, errors.New("the test has pulled the cable out")
	}
	conn, err := net.Dial(network, addr)
	if err == nil {
		c.conns = append(c.conns, conn)
	}
	return conn, err
}

func (c *cable) pullOut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = true
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	c.conns = nil
}

func (c *cable) plugIn() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = false
}

// C-095, C-094: a worker is cut off from NATS in mid-call, for two AckWaits and more, and has its database. Its
// message goes to another worker again and again, whose claims the lease in the row refuses: one call, and its result counts.
func TestWorkerCutOffFromNATSIsNotRunBeside(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var calls, beside atomic.Int64
	release := make(chan struct{})
	holding := func(calls *atomic.Int64) *command.Registry {
		var reg command.Registry
		register(t, &reg, "PAY", fast(func(ctx context.Context, _ *command.Task[raw]) (any, error) {
			calls.Add(1)
			select {
			case <-release:
				return nil, nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}))
		return &reg
	}
	wire := &cable{}
	nc, err := nats.Connect(l.NATS.URL, nats.SetCustomDialer(wire), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond),
		nats.ReconnectBufSize(-1), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	short := command.WorkerConfig{Lease: time.Second, Grace: time.Second, Logger: zerolog.New(zerolog.NewTestWriter(t))}
	worker, err := command.NewWorker(l.OpenPool("cut off"), nc, holding(&calls), short)
	if err != nil {
		t.Fatal(err)
	}
	cut := &runningWorker{Worker: worker, t: t, nc: nc, done: make(chan struct{})}
	cut.start()
	testenv.Eventually(t, soon, cut.Ready)
	id := l.task("PAY")
	l.WaitStatus(t, soon, id, "running")

	wire.pullOut()
	other := l.worker(holding(&beside), func(c *command.WorkerConfig) { c.Lease = time.Second })
	consumer, err := l.NATS.JS.Consumer(t.Context(), "TASKS", "PAY-low")
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		info, err := consumer.Info(t.Context())
		if err == nil && info.Delivered.Consumer < 3 {
			err = errorf("the message was delivered %d times, want 3", info.Delivered.Consumer)
		}
		return err
	})
	r := l.Task(t, id)
	equal(t, "state while it is cut off", r.Status, "running")
	equal(t, "attempt while it is cut off", r.Attempt, 1)
	close(release)
	l.WaitStatus(t, soon, id, "succeeded") // by way of Postgres alone
	l.waitEmpty()                          // the other worker has seen that it is done
	wire.plugIn()
	testenv.Eventually(t, soon, cut.Ready)
	l.waitStatus(l.task("PAY"), "succeeded")
	equal(t, "outcomes", outcomes(t, l.Env, id), "[succeeded]")
	equal(t, "calls", calls.Load()+beside.Load(), 2)
	equal(t, "stale", cut.Stats().Stale.Load()+other.Stats().Stale.Load(), 0)
}

// C-105: somebody has set the window of unacked messages to ten, and ten tasks hang. Their time limit frees the window,
// their retries do not fill it for good, and the others run.
func TestHangingTasksFreeTheWindow(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "TIMEOUT", "500ms", "MAX_ATTEMPTS", "2", "STRATEGY", "fixed", "BASE_DELAY", "1s")...)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	consumer, err := e.NATS.JS.Consumer(t.Context(), "TASKS", "ORDER_PAYMENT-low")
	if err != nil {
		t.Fatal(err)
	}
	cfg := consumer.CachedInfo().Config
	cfg.MaxAckPending = 10
	if _, err := e.NATS.JS.UpdateConsumer(t.Context(), "TASKS", cfg); err != nil {
		t.Fatal(err)
	}
	var hanging []int64
	for i := range 10 {
		bizID := "hangs " + itoa(int64(i))
		sink.Script(bizID, testenv.Reply{Hang: true})
		hanging = append(hanging, e.Insert(t, "ORDER_PAYMENT", "biz_id", bizID))
	}
	sink.WaitCalls(t, soon, 11)
	insertMany(t, e, "ORDER_PAYMENT", 100)
	e.WaitNoneOpen(t, soon)
	for _, id := range hanging {
		equal(t, "outcomes", outcomes(t, e, id), "[timeout timeout]")
	}
	equal(t, "succeeded at once", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1"), 101)
	equal(t, "calls", len(sink.Calls()), 121)
	if n := sink.MostOpen(); n > 10 {
		t.Errorf("%d calls at once with a window of 10", n)
	}
	noOverlaps(t, sink)
}

// C-079: NATS refuses what is published for one type. Its tasks wait, named in the log and not marked as failed; nobody
// else waits with them; the permission alone mends it.
func TestTypeThatMayNotBePublishedHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "all", Password: "all"},
			{Username: "narrow", Password: "narrow", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: []string{"tasks.BLOCKED.>"}}}},
		}
		o.NoAuthUser = "all"
	})
	sink := testenv.NewSink(t)
	relay := e.StartRelay("TASKRELAY_NATS_URL=" + strings.Replace(e.NATS.URL, "://", "://narrow:narrow@", 1))
	e.StartWorker(testenv.Types(testenv.HTTPType("BLOCKED", sink.URL), testenv.HTTPType("ORDER_PAYMENT", sink.URL))...)
	insertMany(t, e, "BLOCKED", 1500)
	relay.WaitLog(t, soon, "tasks.BLOCKED.low")
	ready := adminURL(t, relay) + "/readyz?verbose"
	waitHealth(t, ready, 503, "tasks of BLOCKED (low) cannot be published", "NATS permits no publish to tasks.BLOCKED.low")
	if strings.Contains(relay.Logs(), "no answer within") {
		t.Error("an answer was waited for that does not come")
	}
	insertMany(t, e, "ORDER_PAYMENT", 200)
	e.WaitCount(t, soon, 200, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'")
	equal(t, "untouched", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE biz_type = 'BLOCKED' AND status = 'pending' AND attempt = 0"), 1500)
	equal(t, "calls", len(sink.Calls()), 200)
	_, metrics := get(t, adminURL(t, relay)+"/metrics")
	if !regexp.MustCompile(`taskrelay_relay_lanes\{[^}]*state="waiting"[^}]*\} 1\b`).MatchString(metrics) {
		t.Error("no metric says that a lane waits")
	}
	if n := strings.Count(relay.Logs(), "\n"); n > 100 {
		t.Errorf("the relay has written %d lines", n)
	}
	if code := relay.Stop(t, soon); code != 0 {
		t.Errorf("exit code %d", code)
	}
	e.StartRelay()
	e.WaitNoneOpen(t, soon)
	equal(t, "calls", len(sink.Calls()), 1700)
	noOverlaps(t, sink)
}

// C-086: JetStream's storage is full. Nothing dies of it, the relay says so, and all runs once there is room again.
func TestFullStorageMakesTasksWait(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, func(o *server.Options) { o.JetStreamMaxStore = 4 << 20 })
	sink := testenv.NewSink(t)
	relay := e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	_, err := e.NATS.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "JUNK", Subjects: []string{"junk"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{256 << 10, 1 << 10, 1} { // to the last byte
		for i := 0; ; i++ {
			if _, err := e.NATS.JS.Publish(t.Context(), "junk", make([]byte, size)); err != nil {
				break
			}
			if i > 5000 {
				t.Fatal("the storage does not fill up")
			}
		}
	}
	insertMany(t, e, "ORDER_PAYMENT", 300)
	relay.WaitLog(t, soon, "lane waits, its tasks stay in the table")
	waitHealth(t, adminURL(t, relay)+"/readyz", 503)
	equal(t, "unharmed", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'dead' OR attempt > 1"), 0)
	if err := e.NATS.JS.DeleteStream(t.Context(), "JUNK"); err != nil {
		t.Fatal(err)
	}
	room := time.Now()
	e.WaitNoneOpen(t, soon)
	t.Logf("all had run %v after there was room", time.Since(room))
	equal(t, "succeeded at once", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1"), 301)
	equal(t, "calls", len(sink.Calls()), 301)
	waitHealth(t, adminURL(t, relay)+"/readyz", 200)
}
