package tests

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// Found by tests/model: a dead task that is requeued and cancelled again before the relay has looked at it (its type may
// be paused for long) would keep its old dead letter, for a cancelled row is not looked at.
func TestCancelAfterRequeueTakesTheDeadLetterAway(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay()
	id := deadTask(t, e)
	waitLetter(t, e, "ORDER_PAYMENT", id)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND dead_lettered_at IS NOT NULL`, id)
	e.Exec(t, `DO $$ BEGIN
		PERFORM taskrelay.requeue(`+itoa(id)+`, 'test');
		PERFORM taskrelay.cancel(`+itoa(id)+`, 'test');
	END $$`) // one transaction: the relay cannot look in between
	equal(t, "status", e.Task(t, id).Status, "cancelled")
	waitNoLetter(t, e, "ORDER_PAYMENT", id)
}

func deadTask(t *testing.T, e *testenv.Env) int64 {
	t.Helper()
	id := e.Insert(t, "ORDER_PAYMENT")
	e.Exec(t, `UPDATE taskrelay.task SET status = 'dead', finished_at = now(), dead_at = now(), dead_reason = 'permanent' WHERE id = $1`, id)
	return id
}

// A gate is a connection's way to NATS that a test can close: for what the server says, or for what has a certain text.
type gate struct {
	mu      sync.Mutex
	change  sync.Cond
	reads   bool   // held
	sends   string // what has this text is held
	waiting bool   // something with it waits
	down    bool   // there is no connection, and none can be made
	conns   []net.Conn
}

func newGate() *gate {
	g := &gate{}
	g.change.L = &g.mu
	return g
}

func (g *gate) Dial(network, address string) (net.Conn, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.down {
		return nil, errors.New("cut by the test")
	}
	c, err := net.Dial(network, address)
	if err == nil {
		g.conns = append(g.conns, c)
	}
	return &gatedConn{c, g}, err
}

// cut ends the connection, and lets none be made until it is called with false.
func (g *gate) cut(down bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.down = down
	for _, c := range g.conns {
		_ = c.Close()
	}
	g.conns = nil
}

func (g *gate) hold(reads bool, sends string) {
	g.mu.Lock()
	g.reads, g.sends = reads, sends
	g.mu.Unlock()
	g.change.Broadcast()
}

// wait waits until something that is held wants to be sent.
func (g *gate) wait(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		if !g.waiting {
			return errorf("nothing with %q waits to be sent", g.sends)
		}
		return nil
	})
}

type gatedConn struct {
	net.Conn
	g *gate
}

func (c *gatedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.g.mu.Lock()
	defer c.g.mu.Unlock()
	for c.g.reads && err == nil {
		c.g.change.Wait()
	}
	return n, err
}

func (c *gatedConn) Write(b []byte) (int, error) {
	c.g.mu.Lock()
	for c.g.sends != "" && bytes.Contains(b, []byte(c.g.sends)) {
		c.g.waiting = true
		c.g.change.Wait()
	}
	c.g.mu.Unlock()
	return c.Conn.Write(b)
}

// gatedRelay runs a relay behind a gate.
func gatedRelay(t *testing.T, e *testenv.Env, change ...func(*outbox.RelayConfig)) (*gate, *outbox.Relay) {
	t.Helper()
	g := newGate()
	nc, err := nats.Connect(e.NATS.URL, nats.SetCustomDialer(g), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	var cfg outbox.RelayConfig
	for _, c := range change {
		c(&cfg)
	}
	relay, err := outbox.NewRelay(e.OpenPool("relay"), nc, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	t.Cleanup(func() {
		g.hold(false, "")
		g.cut(false)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("relay: %v", err)
		}
	})
	testenv.Eventually(t, soon, relay.Ready)
	return g, relay
}

// Interleaving 18a: the PubAck of a look comes after a worker has claimed the row and settled it as dead. Confirming the
// look must not put the dead row on the work list again, nor forget that its letter is out.
func TestLateConfirmationOfALookChangesNothing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	g, _ := gatedRelay(t, e)
	var reg command.Registry
	register(t, &reg, "ORDER_PAYMENT", fast(func(context.Context, *command.Task[raw]) (any, error) {
		return nil, retry.Permanent(errFlaky)
	}))
	e.RunWorker(&reg)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.lane WHERE biz_type = 'ORDER_PAYMENT' AND priority = 'low' AND owner IS NOT NULL`)
	e.Exec(t, `CREATE TABLE written (at timestamptz DEFAULT clock_timestamp());
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO written DEFAULT VALUES; RETURN NULL; END $$;
		CREATE TRIGGER note AFTER UPDATE ON taskrelay.task FOR EACH ROW
			WHEN (NEW.status = 'dead' AND OLD.status = 'dead' AND (NEW.republish_at IS NOT NULL OR OLD.dead_lettered_at IS NOT NULL)) EXECUTE FUNCTION note()`)
	g.hold(true, "")
	var id int64
	e.Scan(t, `INSERT INTO taskrelay.task (biz_type, status, generation, attempt, next_attempt_at, republish_at)
		VALUES ('ORDER_PAYMENT', 'retrying', 1, 4, now(), now()) RETURNING id`, nil, &id)
	row := e.WaitStatus(t, soon, id, "dead")
	if row.RepublishAt != nil {
		t.Fatalf("a dead row is on the work list for %v", row.RepublishAt)
	}
	g.hold(false, "")
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND dead_lettered_at IS NOT NULL`, id)
	waitLetter(t, e, "ORDER_PAYMENT", id)
	testenv.Never(t, 700*time.Millisecond, func() error { // looks are confirmed every 250 ms
		if n := e.Int(t, `SELECT count(*) FROM written`); n != 0 {
			return errorf("the dead row was changed %d times", n)
		}
		return nil
	})
}

// Interleaving 18b: the relay has read a dead row, and is held up; the task is requeued; then its letter goes out. It is
// taken back: no dead letter of a live task stays.
func TestLetterThatIsLateIsTakenBack(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	g, _ := gatedRelay(t, e)
	first := deadTask(t, e) // so that the lane is held
	waitLetter(t, e, "ORDER_PAYMENT", first)
	g.hold(false, "dead.ORDER_PAYMENT."+itoa(first+1)+" ")
	id := deadTask(t, e)
	equal(t, "id", id, first+1)
	g.wait(t)
	e.Exec(t, `SELECT taskrelay.requeue($1::bigint, 'bank is back')`, id)
	g.hold(false, "")
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND status = 'pending' AND looks = 1 AND dead_lettered_at IS NULL`, id)
	waitNoLetter(t, e, "ORDER_PAYMENT", id)
	equal(t, "messages", tasksInStream(t, e)[itoa(id)], true)
	waitLetter(t, e, "ORDER_PAYMENT", first)
}
