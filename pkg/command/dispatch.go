package command

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

const (
	// warmWait is how long claimed tasks may wait for a slot: prefetch grows until they would wait about this long.
	warmWait = 100 * time.Millisecond
	// maxPrefetch bounds what a worker that dies takes along, and what another worker cannot run meanwhile.
	maxPrefetch = 1000
	// unclaimedWait: a message that waits longer here may find a free slot in another worker.
	unclaimedWait = time.Second
	// claimedWait: a claimed task that waits longer is given back, its attempt not counted.
	claimedWait = 5 * time.Second
	// hotFor: high messages arrived within it, so low takes only its share.
	hotFor = time.Second
)

// dispatcher owns the slots of one type: what is fetched, claimed and run for it.
//
// A message waits in its lane's queue, is handed to the claimers while there is room (claimed), waits in ready for a
// slot, runs in it, and is settled. High goes first; each fifth pick is low when low waits, so it keeps a fifth.
type dispatcher struct {
	w     *Worker
	b     *binding
	slots int
	lanes [2]*lane // high, low
	tally *tally

	mu       sync.Mutex
	stopping bool
	ready    fifo[*attempt]
	claimed  int // handed to the claimers, or in ready
	running  int
	starting bool // a goroutine is on its way to take from ready
	settling int
	lowBusy  int           // of claimed and running
	mean     time.Duration // moving average of the handlers' time; 0: none has returned yet
	picks    int
	size     int // moving average of the payloads' bytes
	hotUntil time.Duration
	tokens   float64 // starts allowed by the rate
	tokensAt time.Duration
	timer    *time.Timer // set while the rate holds us up

	// What operators set in biz_type, read again every ten seconds.
	set         typeSwitches
	keepNothing atomic.Bool // set.keepNothing, asked for each success
}

func newDispatcher(w *Worker, b *binding) *dispatcher {
	d := &dispatcher{w: w, b: b, slots: b.concurrency, tally: newTally(b.bizType)}
	if d.slots == 0 {
		d.slots = w.cfg.Concurrency
	}
	d.tokens = d.burst()
	d.lanes[0] = newLane(d, outbox.PriorityHigh)
	d.lanes[1] = newLane(d, outbox.PriorityLow)
	return d
}

// allowance is how many tasks may be claimed or running: the slots, and more while handlers are fast, so that
// slots need not wait for a round trip to Postgres.
func (d *dispatcher) allowance() int {
	if d.mean <= 0 {
		return d.slots
	}
	per := min(max(float64(warmWait)/float64(d.mean)-1, 0), 20)
	return d.slots + min(d.prefetchLimit(), int(float64(d.slots)*per))
}

// lowShare is what low keeps, whatever high wants.
func (d *dispatcher) lowShare() int { return (d.allowance() + 4) / 5 }

// arrive takes a message from a lane.
func (d *dispatcher) arrive(a *attempt) {
	d.mu.Lock()
	a.lane.came()
	d.noteSize(a.msg)
	if d.stopping {
		d.mu.Unlock()
		a.nak(0)
		return
	}
	if !a.lane.low {
		d.hotUntil = a.arrived + hotFor
	}
	a.lane.queue.push(a)
	d.pump()
	d.mu.Unlock()
}

// pump hands waiting messages to the claimers while there is room, and lets the lanes ask for more. d.mu is held.
func (d *dispatcher) pump() {
	if d.stopping {
		return
	}
	allowance := d.allowance()
	for d.claimed+d.running < allowance && d.settling <= allowance {
		a := d.pick()
		if a == nil {
			break
		}
		d.claimed++
		if a.lane.low {
			d.lowBusy++
		}
		d.w.claims.put(a)
	}
	for _, l := range d.lanes {
		if l.shouldPull() {
			l.kick()
		}
	}
}

// pick takes the next message to claim, or nil.
func (d *dispatcher) pick() *attempt {
	high, low := &d.lanes[0].queue, &d.lanes[1].queue
	if high.len()+low.len() == 0 || !d.takeToken() {
		return nil
	}
	d.picks++
	if low.len() > 0 && (high.len() == 0 || d.picks%5 == 0) {
		return low.pop()
	}
	return high.pop()
}

// want is how many messages a lane may ask the server for, beyond what it has asked for. d.mu is held.
func (d *dispatcher) want(l *lane) int {
	high, low := d.lanes[0].queue.len(), d.lanes[1].queue.len()
	free := d.allowance() - d.claimed - d.running - high - low - l.requested
	if l.low && d.w.now() < d.hotUntil {
		// While high has work, low asks for its share alone, but for that even when high fills every slot.
		free = d.lowShare() - d.lowBusy - low - l.requested
	}
	if d.b.rate > 0 {
		// Not less what the other lane has asked for: an idle lane's request would keep this one waiting.
		d.fillTokens()
		free = min(free, int(d.tokens)-high-low-l.requested)
		if free <= 0 {
			d.wakeForToken()
		}
	}
	return free
}

// start runs what is ready while a slot is free. d.mu is held.
//
// It starts one goroutine, which starts the next one if there is more once it has taken an attempt itself. So handlers
// that block fill all slots at once, and fast ones are run by a few goroutines whose stacks have grown already.
// [A goroutine for each attempt of a handler that does nothing: 21 % of the worker's CPU, for growing stacks.]
func (d *dispatcher) start() {
	if !d.starting && d.free() {
		d.starting = true
		go d.w.slot(d)
	}
}

// free reports whether an attempt waits that may run. d.mu is held.
func (d *dispatcher) free() bool { return !d.stopping && d.running < d.slots && d.ready.len() > 0 }

// next gives the goroutine of a slot an attempt to run, or nil. started: it comes from start.
func (d *dispatcher) next(started bool) *attempt {
	d.mu.Lock()
	defer d.mu.Unlock()
	if started {
		d.starting = false
	}
	if !d.free() {
		return nil
	}
	d.claimed--
	d.running++
	a := d.ready.pop()
	d.start()
	return a
}

// restart runs what is ready after a slot was freed by somebody else than its goroutine.
func (d *dispatcher) restart() {
	d.mu.Lock()
	d.start()
	d.mu.Unlock()
}

// granted takes an attempt whose claim succeeded, unless the worker is stopping: then nobody would run it.
func (d *dispatcher) granted(a *attempt) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopping {
		return false
	}
	d.ready.push(a)
	d.start()
	return true
}

// refused gives back the room of an attempt that was claimed in vain.
func (d *dispatcher) refused(a *attempt) {
	d.mu.Lock()
	d.claimed--
	if a.lane.low {
		d.lowBusy--
	}
	d.pump()
	d.mu.Unlock()
}

// dropped gives back the slot of an attempt that got one and may not run any more.
func (d *dispatcher) dropped(a *attempt) {
	d.mu.Lock()
	d.running--
	if a.lane.low {
		d.lowBusy--
	}
	d.pump()
	d.mu.Unlock()
}

// returned frees the slot of an attempt whose handler is over (or given up) and counts it as settling.
func (d *dispatcher) returned(a *attempt, took time.Duration) {
	d.mu.Lock()
	d.running--
	d.settling++
	if a.lane.low {
		d.lowBusy--
	}
	if d.mean == 0 {
		d.mean = max(took, 1)
	} else {
		d.mean = max(d.mean+(took-d.mean)/8, 1)
	}
	d.pump()
	d.mu.Unlock()
}

// unstarted moves an attempt that will not run from claimed to settling.
func (d *dispatcher) unstarted(a *attempt) {
	d.mu.Lock()
	d.claimed--
	d.settling++
	if a.lane.low {
		d.lowBusy--
	}
	d.mu.Unlock()
}

// settled gives back the room of n attempts that have been answered.
func (d *dispatcher) settled(n int) {
	d.mu.Lock()
	d.settling -= n
	d.pump()
	d.mu.Unlock()
}

// sweep gives back what waits too long: unclaimed messages to the server, claimed tasks to the table.
func (d *dispatcher) sweep(now time.Duration) {
	var naks, releases []*attempt
	d.mu.Lock()
	for _, l := range d.lanes {
		for l.queue.len() > 0 && now-l.queue.peek().arrived > unclaimedWait {
			naks = append(naks, l.queue.pop())
		}
	}
	for d.ready.len() > 0 && now-d.ready.peek().claimed > claimedWait {
		releases = append(releases, d.ready.pop())
	}
	d.pump()
	d.mu.Unlock()
	for _, a := range naks {
		a.nak(0)
	}
	for _, a := range releases {
		d.w.releaseUnstarted(a)
	}
}

// stop gives back all that is unclaimed, and returns what is claimed and will not run.
func (d *dispatcher) stop() (ready []*attempt) {
	d.mu.Lock()
	d.stopping = true
	var naks []*attempt
	for _, l := range d.lanes {
		for l.queue.len() > 0 {
			naks = append(naks, l.queue.pop())
		}
	}
	for d.ready.len() > 0 {
		ready = append(ready, d.ready.pop())
	}
	if d.timer != nil {
		d.timer.Stop()
	}
	d.mu.Unlock()
	for _, a := range naks {
		a.nak(0)
	}
	return ready
}

func (d *dispatcher) busy() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.running
}

// burst is how many starts may come at once after a pause.
func (d *dispatcher) burst() float64 { return max(1, math.Ceil(d.b.rate/10)) }

func (d *dispatcher) fillTokens() {
	now := d.w.now()
	d.tokens = min(d.burst(), d.tokens+d.b.rate*(now-d.tokensAt).Seconds())
	d.tokensAt = now
}

func (d *dispatcher) takeToken() bool {
	if d.b.rate <= 0 {
		return true
	}
	d.fillTokens()
	if d.tokens < 1 {
		d.wakeForToken()
		return false
	}
	d.tokens--
	return true
}

// wakeForToken pumps again when the rate allows the next start. Called when fewer than one token is free.
func (d *dispatcher) wakeForToken() {
	if d.timer != nil || d.tokens >= d.burst() {
		return
	}
	wait := time.Duration(max(1-d.tokens, 0.01) / d.b.rate * float64(time.Second))
	d.timer = time.AfterFunc(max(wait, time.Millisecond), func() {
		d.mu.Lock()
		d.timer = nil
		d.pump()
		d.mu.Unlock()
	})
}
