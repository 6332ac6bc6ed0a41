package outbox

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
)

func TestRelayRefusesAPoolThatIsTooSmall(t *testing.T) {
	for url, want := range map[string]string{"pool_max_conns=2": "pool_max_conns=3", "pool_max_conns=3": ""} {
		pool, err := pgxpool.New(t.Context(), "postgres://u@127.0.0.1:1/d?"+url)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		_, err = NewRelay(pool, new(nats.Conn), RelayConfig{})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q in it", url, err, want)
		}
	}
}

// Whatever the other loops hold, reads and saves find a connection, and of the loops in the background one at a time
// has one.
func TestReadsAndSavesAlwaysFindAConnection(t *testing.T) {
	for _, tt := range []struct {
		pool int32
		held []string // have a place, in this order
		wait []string // do not
	}{
		{3, []string{loopRetention}, []string{loopBulk, "reconcile", loopWorkList, loopLetters}},
		{3, []string{loopWorkList}, []string{loopLetters, "notify by log", asksGauges}},
		{4, []string{loopRetention, loopWorkList}, []string{loopBulk, loopLetters}},
		{5, []string{loopBulk, loopWorkList, loopLetters}, []string{loopRetention, loopNotices, loopStreams}},
		{30, []string{loopBulk, loopWorkList, loopLetters, loopStreams, loopSwitches}, []string{loopRetention, loopNotices, asksGauges}},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := &Relay{places: placesOf(tt.pool), progress: map[string]time.Time{}}
			ctx, cancel := context.WithCancel(t.Context())
			var leaves []func()
			for _, loop := range append(tt.held, loopRead, loopLanes, loopRead, loopLanes) {
				leave, err := r.takePlace(onBehalfOf(ctx, loop))
				if err != nil {
					t.Fatal(err)
				}
				leaves = append(leaves, leave)
			}
			got := make(chan string, len(tt.wait))
			for _, loop := range tt.wait {
				go func() {
					if leave, err := r.takePlace(onBehalfOf(ctx, loop)); err == nil {
						got <- loop
						leave()
					}
				}()
			}
			time.Sleep(time.Minute) // of the bubble
			synctest.Wait()
			if len(got) > 0 {
				t.Errorf("pool of %d, held by %v: %s has a place too", tt.pool, tt.held, <-got)
			}
			for _, loop := range tt.wait { // who waits for a place is alive
				if at, ok := r.progress[loop]; loop != asksGauges && time.Since(at) > stalled {
					t.Errorf("%s has not turned for %v", loop, time.Since(at))
				} else if loop == asksGauges && ok {
					t.Error("the gauges pass for a loop")
				}
			}
			for _, leave := range leaves {
				leave()
			}
			synctest.Wait()
			if len(got) != len(tt.wait) {
				t.Errorf("pool of %d: %d of %v got a place in the end", tt.pool, len(got), tt.wait)
			}
			cancel()
			if n := len(r.places.all) + len(r.places.background); n != 0 {
				t.Errorf("%d places are still taken", n)
			}
		})
	}
}

// A loop that ends while it waits leaves nothing behind.
func TestPlaceThatIsNotWaitedForIsGivenBack(t *testing.T) {
	r := &Relay{places: placesOf(3)}
	leave, err := r.takePlace(onBehalfOf(t.Context(), loopWorkList))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := r.takePlace(onBehalfOf(ctx, loopBulk)); err == nil {
		t.Error("bulk got the one place that is taken")
	}
	leave()
	if n := len(r.places.all) + len(r.places.background); n != 0 {
		t.Errorf("%d places are still taken", n)
	}
}
