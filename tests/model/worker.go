package model

type stage uint8

const (
	fetched stage = iota
	unclaimed
	early
	claimed
	calling
	ackedFirst // only without the guard: the message is acknowledged before the row is written
	settling
	lookingUp
	answering
)

// An attempt is a message on its way through a worker.
type attempt struct {
	message
	token      int
	stage      stage
	leaseFrom  int
	number     int
	compensate bool
	lost       bool
	settlement settlement
	act        string
	call       *call
}

type settlement struct {
	msg     *message
	token   int
	action  string
	outcome string
	delay   int
	counted bool
}

// A call is what the system downstream sees.
type call struct {
	uid, token int
	open       bool
	leaseUntil int
	undone     bool // the database has lost the claim in a failover
}

type worker struct {
	name   int // 0: not running
	sleeps int
	held   []*attempt
}

// How a handler ends.
const (
	endsWell = iota
	failsShortly
	failsForLong
	failsForGood
	snoozes
)

var endings = [...]string{"succeeds", "fails, short delay", "fails, long delay", "fails for good", "snoozes"}

// workerSteps lists what worker i could do next.
func (w *world) workerSteps(i int, add func(op, int)) {
	k := w.workers[i]
	if k.name == 0 || k.sleeps > w.now {
		return
	}
	if len(k.held) < 3 && w.stream.waiting(w.now) >= 0 {
		add(opFetch, 0)
	}
	beat := false
	for j, a := range k.held {
		switch a.stage {
		case fetched:
			add(opClaim, j)
		case unclaimed:
			add(opClassify, j)
		case early:
			add(opHandBack, j)
		case claimed:
			add(opCall, j)
		case calling:
			if w.settling { // all faults are over: downstream works
				add(opEnd+op(endsWell), j)
				break
			}
			for e := range endings {
				add(opEnd+op(e), j)
			}
		case settling:
			add(opSettle, j)
		case lookingUp:
			add(opLookUp, j)
		case ackedFirst, answering:
			add(opAnswer, j)
		}
		if a.stage >= claimed && w.now-a.leaseFrom >= lease/3 {
			beat = true
		}
	}
	if beat {
		add(opBeat, 0)
	}
}

func (k *worker) release(a *attempt) {
	for i, h := range k.held {
		if h == a {
			k.held = append(k.held[:i:i], k.held[i+1:]...)
			return
		}
	}
}

func (w *world) fetch(k *worker) {
	m := w.stream.msgs[w.stream.waiting(w.now)]
	m.out, m.until = true, w.now+lease // AckWait
	for _, h := range k.held {
		if h.task == m.task {
			w.stream.nak(m.seq, w.now+1)
			return
		}
	}
	w.tokens++
	k.held = append(k.held, &attempt{message: *m, token: w.tokens})
}

func (w *world) claimAttempt(k *worker, a *attempt, answer bool) {
	sent := w.now
	r, was, ok := w.claim(&a.message, a.token, k.name)
	if !answer {
		return // asked again, under the same token
	}
	if !ok {
		a.stage = unclaimed
		return
	}
	if was.cancel {
		a.act, a.stage = "cancelled", answering
		return
	}
	a.leaseFrom, a.number, a.compensate, a.stage = sent, r.attempt, r.compensate, claimed
	a.settlement = settlement{msg: &a.message, token: a.token, counted: true}
	if a.number > maxAttempts {
		a.settlement.counted = false // and not logged: nothing was called
		w.over(a, lease)
		a.stage = settling
	}
}

// over ends the phase without success.
func (w *world) over(a *attempt, delay int) {
	a.settlement.delay = delay
	a.settlement.action = "compensate"
	if a.compensate || !w.compensates {
		a.settlement.action = "dead"
	}
}

// classify is classifySQL and judge.
func (w *world) classify(k *worker, a *attempt) {
	r := w.db.rows[a.task]
	switch {
	case r == nil, r.uid != a.uid && !w.without.created:
		w.stream.ack(a.seq) // terminated
	case r.status.final(), r.generation != a.generation && !w.without.generation:
		w.stream.ack(a.seq)
	case r.status == running && r.leaseUntil >= w.now:
		w.stream.nak(a.seq, r.leaseUntil+1)
	case r.status != running && r.due()-w.now > nakMax:
		a.stage = early
		return
	case r.status != running && r.due() > w.now:
		w.stream.nak(a.seq, r.due())
	default:
		w.stream.nak(a.seq, w.now+1)
	}
	k.release(a)
}

func (w *world) earlyAnswer(k *worker, a *attempt) {
	if w.handBackEarly(&a.message) {
		w.stream.ack(a.seq)
	} else {
		w.stream.nak(a.seq, w.now+1)
	}
	k.release(a)
}

// start calls the handler, unless the lease has ended meanwhile. Here the invariants of calls are checked.
func (w *world) start(k *worker, a *attempt) {
	if a.lost || w.now-a.leaseFrom > lease {
		w.stream.nak(a.seq, w.now+1)
		k.release(a)
		return
	}
	a.call = &call{uid: a.uid, token: a.token, open: true, leaseUntil: a.leaseFrom + lease, undone: w.undone(a.token)}
	w.checkCall(a)
	w.calls = append(w.calls, a.call)
	a.stage = calling
}

// end decides what happens to the task.
func (w *world) end(a *attempt, how int) {
	a.call.open = false
	s := &a.settlement
	s.outcome = "failed"
	switch {
	case how == endsWell && a.compensate:
		s.outcome, s.action = "succeeded", "dead"
	case how == endsWell:
		s.outcome, s.action = "succeeded", "succeeded"
	case how == snoozes:
		s.outcome, s.action, s.delay, s.counted = "snoozed", "nak", 1, false
	case how == failsForGood || a.number >= maxAttempts:
		w.over(a, 0)
	case how == failsShortly:
		s.action, s.delay = "nak", 1
	default:
		s.action, s.delay = "handback", nakMax+2
	}
	a.stage = settling
	if w.without.ack && s.action != "nak" {
		a.stage = ackedFirst
	}
}

func (w *world) settleAttempt(a *attempt, answer bool) {
	act := w.settle(&a.settlement)
	switch {
	case !answer:
	case act != "":
		a.act, a.stage = act, answering
	default:
		a.stage = lookingUp
	}
}

// lookUp finds out why a settle changed nothing: its own token has settled it before (the answer was lost), or it is
// stale.
func (w *world) lookUp(k *worker, a *attempt) {
	l, ok := w.db.log[a.token]
	if ok && l.outcome != "lost" && l.outcome != "stale" {
		a.act, a.stage = a.settlement.action, answering
		return
	}
	if a.call != nil {
		w.db.log[a.token] = logged{a.uid, "stale"}
		w.db.wrote()
	}
	k.release(a)
}

// answer acknowledges the message of a settled attempt, or gives it back for its retry.
func (w *world) answer(k *worker, a *attempt, arrives bool) {
	if a.stage == ackedFirst {
		a.stage = settling
		if arrives {
			w.stream.ack(a.seq)
		}
		return
	}
	if arrives && a.act == "nak" {
		w.stream.nak(a.seq, w.now+a.settlement.delay)
	} else if arrives {
		w.stream.ack(a.seq)
	}
	k.release(a)
}

// beat renews the leases of all that is held, and tells the stream that it is being worked on.
func (w *world) beat(k *worker) {
	for _, a := range k.held {
		if m := w.stream.find(a.seq); m != nil && m.out {
			m.until = w.now + lease
		}
		if a.stage < claimed {
			continue
		}
		if !w.heartbeat(a.task, a.token) {
			a.lost = true
			continue
		}
		a.leaseFrom = w.now
		if a.call != nil {
			a.call.leaseUntil = w.now + lease
		}
	}
}
