package faults

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"
)

// A call is one request that reached the target.
type call struct {
	n          int64 // 0: the body was no script
	id         int64
	compensate bool
	attempt    int
	rollback   bool
	key        string
	begin, end time.Time
	status     int
}

// target answers by script and records every call.
type target struct {
	url    string
	server *httptest.Server

	mu    sync.Mutex
	calls []*call
	open  int
}

func newTarget(t testing.TB) *target {
	g := &target{}
	g.server = httptest.NewServer(http.HandlerFunc(g.serve))
	g.url = g.server.URL
	t.Cleanup(func() {
		g.server.CloseClientConnections()
		g.server.Close()
	})
	return g
}

func (g *target) serve(w http.ResponseWriter, r *http.Request) {
	c := &call{begin: time.Now(), key: r.Header.Get("Idempotency-Key"), compensate: r.Header.Get("Task-Phase") == "compensate"}
	c.id, _ = strconv.ParseInt(r.Header.Get("Task-Id"), 10, 64)
	c.attempt, _ = strconv.Atoi(r.Header.Get("Task-Attempt"))
	g.mu.Lock()
	g.calls = append(g.calls, c)
	g.open++
	g.mu.Unlock()

	var s script
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	status := http.StatusUnprocessableEntity
	if err == nil {
		status = s.answer(c.compensate, c.attempt)
	}
	defer func() {
		g.mu.Lock()
		c.end, c.status = time.Now(), status
		g.open--
		g.mu.Unlock()
	}()
	g.mu.Lock()
	c.n, c.rollback = s.N, s.Rollback
	g.mu.Unlock()
	wait := time.NewTimer(time.Duration(s.Millis) * time.Millisecond)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-r.Context().Done(): // the worker was killed, or has given up
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `{"n": %d}`, s.N)
}

// running returns how many calls have not been answered.
func (g *target) running() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open
}

// all returns a copy of every call, in the order they came.
func (g *target) all() []call {
	g.mu.Lock()
	defer g.mu.Unlock()
	calls := make([]call, len(g.calls))
	for i, c := range g.calls {
		calls[i] = *c
	}
	return calls
}
