package model

// harm does what is not work: faults, and what people do.
func (w *world) harm(s step, r *relay, k *worker, a *attempt) {
	i, arg := s.actor, s.arg
	switch s.op {
	case opRollback:
		w.commit(i, false)
	case opCancel:
		w.operate(i, "cancel")
	case opRequeue:
		w.operate(i, "requeue")
	case opMove:
		w.operate(i, "move")
	case opKillRelay:
		*r = relay{}
		w.relayDied = true
	case opStartRelay:
		w.startRelay(i)
	case opKillWorker:
		for _, a := range k.held {
			if a.call != nil {
				a.call.open = false
			}
		}
		*k = worker{}
	case opStartWorker:
		w.startWorker(i)
	case opPauseRelay:
		r.sleeps = w.now + arg
	case opPauseWorker:
		k.sleeps = w.now + arg
	case opLosePublish:
		w.send(r, isLost)
	case opLosePubAck:
		w.send(r, answerIsLost)
	case opLoseClaim:
		w.claimAttempt(k, a, false)
	case opLoseSettle:
		w.settleAttempt(a, false)
	case opLoseAck:
		w.answer(k, a, false)
	case opCrashPostgres:
		w.db.crash()
	case opRestartNATS:
		w.stream.restart()
	case opCloseWindow:
		clear(w.stream.ids)
	case opJumpClock: // for this one moment
		w.poll(r, w.now+arg)
	case opLoseMessage:
		w.stream.msgs = append(w.stream.msgs[:arg:arg], w.stream.msgs[arg+1:]...)
	case opLoseTail:
		w.stream.lose(arg)
	case opRecreateStream:
		w.stream.recreate()
	case opBackUpStream:
		w.backup = w.stream.copy()
	case opRestoreStream:
		letters, seq := w.stream.letters, w.stream.letterSeq // a store of their own here: replaying letters is not modelled
		w.stream = w.backup.copy()
		w.stream.letters, w.stream.letterSeq = letters, seq
	case opCopyStandby:
		w.standby = w.db.copy()
	case opFailOver:
		w.failOver()
	}
}

// failOver promotes the standby: what was committed since its copy never was. That goes for claims and for heartbeats.
func (w *world) failOver() {
	before := w.db
	w.db = w.standby.copy()
	w.db.crash()
	w.failedOver = true
	undone := func(id, token int) bool {
		r, was := w.db.rows[id], before.rows[id]
		return r == nil || r.status != running || r.token != token || was != nil && was.token == token && was.leaseUntil > r.leaseUntil
	}
	for _, k := range w.workers {
		for _, a := range k.held {
			if a.stage >= claimed && undone(a.task, a.token) {
				w.undoneTokens[a.token] = true
				if a.call != nil {
					a.call.undone = true
				}
			}
		}
	}
}

func (w *world) undone(token int) bool { return w.undoneTokens[token] }
