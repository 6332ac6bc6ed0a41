package model

import "fmt"

// Times are in ticks; relations matter, not lengths.
const (
	lease      = 6 // of a task, and AckWait
	laneLease  = 6
	guardAhead = 5  // how far a take moves an entry of the work list ahead
	lookAgain  = 12 // until a message that was published is looked at again
	nakMax     = 2
	pageSize   = 2

	maxAttempts = 2
	mostTasks   = 9
	mostOpen    = 3
	mostXIDs    = 60 // a snapshot has a bit for each
)

// guards are the ones that are taken out of the machine.
type guards struct {
	fence       bool // settle and heartbeat ask for the lease's token
	generation  bool // claim asks for the message's generation, dead letters for their row's
	created     bool // claim asks for created_at
	incarnation bool // positions in memory die with the database they describe
	ack         bool // a message is acknowledged after its row was written
	reconcile   bool // table and stream are compared
	guard       bool // what a look at the work list writes asks for the value that its take wrote
	saved       bool // a position is saved after the PubAcks of all it covers
	lease       bool // claim leaves a row alone that runs under a lease
	due         bool // claim asks whether the row is due
}

// A plan is what kind of run it is.
type plan struct {
	without     guards
	losses      bool // the stream loses messages, Postgres fails over; reconciling runs
	compensates bool // the command has a Compensate
}

// world is the whole machine.
type world struct {
	plan
	now        int
	db         *database
	standby    *database
	stream     *stream
	backup     *stream
	relays     [2]*relay
	workers    [2]*worker
	reconciles bool
	settling   bool // all faults are over

	names, uids, tokens, incarnations int

	calls        []*call
	undoneTokens map[int]bool
	failedOver   bool
	relayDied    bool

	kind, text string // of the violation, if any
	trace      []step
}

func newWorld(p plan) *world {
	w := &world{plan: p, now: 1, db: newDatabase(), stream: newStream(), undoneTokens: map[int]bool{}}
	w.reconciles = p.losses && !p.without.reconcile
	for i := range w.relays {
		w.relays[i] = &relay{}
		w.startRelay(i)
	}
	for i := range w.workers {
		w.workers[i] = &worker{}
		w.startWorker(i)
	}
	return w
}

func (w *world) startRelay(i int) {
	w.names++
	*w.relays[i] = relay{name: w.names}
}

func (w *world) startWorker(i int) {
	w.names++
	*w.workers[i] = worker{name: w.names}
}

// violated notes the first violation.
func (w *world) violated(kind, format string, args ...any) {
	if w.kind == "" {
		w.kind, w.text = kind, fmt.Sprintf(format, args...)
	}
}

func (w *world) unfinished() (n int) {
	for _, t := range w.db.open {
		n += len(t.rows)
	}
	w.db.each(func(r *row) {
		if !r.status.final() {
			n++
		}
	})
	return n
}

// do takes a step.
func (w *world) do(s step) {
	w.trace = append(w.trace, s)
	i, arg := s.actor, s.arg
	var r *relay
	var k *worker
	var a *attempt
	if s.op <= opSettings || s.op >= opKillRelay && s.op <= opJumpClock && i < len(w.relays) {
		r = w.relays[i]
	}
	if s.op >= opFetch && s.op <= opBeat || s.op >= opKillRelay && s.op <= opLoseAck && i < len(w.workers) {
		k = w.workers[i]
		if arg < len(k.held) {
			a = k.held[arg]
		}
	}
	switch s.op {
	case opEnter:
		w.enter(r)
	case opTake:
		w.take(r)
	case opPoll:
		w.poll(r, w.now)
	case opRead:
		w.read(r)
	case opSend:
		w.send(r, arrives)
	case opAnswered:
		w.answered(r)
	case opCopy:
		w.copyPosition(r)
	case opSave:
		w.savePosition(r)
	case opRenew:
		w.renew(r)
	case opList:
		w.takeList(r)
	case opLooks:
		w.endLooks(r)
	case opDead:
		t := w.db.letterDue()
		r.letter = &letterJob{task: t.id, uid: t.uid, generation: t.generation}
	case opLetter:
		w.publishLetter(r.letter)
	case opLettered:
		w.markLetter(r)
	case opRetract:
		w.retract(r)
	case opPurge:
		w.purge()
	case opMark:
		r.lane.mark = &mark{position: r.lane.pos, seq: r.lane.seq}
		r.lane.dirty = true
	case opClear:
		m := *r.lane.mark
		r.lane.clear = &m
	case opRescan:
		w.rescan(r)
	case opSeen:
		r.seen = &seen{w.stream.created, w.stream.last}
	case opLoss:
		w.checkLoss(r)
	case opSettings:
		w.readSettings(r)
	case opFetch:
		w.fetch(k)
	case opClaim:
		w.claimAttempt(k, a, true)
	case opClassify:
		w.classify(k, a)
	case opHandBack:
		w.earlyAnswer(k, a)
	case opCall:
		w.start(k, a)
	case opEnd, opEnd1, opEnd2, opEnd3, opEnd4:
		w.end(a, int(s.op-opEnd))
	case opSettle:
		w.settleAttempt(a, true)
	case opLookUp:
		w.lookUp(k, a)
	case opAnswer:
		w.answer(k, a, true)
	case opBeat:
		w.beat(k)
	case opBegin:
		runAt := none
		if arg > 0 {
			runAt = w.now + arg
		}
		w.begin(i, runAt)
	case opCommit:
		w.commit(i, true)
	case opTick:
		w.now += arg
	default:
		w.harm(s, r, k, a)
	}
}
