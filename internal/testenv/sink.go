package testenv

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"
)

// Sink is a scripted HTTP target. It records every call and stands in for the systems that commands call.
type Sink struct {
	URL string

	server *httptest.Server
	closed chan struct{}

	mu       sync.Mutex
	scripts  map[string][]Reply
	fallback []Reply
	used     map[string]int
	calls    []*Call
	running  map[string]int
	overlaps []string
	open     int
	mostOpen int
}

// Reply says how Sink answers one call. The zero value is 200 without a body.
type Reply struct {
	Status int
	Body   string
	Header map[string]string
	Delay  time.Duration // before the answer
	Hang   bool          // no answer until the caller gives up
}

// Call is one request that Sink got.
type Call struct {
	At, Ended  time.Time // Ended is zero while it runs
	ID         int64     // header Task-Id
	Attempt    int       // header Task-Attempt
	BizType    string
	BizID      string
	Phase      string
	Key        string // header Idempotency-Key
	Path       string
	Header     http.Header
	Body       string
	StatusSent int
}

// NewSink starts a target that answers 200 to everything that has no script.
func NewSink(t testing.TB) *Sink {
	t.Helper()
	s := &Sink{scripts: map[string][]Reply{}, used: map[string]int{}, running: map[string]int{}, closed: make(chan struct{})}
	s.server = httptest.NewServer(http.HandlerFunc(s.serve))
	s.URL = s.server.URL
	t.Cleanup(func() {
		close(s.closed)
		s.server.CloseClientConnections()
		s.server.Close()
	})
	return s
}

// Default sets the replies to each task that has no script, one after another; the last one stays.
func (s *Sink) Default(replies ...Reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fallback = replies
}

// Script sets the replies to one task, named by its id or, known before the row is, by its biz id.
// A key that ends in "/compensate" holds for that phase alone. They are used one after another; the last one stays.
func (s *Sink) Script(key any, replies ...Reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scripts[fmt.Sprint(key)] = replies
	delete(s.used, fmt.Sprint(key))
}

// Statuses makes replies of bare status codes.
func Statuses(codes ...int) []Reply {
	var r []Reply
	for _, c := range codes {
		r = append(r, Reply{Status: c})
	}
	return r
}

func (s *Sink) serve(w http.ResponseWriter, r *http.Request) {
	c := &Call{At: time.Now(), BizType: r.Header.Get("Task-Biz-Type"), BizID: r.Header.Get("Task-Biz-Id"), Phase: r.Header.Get("Task-Phase"),
		Key: r.Header.Get("Idempotency-Key"), Path: r.URL.Path, Header: r.Header.Clone()}
	c.ID, _ = strconv.ParseInt(r.Header.Get("Task-Id"), 10, 64)
	c.Attempt, _ = strconv.Atoi(r.Header.Get("Task-Attempt"))
	body, _ := io.ReadAll(r.Body)
	c.Body = string(body)
	id := r.Header.Get("Task-Id")

	s.mu.Lock()
	s.calls = append(s.calls, c)
	s.running[id]++
	s.open++
	s.mostOpen = max(s.mostOpen, s.open)
	if s.running[id] > 1 {
		s.overlaps = append(s.overlaps, id)
	}
	reply := s.next(c, id)
	s.mu.Unlock()

	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.running[id]--
		s.open--
		c.Ended = time.Now()
		c.StatusSent = reply.Status
	}()
	if reply.Delay > 0 {
		select {
		case <-time.After(reply.Delay):
		case <-r.Context().Done():
			return
		case <-s.closed:
			return
		}
	}
	if reply.Hang {
		select {
		case <-r.Context().Done():
		case <-s.closed:
		}
		return
	}
	for k, v := range reply.Header {
		w.Header().Set(k, v)
	}
	w.WriteHeader(reply.Status)
	_, _ = io.WriteString(w, reply.Body)
}

func (s *Sink) next(c *Call, id string) Reply {
	keys := []string{c.BizID, id}
	if c.Phase == "compensate" {
		keys = []string{c.BizID + "/compensate", id + "/compensate", c.BizID, id}
	}
	replies, key := s.fallback, "default of "+id+c.Phase
	for _, k := range keys {
		if script, ok := s.scripts[k]; ok {
			replies, key = script, k
			break
		}
	}
	reply := Reply{}
	if len(replies) > 0 {
		reply = replies[min(s.used[key], len(replies)-1)]
		s.used[key]++
	}
	if reply.Status == 0 {
		reply.Status = http.StatusOK
	}
	return reply
}

// Calls returns a copy of all calls so far, in the order they arrived.
func (s *Sink) Calls() []Call { return s.selectCalls(func(*Call) bool { return true }) }

// CallsOf returns the calls of one task.
func (s *Sink) CallsOf(id int64) []Call {
	return s.selectCalls(func(c *Call) bool { return c.ID == id })
}

func (s *Sink) selectCalls(want func(*Call) bool) []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	var calls []Call
	for _, c := range s.calls {
		if want(c) {
			calls = append(calls, *c)
		}
	}
	return calls
}

// Overlaps returns the ids of tasks of which two calls ran at once.
func (s *Sink) Overlaps() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.overlaps...)
}

// MostOpen returns the greatest number of calls that ran at once.
func (s *Sink) MostOpen() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mostOpen
}

// WaitCalls waits until at least n calls have arrived.
func (s *Sink) WaitCalls(t testing.TB, timeout time.Duration, n int) {
	t.Helper()
	Eventually(t, timeout, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.calls) < n {
			return fmt.Errorf("%d calls have arrived, want %d", len(s.calls), n)
		}
		return nil
	})
}

// WaitCallsOf waits until at least n calls of one task have arrived and returns them.
func (s *Sink) WaitCallsOf(t testing.TB, timeout time.Duration, id int64, n int) []Call {
	t.Helper()
	var calls []Call
	Eventually(t, timeout, func() error {
		if calls = s.CallsOf(id); len(calls) < n {
			return fmt.Errorf("%d calls of task %d have arrived, want %d", len(calls), id, n)
		}
		return nil
	})
	return calls
}
