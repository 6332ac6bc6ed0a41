package tests

import (
	"net/url"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// through makes the address of a server go through a proxy.
func through(t *testing.T, address string) (*testenv.Proxy, string) {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	p := testenv.NewProxy(t, u.Host)
	u.Host = p.Addr
	return p, u.String()
}

// recovery is what a fault of a relay may take until its work goes on: the contract says 10 s, and a busy machine adds to
// it. Before, either of the two below took 30 s and more.
const recovery = 16 * time.Second

// A relay whose connections to Postgres bring no answers any more, and stay open, gives them up and makes new ones.
func TestDeafLinkToPostgresIsGivenUp(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	link, address := through(t, e.URL)
	e.StartRelay("TASKRELAY_DATABASE_URL=" + address)
	e.Insert(t, "ORDER_PAYMENT")
	waitMessages(t, e, 1)
	link.Deafen()
	begun := time.Now()
	e.Insert(t, "ORDER_PAYMENT")                                                                                  // read by position
	e.Insert(t, "ORDER_PAYMENT", "status", "retrying", "generation", 1, "attempt", 4, "republish_at", time.Now()) // on the work list
	testenv.Eventually(t, recovery, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 3 {
			return errorf("stream has %d messages, want 3", n)
		}
		return nil
	})
	t.Logf("went on after %v", time.Since(begun).Round(time.Millisecond))
	e.WaitCount(t, recovery-time.Since(begun), 0, `SELECT count(*) FROM taskrelay.lane WHERE biz_type = 'ORDER_PAYMENT' AND owner_until < now()`)
}

// The same of a worker with the default lease of 30 s: it claims and settles again long before its leases end, and calls
// nothing twice.
func TestDeafLinkOfAWorkerIsGivenUp(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	link, address := through(t, e.URL)
	e.StartRelay()
	e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_DATABASE_URL="+address, "TASKRELAY_WORKER_LEASE=30s")...)
	for i := range 60 { // its connections are in use, so that none is asked for a sign of life first
		e.Insert(t, "ORDER_PAYMENT")
		sink.WaitCalls(t, soon, i+1)
	}
	link.Deafen()
	begun := time.Now()
	for range 20 {
		e.Insert(t, "ORDER_PAYMENT")
	}
	e.WaitNoneOpen(t, recovery)
	t.Logf("went on after %v", time.Since(begun).Round(time.Millisecond))
	equal(t, "calls", len(sink.Calls()), 80)
	equal(t, "attempts that did not succeed", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome <> 'succeeded'`), 0)
}

// A relay is killed after it has taken rows from the work list and before their messages are stored: the next one looks at
// them as soon as it has the lanes.
func TestRelayKilledInMidLookLeavesRowsForSeconds(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	link, address := through(t, e.NATS.URL)
	relay := e.StartRelay("TASKRELAY_NATS_URL=" + address)
	e.Insert(t, "ORDER_PAYMENT")
	waitMessages(t, e, 1)
	link.Deafen()
	id := e.Insert(t, "ORDER_PAYMENT", "status", "retrying", "generation", 1, "attempt", 4, "republish_at", time.Now())
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND republish_at > now() + interval '4 seconds'`, id)
	relay.Kill9(t)
	begun := time.Now()
	confirmed := `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND republish_at > now() + interval '5 minutes'`
	e.StartRelay()
	e.WaitCount(t, recovery, 1, confirmed, id) // after the PubAck it is put ten minutes ahead
	t.Logf("went on after %v", time.Since(begun).Round(time.Millisecond))
}
