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
	// lowTurn: after so many of high, low is next.
	lowTurn = 4
	// headStart is how long a slot that was freed is kept for the lane whose turn it is: a message that waits in the
	// server is here sooner.
	headStart = 50 * time.Millisecond
	// manyPlaces: with so many, and handlers that are fast, some of low are here at any time. A rate keeps them away.
	manyPlaces = 50
)

// dispatcher owns the slots of one type: what is fetched, claimed and run for it.
//
// A message waits in its lane's queue, is handed to the claimers while there is room (claimed), waits in ready for a
// slot, runs in it, and is settled. High goes first; after four of high it is low's turn, so low keeps a fifth.
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
	highRow  int           // picks of high that low has not had its turn for
	full     bool          // there was no room when last looked
	freed    time.Duration // when there was some again
	size     int           // moving average of the payloads' bytes
	hotUntil time.Duration
	tokens   float64 // starts allowed by the rate
	tokensAt time.Duration
	timer    *time.Timer   // set while the rate, or a turn, holds us up
	wakeAt   time.Duration // when it fires

	// What operators set in biz_type, read again every ten seconds.
	set         typeSwitches
	keepNothing atomic.Bool // set.keepNothing, asked for each success
}

func newDispatcher(w *Worker, b *binding) *dispatcher {
	d := &dispatcher{w: w, b: b, slots: b.concurrency, tally: newTally(b.bizType), freed: -headStart}
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
	if d.full && d.room() > 0 {
		d.freed = d.w.now()
	}
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
	d.full = d.room() <= 0
	for _, l := range d.lanes {
		if l.shouldPull() {
			l.kick()
		}
	}
}

// pick takes the next message to claim, or nil.
func (d *dispatcher) pick() *attempt {
	next, other := d.turns()
	l, hopes := next, false
	if l.queue.len() == 0 {
		if l = other; l.queue.len() == 0 {
			return nil
		}
		if hopes = d.awaits(next); hopes && (l.low || d.room() <= d.due()) {
			return nil
		}
	}
	if !d.takeToken() {
		return nil
	}
	switch {
	case l.low:
		d.highRow = max(d.highRow-lowTurn, 0)
	case next.low && !hopes: // low has nothing
		d.highRow = 0
	default:
		d.highRow = min(d.highRow+1, lowTurn*d.lowShare())
	}
	return l.queue.pop()
}

// due is how many turns of low's have come.
func (d *dispatcher) due() int { return min(d.highRow/lowTurn, d.lowShare()-d.lowBusy) }

// turns says which lane is next where both have something.
func (d *dispatcher) turns() (next, other *lane) {
	if d.due() > 0 {
		return d.lanes[1], d.lanes[0]
	}
	return d.lanes[0], d.lanes[1]
}

// room is how many more may be claimed now.
func (d *dispatcher) room() int {
	n := d.allowance() - d.claimed - d.running
	if d.b.rate > 0 {
		d.fillTokens()
		n = min(n, int(d.tokens))
	}
	return n
}

// awaits reports whether a lane whose turn it is, and of which nothing is here, may have something in the server: it gets
// some time to bring it. A request that has been open for longer says that there is nothing.
//
// Where slots are few or handlers slow, a slot that is freed finds no message here, and the first to come got it. That
// was high each time, and low got nothing as long as high had work.
func (d *dispatcher) awaits(next *lane) bool {
	if n := d.allowance(); n > d.slots && n >= manyPlaces && d.b.rate <= 0 {
		return false
	}
	since := d.freed
	if len(next.pulls) > 0 {
		since = min(since, next.pulls[0].ends-pullExpires)
	} else if next.problem != nil || d.want(next) <= 0 {
		return false
	}
	rest := headStart - (d.w.now() - since)
	if rest <= 0 {
		return false
	}
	d.wakeIn(rest)
	return true
}

// want is how many messages a lane may ask the server for, beyond what it has asked for. d.mu is held.
func (d *dispatcher) want(l *lane) int {
	ahead := l.queue.len()
	if l.low { // not the other way round: what waits here of low must not keep high away
		ahead += d.lanes[0].queue.len()
	}
	free := d.allowance() - d.claimed - d.running - ahead - l.requested
	hot := l.low && d.w.now() < d.hotUntil
	if hot {
		// While high has work, low asks for its share alone, but for that even when high fills every slot.
		free = d.lowShare() - d.lowBusy - l.queue.len() - l.requested
	}
	if d.b.rate > 0 {
		// Not less what the other lane has asked for: an idle lane's request would keep this one waiting.
		d.fillTokens()
		free = min(free, int(d.tokens)-ahead-l.requested)
		if free <= 0 {
			d.wakeForToken()
		}
	}
	if next, _ := d.turns(); free > 0 && next != l && !hot && d.awaits(next) {
		if l.low {
			return 0
		}
		free -= d.due()
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
	if d.tokens < d.burst() {
		d.wakeIn(time.Duration(max(1-d.tokens, 0.01) / d.b.rate * float64(time.Second)))
	}
}

// wakeIn pumps again later, should nothing else do so before.
func (d *dispatcher) wakeIn(wait time.Duration) {
	wait = max(wait, time.Millisecond)
	at := d.w.now() + wait
	if d.timer != nil {
		if at < d.wakeAt {
			d.wakeAt = at
			d.timer.Reset(wait)
		}
		return
	}
	d.wakeAt = at
	d.timer = time.AfterFunc(wait, func() {
		d.mu.Lock()
		d.timer = nil
		d.pump()
		d.mu.Unlock()
	})
}
