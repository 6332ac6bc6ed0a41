package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A deaf link is noticed within seconds; a statement that needs longer gets more each time, up to its limit, and a link
// that answers again is soon expected to be quick again.
func TestPatienceGrowsWithTimeoutsAndEndsWithAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p patience
		timeout := fmt.Errorf("read lanes: %w", context.DeadlineExceeded)
		for _, want := range []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 30 * time.Second, 30 * time.Second} {
			if got := p.of("a"); got != want {
				t.Errorf("got %v, want %v", got, want)
			}
			p.learn("a", time.Now(), timeout, queryTimeout)
		}
		if got := p.of("b"); got != firstPatience {
			t.Errorf("another statement: got %v, want %v", got, firstPatience)
		}
		p.learn("a", time.Now(), errors.New("connection refused"), queryTimeout) // an answer of another kind tells nothing
		if got := p.of("a"); got != queryTimeout {
			t.Errorf("after another error: got %v, want %v", got, queryTimeout)
		}
		begun := time.Now()
		time.Sleep(3 * time.Second)
		p.learn("a", begun, nil, queryTimeout)
		if got := p.of("a"); got != 12*time.Second {
			t.Errorf("after an answer within 3 s: got %v, want four times that", got)
		}
		p.learn("a", time.Now(), nil, queryTimeout)
		if got := p.of("a"); got != firstPatience {
			t.Errorf("after a quick answer: got %v, want %v", got, firstPatience)
		}
		if got := p.longest(); got != queryTimeout {
			t.Errorf("longest: got %v, want %v", got, queryTimeout)
		}
	})
}

// A row whose look takes longer than its guard, because NATS is slow, is left out of the next takes of this relay until the
// end of its look is written down.
func TestRowInHandIsNotTakenTwice(t *testing.T) {
	var w workList
	begun := time.Now()
	w.take(look{id: 2}, begun)
	w.take(look{id: 1}, begun)
	w.take(look{id: 3}, begun.Add(listGuard)) // taken later
	if got := w.overdue(begun.Add(listGuard / 2)); len(got) != 0 {
		t.Errorf("while the guard holds: got %v, want none", got)
	}
	if got := w.overdue(begun.Add(listGuard)); !slices.Equal(got, []int64{1, 2}) {
		t.Errorf("when it ends: got %v, want 1 and 2", got)
	}
	w.release([]look{{id: 2}}, nil)
	if got := w.overdue(begun.Add(listGuard)); !slices.Equal(got, []int64{1}) {
		t.Errorf("after the end of one look: got %v, want 1", got)
	}
	if got := w.overdue(begun.Add(2 * listGuard)); !slices.Equal(got, []int64{1, 3}) {
		t.Errorf("later: got %v, want 1 and 3", got)
	}
	// The next relay must be able to look within the time that the contract gives a killed one.
	if listGuard > 10*time.Second || listGuard < laneLease {
		t.Errorf("guard is %v: want more than a lane's lease (%v), for it ends before that otherwise, and at most 10 s", listGuard, laneLease)
	}
}
