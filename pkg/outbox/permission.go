package outbox

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// A server does not answer a publish that it refuses: it tells the connection of the subject, some time later. Without
// that word each try of a lane would take until its answer is given up.

var refusedSubject = regexp.MustCompile(`(?i)permissions violation for publish to "([^"]+)"`)

// sayAgain: of refused publishes the connection's own handler is told once in that time for each type. The relay tries
// every second, and says itself what waits.
const sayAgain = time.Minute

// refusedPublishes are subjects that the server has refused, and whose messages in flight do not know it yet.
type refusedPublishes struct {
	ours []string // beginnings of the relay's own subjects

	mu       sync.Mutex
	subjects map[string]bool
	said     map[string]time.Time
	news     chan struct{}
}

// note takes an error of the connection. mute: its own handler need not be told.
func (f *refusedPublishes) note(err error, now time.Time) (mute bool) {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return false
	}
	m := refusedSubject.FindStringSubmatch(err.Error())
	if m == nil {
		return false
	}
	subject := m[1]
	for _, begin := range f.ours {
		if !strings.HasPrefix(subject, begin) {
			continue
		}
		kind := subject[:strings.LastIndexByte(subject, '.')] // each dead letter has a subject of its own
		f.mu.Lock()
		defer f.mu.Unlock()
		f.subjects[subject] = true
		select {
		case f.news <- struct{}{}:
		default: // thousands of refusals may come at once: they are gone through together
		}
		if mute = now.Sub(f.said[kind]) < sayAgain; !mute {
			f.said[kind] = now
		}
		return mute
	}
	return false
}

func (f *refusedPublishes) take() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	subjects := f.subjects
	f.subjects = map[string]bool{}
	return subjects
}

// heedRefusals ends publishes that the server refuses, until the function it returns is called.
func (r *Relay) heedRefusals(ctx context.Context) (stop func()) {
	f := &refusedPublishes{subjects: map[string]bool{}, said: map[string]time.Time{}, news: make(chan struct{}, 1)}
	for _, kind := range []string{"tasks.", "dead.", "events."} {
		f.ours = append(f.ours, r.names.subject(kind))
	}
	// Ours stays in the chain, for somebody may have put another one in front of it meanwhile; then it only hands on.
	var heeds atomic.Pointer[refusedPublishes]
	heeds.Store(f)
	theirs := r.nc.ErrorHandler()
	r.nc.SetErrorHandler(func(nc *nats.Conn, sub *nats.Subscription, err error) {
		if f := heeds.Load(); f != nil && f.note(err, time.Now()) {
			return
		}
		if theirs != nil {
			theirs(nc, sub, err)
		}
	})
	ctx, cancel := context.WithCancel(ctx)
	var loop sync.WaitGroup
	loop.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-f.news:
				r.pub.refuse(f.take())
			}
		}
	})
	return func() {
		heeds.Store(nil)
		cancel()
		loop.Wait()
	}
}

// A noPermissionError says that the server takes nothing from us for a subject.
type noPermissionError struct{ subject string }

func (e noPermissionError) Error() string {
	return fmt.Sprintf("NATS permits no publish to %s: allow it to the relay's user (taskrelay generate nats prints what each part needs)", e.subject)
}

// refuse ends all that is in flight to these subjects: it waits.
func (p *publisher) refuse(subjects map[string]bool) {
	var ended []*flight
	p.mu.Lock()
	for token, f := range p.pending {
		if subjects[f.subject] {
			delete(p.pending, token)
			p.bytes -= f.size
			ended = append(ended, f)
		}
	}
	p.room.Broadcast()
	p.mu.Unlock()
	for _, f := range ended {
		f.done(published{verdict: waits, err: noPermissionError{f.subject}})
	}
}
