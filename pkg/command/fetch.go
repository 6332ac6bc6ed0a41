package command

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/pause"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

const (
	pullBatch     = 500
	pullExpires   = 10 * time.Second
	pullHeartbeat = 2 * time.Second
	// silence: the server sends a heartbeat per pull, so after two missed ones the pull is gone.
	silence = 2*pullHeartbeat + 500*time.Millisecond
)

// lane fetches the messages of one (biz type, priority).
//
// It pulls by the same request as nats.go's Fetch, but over one subscription that lives as long as the lane: Fetch
// makes one per call, a timer per message, and drops what is in flight when its context ends, which then nobody gets
// before AckWait.
type lane struct {
	w        *Worker
	d        *dispatcher
	bizType  string
	priority string
	low      bool
	kicks    chan struct{}
	heard    atomic.Int64 // when the server last said anything

	born      atomic.Int64  // when the consumer was created: what an earlier one delivered is not answered any more
	delivered atomic.Uint64 // the number of its last delivery to us

	ackWait       atomic.Int64 // of the consumer, as the server has it
	maxAckPending atomic.Int64
	parked        parking

	// Guarded by d.mu.
	queue     fifo[*attempt]
	pulls     []pull
	nextPull  uint64
	requested int   // messages asked for and not come
	problem   error // why the lane must look up its consumer again
}

// pull is a request to the server for messages.
type pull struct {
	seq  uint64
	left int
	ends time.Duration
}

func newLane(d *dispatcher, priority string) *lane {
	return &lane{w: d.w, d: d, bizType: d.b.bizType, priority: priority, low: priority == outbox.PriorityLow,
		kicks: make(chan struct{}, 1)}
}

func (l *lane) kick() {
	select {
	case l.kicks <- struct{}{}:
	default:
	}
}

// shouldPull reports whether there is room worth a request. d.mu is held.
func (l *lane) shouldPull() bool {
	if l.problem != nil {
		return true
	}
	want := l.d.want(l)
	return want > 0 && (l.requested == 0 || want >= min(max(l.d.allowance()/4, 1), 100))
}

// run keeps the lane supplied until ctx ends. What breaks (consumer or stream deleted, no leader, no connection)
// is looked up and, where needed, made again, with backoff.
func (l *lane) run(ctx context.Context) {
	retry := pause.Growing(100*time.Millisecond, 2*time.Second)
	for ctx.Err() == nil {
		began := l.w.now()
		err := l.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		if l.w.now()-began > time.Minute {
			retry.Reset()
		}
		l.w.laneTrouble(l, err)
		sleep(ctx, retry.NextBackOff())
	}
}

// serve pulls from the lane's consumer until something is wrong with it.
func (l *lane) serve(ctx context.Context) error {
	if err := l.ensureConsumer(ctx); err != nil {
		return err
	}
	inbox := l.w.nc.NewInbox()
	born := l.born.Load()
	sub, err := l.w.nc.Subscribe(inbox+".*", func(m *nats.Msg) { l.receive(m, born) })
	if err != nil {
		return fmt.Errorf("subscribe for %s: %w", l.name(), err)
	}
	defer l.unsubscribe(sub)
	// What is asked for is bounded by the allowance; a limit here would drop messages that then wait for AckWait.
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return err
	}
	l.reset()
	l.w.laneFine(l)
	next := l.w.names.API() + "CONSUMER.MSG.NEXT." + l.w.names.Stream() + "." + l.name()
	l.kick()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-l.kicks:
		}
		for {
			seq, n, err := l.nextRequest()
			if err != nil {
				return err
			}
			if n == 0 {
				break
			}
			body := `{"batch":` + strconv.Itoa(n) + l.byteLimit(n) + `,"expires":` + strconv.FormatInt(int64(pullExpires), 10) +
				`,"idle_heartbeat":` + strconv.FormatInt(int64(pullHeartbeat), 10) + `}`
			if err := l.w.nc.PublishRequest(next, inbox+"."+strconv.FormatUint(seq, 10), []byte(body)); err != nil {
				return fmt.Errorf("pull from %s: %w", l.name(), err)
			}
		}
	}
}

func (l *lane) name() string { return l.w.names.Consumer(l.bizType, l.priority) }

// reset forgets the pulls of an earlier subscription.
func (l *lane) reset() {
	l.d.mu.Lock()
	l.pulls, l.requested, l.problem = l.pulls[:0], 0, nil
	l.d.mu.Unlock()
	l.heard.Store(int64(l.w.now()))
}

// unsubscribe takes in what the server had already sent, so that nothing of it waits for AckWait.
func (l *lane) unsubscribe(sub *nats.Subscription) {
	closed := sub.StatusChanged(nats.SubscriptionClosed)
	if err := sub.Drain(); err != nil {
		_ = sub.Unsubscribe()
		return
	}
	select {
	case <-closed:
	case <-time.After(time.Second): // no connection, so nothing comes either
	}
}

// nextRequest books the next pull and returns its number and size; size 0: nothing to ask for now.
func (l *lane) nextRequest() (seq uint64, n int, err error) {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	if l.problem != nil {
		return 0, 0, l.problem
	}
	if l.d.stopping || !l.shouldPull() {
		return 0, 0, nil
	}
	if n = min(l.d.want(l), pullBatch); n <= 0 { // time has gone on since shouldPull
		return 0, 0, nil
	}
	l.nextPull++
	if len(l.pulls) == 0 {
		l.heard.Store(int64(l.w.now()))
	}
	l.pulls = append(l.pulls, pull{seq: l.nextPull, left: n, ends: l.w.now() + pullExpires})
	l.requested += n
	return l.nextPull, n, nil
}

// receive takes what the server sends: tasks, and the statuses of pulls. born is the consumer's that was pulled from: what
// a slow drain still brings of it comes after lane.born is the next one's.
func (l *lane) receive(m *nats.Msg, born int64) {
	now := l.w.now()
	l.heard.Store(int64(now))
	if !strings.HasPrefix(m.Reply, "$JS.ACK.") {
		l.status(m)
		return
	}
	l.noteDelivery(m.Reply)
	a := &attempt{lane: l, msg: m, arrived: now, born: born}
	a.progress.Store(int64(now))
	v := a.identify(l.w.installation)
	if v == ours {
		l.d.arrive(a)
		return
	}
	l.d.mu.Lock()
	l.came()
	l.d.mu.Unlock()
	switch v {
	case foreign:
		l.w.foreignMessage(a)
	case noTask:
		l.w.stats.Terminated.Add(1)
		l.w.log.Error().Str("biz_type", l.bizType).Str("subject", m.Subject).
			Msg("message without the headers of a task terminated: somebody published it by hand; enqueue a row instead")
		a.term("no taskrelay task: required headers are missing or malformed")
	case mistaken:
		l.w.stats.Terminated.Add(1)
		l.w.log.Error().Str("biz_type", l.bizType).Str("header", header(m.Header, outbox.HeaderBizType)).
			Msg("message terminated: its biz type is not its subject's")
		a.term("Task-Biz-Type is not the subject's")
	}
	l.kick()
}

// came books a message against the oldest pull: the server serves them in their order. d.mu is held.
func (l *lane) came() {
	if len(l.pulls) == 0 {
		return
	}
	l.requested--
	if l.pulls[0].left--; l.pulls[0].left == 0 {
		l.pulls = append(l.pulls[:0], l.pulls[1:]...)
	}
}

// status takes what the server says about a pull.
func (l *lane) status(m *nats.Msg) {
	code := m.Header.Get("Status")
	if code == "100" { // idle heartbeat
		return
	}
	seq, _ := strconv.ParseUint(m.Subject[strings.LastIndexByte(m.Subject, '.')+1:], 10, 64)
	l.d.mu.Lock()
	known := l.forget(func(p pull) bool { return p.seq == seq })
	if known && code != "408" && code != "404" && !bytesReached(m) && l.problem == nil {
		l.problem = statusError(code, m.Header.Get("Description"))
	}
	l.d.mu.Unlock()
	l.kick()
}

// forget drops the pulls for which over holds. d.mu is held.
func (l *lane) forget(over func(pull) bool) (any bool) {
	keep := l.pulls[:0]
	for _, p := range l.pulls {
		if over(p) {
			l.requested -= p.left
			any = true
			continue
		}
		keep = append(keep, p)
	}
	l.pulls = keep
	return any
}

var (
	errSilent       = errors.New("no heartbeat from the server")
	errLimitChanged = errors.New("limit of the type changed")
)

// recheck makes the lane compare its consumer with what is wanted now.
func (l *lane) recheck() {
	l.d.mu.Lock()
	if l.problem == nil {
		l.problem = errLimitChanged
	}
	l.d.mu.Unlock()
	l.kick()
}

// watch notices pulls that the server has lost.
func (l *lane) watch(now time.Duration) {
	l.d.mu.Lock()
	l.forget(func(p pull) bool { return now > p.ends+time.Second })
	if len(l.pulls) > 0 && now-time.Duration(l.heard.Load()) > silence && l.problem == nil {
		l.problem = errSilent
	}
	kick := l.shouldPull()
	l.d.mu.Unlock()
	if kick {
		l.kick()
	}
}

func statusError(code, description string) error {
	if code == "503" {
		description = "no responders: the stream or the consumer is gone, or has no leader"
	}
	return fmt.Errorf("pull refused: %s %s", code, description)
}

// parking counts the messages of a lane that this worker has parked in JetStream by a nak with a delay: they count
// against MaxAckPending until the delay is over.
type parking struct {
	mu    sync.Mutex
	until map[int64]int // by second
}

// add counts one more unless limit are parked already.
func (p *parking) add(now, delay time.Duration, limit int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for second, k := range p.until {
		if second <= int64(now/time.Second) {
			delete(p.until, second)
			continue
		}
		n += k
	}
	if n >= limit {
		return false
	}
	if p.until == nil {
		p.until = make(map[int64]int)
	}
	p.until[int64((now+delay)/time.Second)+1]++
	return true
}
