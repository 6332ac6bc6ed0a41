package command

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/trace"
)

// attempt is one message on its way through the worker: waiting, being claimed, claimed, running, settling.
// Whoever holds it in its queue owns the plain fields; what the heartbeat and the sweep touch meanwhile is atomic.
type attempt struct {
	lane    *lane
	msg     *nats.Msg
	arrived time.Duration // since the worker's epoch, as all its times: monotonic
	born    int64         // the consumer that delivered it: see lane.born

	// From the message: the identity of the row.
	id            int64
	createdMicros int64
	generation    int

	// From the claim.
	token   int64
	phase   string
	number  int // of this attempt in its phase
	limit   int
	bizID   string
	cause   string
	key     string
	claimed time.Duration // when it was ready to run
	age     float64       // seconds since the task was due first, then
	span    trace.Span    // nil: none

	started  time.Duration // when the handler was called; 0: never
	deadline time.Duration
	cancel   context.CancelCauseFunc // set before stage becomes running

	stage     atomic.Int32
	leaseFrom atomic.Int64 // when the statement was sent that last set lease_until
	progress  atomic.Int64 // when JetStream was last told that we are at it
	ended     atomic.Bool  // whoever sets it decides the outcome; a later one is discarded
	completed atomic.Bool  // Complete has settled it in the handler's transaction, which may yet roll back
	lost      atomic.Bool  // a heartbeat found another token in the row
}

const (
	stageClaiming int32 = iota
	stageClaimed
	stageRunning
	stageSettling
)

// holding is every attempt between the forming of its claim batch and its last answer, by task id: a task is here
// once, so a second copy of its message is seen.
type holding struct {
	mu  sync.Mutex
	all map[int64]*attempt
}

// reserve adds a unless its task is here already; then it returns the attempt that is.
func (h *holding) reserve(a *attempt) (held *attempt) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if held, ok := h.all[a.id]; ok {
		return held
	}
	h.all[a.id] = a
	return nil
}

func (h *holding) release(a *attempt) {
	h.mu.Lock()
	if h.all[a.id] == a {
		delete(h.all, a.id)
	}
	h.mu.Unlock()
}

func (h *holding) len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.all)
}

// appendAll appends every attempt held to buf.
func (h *holding) appendAll(buf []*attempt) []*attempt {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.all {
		buf = append(buf, a)
	}
	return buf
}
