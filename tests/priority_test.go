package tests

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
)

// starts records when the handlers of a type began, by priority.
type starts struct {
	mu   sync.Mutex
	high map[int64]time.Time
	low  int
}

func (s *starts) command(work time.Duration) command.Command[struct{}] {
	s.high = map[int64]time.Time{}
	return command.Command[struct{}]{
		Concurrency: 10,
		Execute: func(ctx context.Context, task *command.Task[struct{}]) (any, error) {
			s.mu.Lock()
			if task.Priority == "high" {
				s.high[task.ID] = time.Now()
			} else {
				s.low++
			}
			s.mu.Unlock()
			select {
			case <-time.After(work):
			case <-ctx.Done():
			}
			return nil, nil
		},
	}
}

func (s *starts) lows() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.low
}

// C3: high tasks pass a flood of low ones of their own type, which goes on meanwhile.
func TestHighTasksPassAFloodOfLowOnes(t *testing.T) {
	const flood = 20_000
	e := testenv.New(t)
	var s starts
	var reg command.Registry
	mustRegister(t, &reg, "FLOOD", s.command(5*time.Millisecond))
	e.RunRelay()
	e.RunWorker(&reg)
	insertMany(t, e, "FLOOD", flood)
	testenv.Eventually(t, soon, func() error {
		if s.lows() < 100 {
			return errorf("%d low tasks have started", s.lows())
		}
		return nil
	})
	low, from := s.lows(), time.Now()
	for range 10 {
		e.Insert(t, "FLOOD", "priority", "high")
	}
	testenv.Eventually(t, soon, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.high) < 10 {
			return errorf("%d high tasks have started", len(s.high))
		}
		return nil
	})
	took := time.Since(from)
	if took > time.Second {
		t.Errorf("10 high tasks started after %v, want within 1s", took)
	}
	equal(t, "low tasks unfinished", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE finished_at IS NULL") > 0, true)
	testenv.Eventually(t, soon, func() error {
		if now := s.lows(); now <= low {
			return errorf("no low task has started since: %d", now)
		}
		return nil
	})
}

// C12, B89, C-116: a flood of one type does not delay another type.
func TestFloodOfOneTypeDoesNotDelayAnother(t *testing.T) {
	const flood = 50_000
	e := testenv.New(t)
	var a, b starts
	var reg command.Registry
	mustRegister(t, &reg, "FLOODED", a.command(5*time.Millisecond))
	mustRegister(t, &reg, "QUIET", b.command(0))
	e.RunRelay()
	e.RunWorker(&reg)
	first := e.Insert(t, "QUIET")
	e.WaitStatus(t, soon, first, "succeeded")
	insertMany(t, e, "FLOODED", flood)
	testenv.Eventually(t, soon, func() error {
		if a.lows() < 100 {
			return errorf("%d of the flood have started", a.lows())
		}
		return nil
	})
	from := time.Now()
	n := b.lows()
	e.Insert(t, "QUIET")
	testenv.Eventually(t, soon, func() error {
		if b.lows() == n {
			return errorf("the other type's task has not started")
		}
		return nil
	})
	if d := time.Since(from); d > time.Second {
		t.Errorf("the other type's task started after %v, want within 1s", d)
	}
}

// C4: a type whose target hangs holds only its own slots.
func TestHangingTypeHoldsOnlyItsOwnSlots(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	hung, fine := testenv.NewSink(t), testenv.NewSink(t)
	hung.Default(testenv.Reply{Hang: true})
	e.StartRelay()
	e.StartWorker(testenv.Types(testenv.HTTPType("HUNG", hung.URL, "CONCURRENCY", "10"), testenv.HTTPType("FINE", fine.URL))...)
	insertMany(t, e, "HUNG", 100)
	hung.WaitCalls(t, soon, 10)
	for range 20 {
		id := e.Insert(t, "FINE")
		e.WaitStatus(t, 5*time.Second, id, "succeeded")
	}
	equal(t, "calls of the hung type that ran at once", hung.MostOpen(), 10)
}
