package model

import "fmt"

type op uint8

// What can happen. Those behind opTick are faults and people.
const (
	opEnter op = iota
	opTake
	opPoll
	opRead
	opSend
	opAnswered
	opCopy
	opSave
	opRenew
	opList
	opLooks
	opDead
	opLetter
	opLettered
	opRetract
	opPurge
	opMark
	opClear
	opRescan
	opSeen
	opLoss
	opSettings

	opFetch
	opClaim
	opClassify
	opHandBack
	opCall
	opEnd // and one for each ending
	opEnd1
	opEnd2
	opEnd3
	opEnd4
	opSettle
	opLookUp
	opAnswer
	opBeat

	opBegin
	opCommit
	opTick

	opRollback
	opCancel
	opRequeue
	opMove
	opKillRelay
	opStartRelay
	opKillWorker
	opStartWorker
	opPauseRelay
	opPauseWorker
	opLosePublish
	opLosePubAck
	opLoseClaim
	opLoseSettle
	opLoseAck
	opCrashPostgres
	opRestartNATS
	opCloseWindow
	opJumpClock
	opLoseMessage
	opLoseTail
	opRecreateStream
	opBackUpStream
	opRestoreStream
	opCopyStandby
	opFailOver
)

var opNames = [...]string{
	"enters incarnation", "takes the lane", "takes a target", "reads a page", "publishes", "gets a PubAck", "copies its position",
	"saves its position", "renews its lane", "takes the work list", "ends looks", "reads a dead row", "publishes a dead letter",
	"marks the dead letter", "takes the dead letter back", "purges letters", "takes a mark", "sees the mark clear", "rescans", "looks at the stream",
	"compares the stream", "reads settings",
	"fetches", "claims", "classifies", "hands back early", "calls", "call succeeds", "call fails, short delay", "call fails, long delay",
	"call fails for good", "call snoozes", "settles", "looks its attempt up", "answers the message", "renews its leases",
	"begins", "commits", "time passes",
	"rolls back", "cancels", "requeues", "moves", "is killed (relay)", "is started (relay)", "is killed (worker)", "is started (worker)",
	"sleeps (relay)", "sleeps (worker)", "publish is lost", "PubAck is lost", "claims, answer lost", "settles, answer lost", "ack is lost",
	"crashes", "restarts", "forgets message ids", "takes a target, Postgres's clock is ahead", "loses a message", "loses its tail", "is deleted and made again",
	"is backed up", "is put back to its backup", "copies to the standby", "fails over to the standby",
}

// A step is one thing that happens: what, to whom (relay, worker or task), and which of it.
type step struct {
	op    op
	actor int
	arg   int
}

func (s step) String() string {
	who := "postgres"
	switch {
	case s.op <= opSettings, s.op == opLosePublish, s.op == opLosePubAck, s.op == opKillRelay, s.op == opStartRelay, s.op == opPauseRelay, s.op == opJumpClock:
		who = fmt.Sprintf("relay %d", s.actor+1)
	case s.op <= opBeat, s.op >= opLoseClaim && s.op <= opLoseAck, s.op == opKillWorker, s.op == opStartWorker, s.op == opPauseWorker:
		who = fmt.Sprintf("worker %d", s.actor+1)
		if s.arg > 0 && s.op != opPauseWorker {
			who += fmt.Sprintf(" (attempt %d)", s.arg+1)
		}
	case s.op == opBegin:
		return fmt.Sprintf("producer begins with %d rows, due after %d", s.actor, s.arg)
	case s.op == opCommit, s.op == opRollback:
		who = fmt.Sprintf("transaction %d", s.actor+1)
	case s.op == opTick:
		return fmt.Sprintf("time passes: %d", s.arg)
	case s.op >= opCancel && s.op <= opMove:
		who = fmt.Sprintf("operator, task %d:", s.actor)
	case s.op >= opRestartNATS && s.op <= opRestoreStream:
		who = "stream"
	}
	return who + " " + opNames[s.op]
}

// steps lists what could come next: the work, and with it faults and people.
func (w *world) steps(work, faults []step) ([]step, []step) {
	for i := range w.relays {
		w.relaySteps(i, func(o op, arg int) { work = append(work, step{o, i, arg}) })
	}
	for i := range w.workers {
		w.workerSteps(i, func(o op, arg int) { work = append(work, step{o, i, arg}) })
	}
	for i := range w.db.open {
		work = append(work, step{opCommit, i, 0})
	}
	if w.settling {
		return work, nil
	}
	fault := func(o op, actor, arg int) { faults = append(faults, step{o, actor, arg}) }
	if w.unfinished() < mostOpen && w.uids < mostTasks && w.db.nextXID < mostXIDs {
		for n := 1; n <= 2; n++ {
			work = append(work, step{opBegin, n, 0})
		}
		work = append(work, step{opBegin, 1, 8})
	}
	for i := range w.db.open {
		work = append(work, step{opRollback, i, 0})
	}
	w.db.each(func(r *row) {
		switch {
		case r.status == dead || r.status == cancelled:
			fault(opRequeue, r.id, 0)
		case !r.status.final():
			fault(opCancel, r.id, 0)
			if r.status != running {
				fault(opMove, r.id, 0)
			}
		}
	})
	for i, r := range w.relays {
		if r.name == 0 {
			work = append(work, step{opStartRelay, i, 0})
			continue
		}
		fault(opKillRelay, i, 0)
		fault(opPauseRelay, i, 8)
		if l := r.lane; l != nil && w.now <= l.until && l.round == nil && r.turn == nil && w.db.incarnation == r.incarnation {
			fault(opJumpClock, i, 20)
		}
		if len(r.parcels) > 0 && !r.parcels[0].unsent {
			fault(opLosePublish, i, 0)
			fault(opLosePubAck, i, 0)
		}
	}
	for i, k := range w.workers {
		if k.name == 0 {
			work = append(work, step{opStartWorker, i, 0})
			continue
		}
		fault(opKillWorker, i, 0)
		fault(opPauseWorker, i, 8)
		for j, a := range k.held {
			switch a.stage {
			case fetched:
				fault(opLoseClaim, i, j)
			case settling:
				fault(opLoseSettle, i, j)
			case answering:
				fault(opLoseAck, i, j)
			}
		}
	}
	fault(opCrashPostgres, 0, 0)
	fault(opRestartNATS, 0, 0)
	fault(opCloseWindow, 0, 0)
	if !w.losses {
		return work, faults
	}
	if n := len(w.stream.msgs); n > 0 {
		fault(opLoseMessage, 0, n-1)
		fault(opLoseTail, 0, min(n, 2))
	}
	fault(opRecreateStream, 0, 0)
	fault(opBackUpStream, 0, 0)
	if w.backup != nil {
		fault(opRestoreStream, 0, 0)
	}
	fault(opCopyStandby, 0, 0)
	if w.standby != nil {
		fault(opFailOver, 0, 0)
	}
	return work, faults
}
