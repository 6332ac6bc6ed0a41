package tests

import (
	"sync"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// publishes counts every message on the wire by its message id, also those that JetStream drops as duplicates.
type publishes struct {
	mu   sync.Mutex
	byID map[string]int
}

func countPublishes(t *testing.T, e *testenv.Env, subject string) *publishes {
	t.Helper()
	p := &publishes{byID: map[string]int{}}
	nc := e.Connect("publishes")
	sub, err := nc.Subscribe(subject, func(m *nats.Msg) {
		id := m.Header.Get("Nats-Msg-Id")
		if id == "" {
			return // a request of JetStream's own, not a publish
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.byID[id]++
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return p
}

// total counts all of them, repeated ones too.
func (p *publishes) total() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, c := range p.byID {
		n += c
	}
	return n
}
