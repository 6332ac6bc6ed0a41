package outbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// How a publish ended.
type verdict int

const (
	acked    verdict = iota // stored, or stored before
	waits                   // the lane cannot take it now: full stream, no stream, no permission, no resources
	refused                 // this one message is not acceptable
	oversize                // larger than the server takes
	unknown                 // no answer: it may be stored; publish again with the same id
)

var errOversize = errors.New("message is larger than the server's max_payload")
var errNoAnswer = fmt.Errorf("no answer within %v", publishTimeout)

// A published is the answer to one publish.
type published struct {
	verdict   verdict
	sequence  uint64
	duplicate bool
	err       error
}

const (
	publishWindow  = 8192            // messages in flight
	publishBytes   = 64 << 20        // bytes in flight
	publishTimeout = 5 * time.Second // then the outcome is unknown
	headerOverhead = 512             // what ours add to a message, roughly
)

// A publisher sends messages and hands each answer to its caller, over one reply inbox of its own: one subscription,
// the rest of the reply subject names the message. [Saves 3.5 µs a message against PublishMsgAsync.]
//
// Without the client's reconnect buffer (nats.ReconnectBufSize(-1)) a publish while disconnected fails at once; with
// it, something given up long ago could still appear in the stream.
type publisher struct {
	nc    *nats.Conn
	inbox string // ends in a dot

	mu      sync.Mutex
	room    sync.Cond
	pending map[uint64]*flight
	next    uint64
	bytes   int
	closed  bool
}

type flight struct {
	subject  string
	size     int
	deadline time.Time
	done     func(published)
}

func newPublisher(nc *nats.Conn) *publisher {
	p := &publisher{nc: nc, inbox: nc.NewRespInbox() + ".", pending: make(map[uint64]*flight)}
	p.room.L = &p.mu
	return p
}

// run receives the answers until ctx ends; then whatever is still open ends as unknown.
func (p *publisher) run(ctx context.Context) error {
	sub, err := p.nc.Subscribe(p.inbox+"*", p.receive)
	if err != nil {
		return fmt.Errorf("subscribe for publish answers: %w", err)
	}
	// An answer must never be dropped because we are slow for a moment: the window bounds them.
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return fmt.Errorf("subscribe for publish answers: %w", err)
	}
	lost := p.nc.StatusChanged(nats.RECONNECTING, nats.CLOSED)
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	defer func() {
		_ = sub.Unsubscribe()
		p.nc.RemoveStatusListener(lost)
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		p.expire(time.Time{}, errors.New("publisher stopped"))
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-lost: // the answers of all that was in flight are lost with the connection
			p.expire(time.Time{}, nats.ErrDisconnected)
		case now := <-tick.C:
			p.expire(now, errNoAnswer)
		}
	}
}

// expire ends flights whose deadline has passed; a zero now means all of them.
func (p *publisher) expire(now time.Time, err error) {
	p.mu.Lock()
	var ended []*flight
	for token, f := range p.pending {
		if now.IsZero() || now.After(f.deadline) {
			delete(p.pending, token)
			p.bytes -= f.size
			ended = append(ended, f)
		}
	}
	p.room.Broadcast()
	p.mu.Unlock()
	for _, f := range ended {
		f.done(published{verdict: unknown, err: err})
	}
}

// publish sends m with the given message id to a stream and calls done exactly once, from another goroutine or, when
// the message cannot even be sent, from this one. It blocks while the window is full.
func (p *publisher) publish(m *nats.Msg, stream, id string, done func(published)) {
	m.Header.Set(jetstream.MsgIDHeader, id)
	m.Header.Set(jetstream.ExpectedStreamHeader, stream)
	size := len(m.Data) + headerOverhead

	p.mu.Lock()
	for !p.closed && len(p.pending) > 0 && (len(p.pending) >= publishWindow || p.bytes+size > publishBytes) {
		p.room.Wait()
	}
	if p.closed {
		p.mu.Unlock()
		done(published{verdict: unknown, err: errors.New("publisher stopped")})
		return
	}
	p.next++
	token := p.next
	p.pending[token] = &flight{subject: m.Subject, size: size, deadline: time.Now().Add(publishTimeout), done: done}
	p.bytes += size
	p.mu.Unlock()

	m.Reply = p.inbox + strconv.FormatUint(token, 36)
	if err := p.nc.PublishMsg(m); err != nil {
		v := published{verdict: unknown, err: err}
		if errors.Is(err, nats.ErrMaxPayload) {
			v = published{verdict: oversize, err: fmt.Errorf("%w: %d bytes with headers, the server takes %d",
				errOversize, m.Size(), p.nc.MaxPayload())}
		}
		p.answer(token, v)
	}
}

// drain waits until nothing is in flight, at most for the time given.
func (p *publisher) drain(ctx context.Context, atMost time.Duration) {
	end := time.NewTimer(atMost)
	defer end.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		p.mu.Lock()
		n := len(p.pending)
		p.mu.Unlock()
		if n == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-end.C:
			return
		case <-tick.C:
		}
	}
}

func (p *publisher) receive(m *nats.Msg) {
	token, err := strconv.ParseUint(m.Subject[len(p.inbox):], 36, 64)
	if err != nil {
		return
	}
	p.answer(token, parseAnswer(m))
}

func (p *publisher) answer(token uint64, r published) {
	p.mu.Lock()
	f, ok := p.pending[token]
	if ok {
		delete(p.pending, token)
		p.bytes -= f.size
		p.room.Signal()
	}
	p.mu.Unlock()
	if ok { // else it was given up as unknown before
		f.done(r)
	}
}

func parseAnswer(m *nats.Msg) published {
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return published{verdict: waits, err: fmt.Errorf("no stream takes the subject: %w", jetstream.ErrNoStreamResponse)}
	}
	// The usual answer, {"stream":"TASKS","seq":123}, without a JSON decoder. A duplicate is not usual: the server puts
	// ,"duplicate": true behind it, with a space.
	if _, rest, ok := bytes.Cut(m.Data, []byte(`"seq":`)); ok && !bytes.Contains(m.Data, []byte(`"error"`)) {
		digits, whole := bytes.CutSuffix(rest, []byte("}"))
		if seq, err := strconv.ParseUint(string(bytes.TrimSpace(digits)), 10, 64); whole && err == nil && seq > 0 {
			return published{verdict: acked, sequence: seq}
		}
	}
	var a struct {
		Error *jetstream.APIError `json:"error"`
		Seq   uint64              `json:"seq"`
		Dup   bool                `json:"duplicate"`
	}
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return published{verdict: unknown, err: fmt.Errorf("answer to a publish is no JSON: %w", err)}
	}
	if a.Error != nil {
		return published{verdict: judge(a.Error), err: a.Error}
	}
	if a.Seq == 0 {
		return published{verdict: unknown, err: errors.New("answer to a publish has no sequence")}
	}
	return published{verdict: acked, sequence: a.Seq, duplicate: a.Dup}
}

// judge tells whether an error concerns the stream, so that the lane waits, or this one message.
// 10077 is the server's code for "could not be stored" (full stream, full subject), 10023, 10028 and 10047 are missing
// resources (10002 those of the account), 10167 too many requests, 10059 no such stream, 10060 another stream has the
// subject, 10109 a sealed stream; 10158 says that the first copy of the message is being stored at this moment.
func judge(e *jetstream.APIError) verdict {
	switch e.ErrorCode {
	case 10077, 10023, 10028, 10047, 10002, 10167, 10059, 10060, 10109, 10158:
		return waits
	}
	if e.Code >= 500 || e.Code == 429 || e.Code == 404 {
		return waits
	}
	return refused
}

// full reports whether an error says that the lane's subject or the whole stream holds all it may.
func full(err error) bool {
	var e *jetstream.APIError
	return errors.As(err, &e) && e.ErrorCode == 10077
}
