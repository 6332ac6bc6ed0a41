package command

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

func testDispatcher(slots int) *dispatcher {
	w := &Worker{epoch: time.Now(), claims: newBatcher[*attempt](), cfg: WorkerConfig{Concurrency: slots, Lease: 30 * time.Second}}
	return newDispatcher(w, &binding{bizType: "A"})
}

func (d *dispatcher) offer(priority, n int) {
	for range n {
		d.arrive(&attempt{lane: d.lanes[priority], msg: &nats.Msg{}, arrived: d.w.now()})
	}
}

func TestNoMoreAreClaimedThanSlotsUntilHandlersAreKnownToBeFast(t *testing.T) {
	d := testDispatcher(10)
	d.offer(1, 100)
	if n := len(d.w.claims.drain()); n != 10 {
		t.Errorf("%d are claimed, want 10", n)
	}
	for _, c := range []struct {
		mean time.Duration
		want int
	}{{0, 10}, {time.Second, 10}, {100 * time.Millisecond, 10}, {50 * time.Millisecond, 20}, {10 * time.Millisecond, 100}, {time.Microsecond, 210}} {
		d.mean = c.mean
		if got := d.allowance(); got != c.want {
			t.Errorf("handlers of %v: allowance %d, want %d", c.mean, got, c.want)
		}
	}
	d.slots, d.mean = 5000, 1
	if got := d.allowance(); got != 5000+maxPrefetch {
		t.Errorf("allowance %d, want prefetch to be bounded", got)
	}
}

func TestEachFifthPickIsLow(t *testing.T) {
	d := testDispatcher(0)
	d.slots = 0
	d.offer(0, 40)
	d.offer(1, 40)
	d.slots = 50
	d.mu.Lock()
	d.pump()
	d.mu.Unlock()
	low := 0
	for _, a := range d.w.claims.drain() {
		if a.lane.low {
			low++
		}
	}
	if low != 10 {
		t.Errorf("%d of 50 picks are low, want 10", low)
	}
}

func TestLowAsksOnlyForItsShareWhileHighIsBusy(t *testing.T) {
	d := testDispatcher(10)
	if got := d.want(d.lanes[1]); got != 10 {
		t.Errorf("low wants %d while high is idle, want 10", got)
	}
	d.offer(0, 3)
	if got := d.want(d.lanes[1]); got != 2 {
		t.Errorf("low wants %d while high is busy, want its fifth: 2", got)
	}
	if got := d.want(d.lanes[0]); got != 7 {
		t.Errorf("high wants %d, want 7", got)
	}
	d.offer(0, 7)
	if got := d.want(d.lanes[0]); got != 0 {
		t.Errorf("high wants %d with all slots taken, want 0", got)
	}
	if got := d.want(d.lanes[1]); got != 2 {
		t.Errorf("low wants %d with all slots taken by high, want 2", got)
	}
}

func TestPullsAreBooked(t *testing.T) {
	d := testDispatcher(10)
	l := d.lanes[1]
	seq, n, err := l.nextRequest()
	if seq != 1 || n != 10 || err != nil || l.requested != 10 {
		t.Fatalf("pull %d of %d, %v, requested %d", seq, n, err, l.requested)
	}
	if _, n, _ := l.nextRequest(); n != 0 {
		t.Errorf("%d more are asked for, want none", n)
	}
	d.offer(1, 4)
	if l.requested != 6 {
		t.Errorf("%d are asked for, want 6", l.requested)
	}
	l.status(&nats.Msg{Subject: "_INBOX.x.1", Header: nats.Header{"Status": {"408"}}})
	if l.requested != 0 || len(l.pulls) != 0 || l.problem != nil {
		t.Errorf("after its end %d are asked for, problem %v", l.requested, l.problem)
	}
	if seq, n, _ := l.nextRequest(); seq != 2 || n != 6 {
		t.Errorf("pull %d of %d, want 2 of 6", seq, n)
	}
	l.status(&nats.Msg{Subject: "_INBOX.x.1", Header: nats.Header{"Status": {"409"}, "Description": {"Consumer Deleted"}}})
	if l.problem != nil {
		t.Error("the status of a pull that is over counts")
	}
	l.status(&nats.Msg{Subject: "_INBOX.x.2", Header: nats.Header{"Status": {"409"}, "Description": {"Consumer Deleted"}}})
	if l.problem == nil || l.requested != 0 {
		t.Errorf("problem %v, requested %d", l.problem, l.requested)
	}
}

func TestBatcherTakesWhatIsThere(t *testing.T) {
	b := newBatcher[int]()
	ctx, cancel := context.WithCancel(context.Background())
	b.put(1, 2, 3)
	if got := b.take(ctx, 2, nil); len(got) != 2 || got[0] != 1 {
		t.Errorf("got %v", got)
	}
	if got := b.take(ctx, 2, nil); len(got) != 1 || got[0] != 3 {
		t.Errorf("got %v", got)
	}
	cancel()
	if got := b.take(ctx, 2, nil); got != nil {
		t.Errorf("got %v after the end", got)
	}
}

func TestFifoKeepsOrder(t *testing.T) {
	var q fifo[int]
	next := 0
	for i := range 1000 {
		q.push(i)
		if i%3 == 0 {
			if got := q.pop(); got != next {
				t.Fatalf("got %d, want %d", got, next)
			}
			next++
		}
	}
	for q.len() > 0 {
		if got := q.pop(); got != next {
			t.Fatalf("got %d, want %d", got, next)
		}
		next++
	}
	if next != 1000 {
		t.Errorf("%d came out, want 1000", next)
	}
}

func TestRateLetsBothLanesAsk(t *testing.T) {
	d := testDispatcher(10)
	d.b.rate = 10
	d.tokens = d.burst()
	for _, l := range d.lanes {
		if _, n, _ := l.nextRequest(); n != 1 {
			t.Errorf("%s asks for %d, want 1", l.priority, n)
		}
	}
	d.offer(1, 2)
	if n := len(d.w.claims.drain()); n != 1 {
		t.Errorf("%d start at once, want 1", n)
	}
	if _, n, _ := d.lanes[1].nextRequest(); n != 0 {
		t.Errorf("low asks for %d without a token, want 0", n)
	}
}
