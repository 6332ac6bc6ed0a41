package command

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
)

// A market is the two lanes of a type in the server, and handlers that all take the same time.
type market struct {
	slots     int
	rate      float64
	work      time.Duration
	high, low bool // whether the lane always has a message waiting, or never one
}

// starts lets it go on for so long and counts what starts of high and of low.
func (m market) starts(t *testing.T, during time.Duration) (high, low int64) {
	t.Helper()
	var started [2]atomic.Int64
	synctest.Test(t, func(t *testing.T) {
		d := testDispatcher(m.slots)
		d.b.rate = m.rate
		d.tokens = d.burst()
		ctx, cancel := context.WithTimeout(t.Context(), during)
		defer cancel()
		var all sync.WaitGroup
		for i, l := range d.lanes {
			waits := []bool{m.high, m.low}[i]
			l.kick()
			all.Go(func() {
				for {
					select {
					case <-ctx.Done():
						return
					case <-l.kicks:
					}
					for {
						seq, n, _ := l.nextRequest()
						if n == 0 {
							break
						}
						all.Go(func() {
							if !waits {
								sleep(ctx, pullExpires)
								l.status(&nats.Msg{Subject: "_INBOX.x." + strconv.FormatUint(seq, 10), Header: nats.Header{"Status": {"408"}}})
								return
							}
							sleep(ctx, time.Duration(1+i)*time.Millisecond)
							for range n {
								d.arrive(&attempt{lane: l, msg: &nats.Msg{}, arrived: d.w.now()})
							}
						})
					}
				}
			})
		}
		for range m.slots {
			all.Go(func() {
				for {
					got := d.w.claims.take(ctx, 1, nil)
					if got == nil {
						return
					}
					a := got[0]
					d.mu.Lock()
					d.claimed--
					d.running++
					d.mu.Unlock()
					if a.lane.low {
						started[1].Add(1)
					} else {
						started[0].Add(1)
					}
					sleep(ctx, m.work)
					d.returned(a, m.work)
					d.settled(1)
				}
			})
		}
		all.Go(func() {
			for ctx.Err() == nil {
				sleep(ctx, 500*time.Millisecond)
				d.sweep(d.w.now())
				for _, l := range d.lanes {
					l.watch(d.w.now())
				}
			}
		})
		all.Wait()
		d.stop()
	})
	return started[0].Load(), started[1].Load()
}

// DESIGN 4.1: high goes first, and low keeps a fifth: with one slot, with handlers that take longer than a message may
// wait here, and with a rate as well.
func TestLowKeepsAFifthOfTheStarts(t *testing.T) {
	for _, m := range []market{
		{slots: 1, work: 10 * time.Millisecond}, {slots: 1, work: 60 * time.Millisecond}, {slots: 1, work: 300 * time.Millisecond},
		{slots: 1, work: 3 * time.Second}, {slots: 1, work: time.Minute},
		{slots: 2, work: 300 * time.Millisecond}, {slots: 3, work: 3 * time.Second}, {slots: 10, work: time.Minute},
		{slots: 50, work: 5 * time.Millisecond}, {slots: 10, work: time.Millisecond, rate: 0.5}, {slots: 10, work: time.Millisecond, rate: 200},
	} {
		m.high, m.low = true, true
		during := max(500*m.work/time.Duration(m.slots), 3*time.Second)
		if m.rate > 0 {
			during = time.Duration(500 / m.rate * float64(time.Second))
		}
		high, low := m.starts(t, during)
		if share := float64(low) / float64(high+low); high+low < 400 || share < 0.15 || share > 0.25 {
			t.Errorf("%d slots, handlers of %v, rate %v: %d of high and %d of low started, want a fifth of low", m.slots, m.work, m.rate, high, low)
		}
	}
}

// A lane that is alone gets every slot, and hardly waits for the other one's turn.
func TestALaneAloneGetsEverySlot(t *testing.T) {
	for _, work := range []time.Duration{60 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second, time.Minute} {
		for _, m := range []market{{slots: 1, work: work, high: true}, {slots: 1, work: work, low: true}, {slots: 10, work: work, low: true}} {
			high, low := m.starts(t, 500*m.work/time.Duration(m.slots))
			if n := high + low; n < 475 {
				t.Errorf("%d slots, handlers of %v, high %v: %d started, want nearly 500", m.slots, m.work, m.high, n)
			}
		}
	}
}
