package command

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/taskrelay/taskrelay/internal/text"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// What a settle does with the row. Only after a nak is the message kept: it comes again. After all others it is
// acknowledged: the row is final, or the relay publishes it anew.
const (
	actSucceeded  = "succeeded"
	actDead       = "dead"
	actCancelled  = "cancelled"
	actCompensate = "compensate" // execute is over: hand back for compensation
	actFail       = "fail"       // execute is over: compensate if the type does elsewhere, else dead
	actNak        = "nak"        // again after delay, by JetStream
	actHandBack   = "handback"   // again after delay, by the relay
)

// Reasons of a dead task.
const (
	reasonMaxAttempts        = "max_attempts"
	reasonPermanent          = "permanent"
	reasonDecode             = "decode"
	reasonLost               = "lost"
	reasonCompensationFailed = "compensation_failed"
	reasonCancelled          = "cancelled" // and compensated, as the operator asked
)

// ending is how a handler's call ended.
type ending struct {
	result  []byte
	err     error
	outcome string // outcomeFailed, or outcomePanic, outcomeTimeout; "" without error
	stack   string
	leaked  bool
	stopped bool // the worker's grace was over
}

// settlement is what is to be written for an attempt.
type settlement struct {
	a       *attempt
	action  string
	outcome string
	delay   time.Duration
	class   string
	text    string
	stack   string
	result  []byte
	reason  string
	logged  bool // leaves a row in task_attempt
	counted bool // the attempt is used up
	refused bool // Postgres refused a first version of it
	elapsed time.Duration
}

// decide makes of an ending what happens to the task. park says whether a delay may be left to JetStream.
func decide(a *attempt, b *binding, e ending, lease time.Duration, park func(time.Duration) bool) *settlement {
	s := &settlement{a: a, logged: true, counted: true, outcome: e.outcome, stack: e.stack}
	compensating := a.phase == PhaseCompensate
	if e.err == nil {
		s.outcome = outcomeSucceeded
		s.action, s.result = actSucceeded, e.result
		if compensating {
			s.action, s.result = actDead, nil // undone: that is how a dead task ends well
		}
		return s
	}
	x := explain(e.err)
	chosen := x.permanent || x.cancelled || x.snoozed || x.class == classDecode // not because its context was over
	s.text, s.class = x.text, x.class
	switch {
	case x.snoozed && e.outcome != outcomePanic:
		s.outcome, s.counted, s.text, s.class = outcomeSnoozed, false, "", ""
		s.again(x.delay, park)
		return s
	case x.cancelled && !compensating && e.outcome != outcomePanic:
		s.outcome, s.action = outcomeCancelled, actCancelled
		return s
	case e.stopped && !chosen:
		s.outcome, s.counted, s.action = outcomeReleased, false, actNak
		return s
	case e.outcome == outcomePanic:
		s.class = classPanic
	case e.outcome == outcomeTimeout && chosen:
		s.outcome = outcomeFailed
	case e.outcome == outcomeTimeout:
		s.class = classTimeout
	}
	if s.class == "" {
		s.class = classOther
		if x.permanent || x.cancelled {
			s.class = classPermanent
		}
	}
	final := x.permanent || x.cancelled || x.class == classDecode
	switch {
	case !final && a.number < a.limit:
		d := x.delay
		if !x.delayed {
			d = policyDelay(b.policy(), a.number)
		}
		s.again(clampDelay(d), park)
		return s
	case x.class == classDecode:
		s.reason = reasonDecode
	case final:
		s.reason = reasonPermanent
	default:
		s.reason = reasonMaxAttempts
	}
	s.over(b, compensating)
	if e.leaked {
		s.delay = lease // the handler may still be at it
	}
	return s
}

// usedUp settles a task whose attempts were all lost with their workers: its handler is not called once more.
func usedUp(a *attempt, b *binding, lease time.Duration) *settlement {
	s := &settlement{
		a: a, outcome: outcomeLost, class: classLost, reason: reasonLost, delay: lease,
		text: fmt.Sprintf("attempts used up: the last of %d was lost with its worker", a.limit),
	}
	s.over(b, a.phase == PhaseCompensate)
	return s
}

// over ends the phase without success.
func (s *settlement) over(b *binding, compensating bool) {
	switch {
	case compensating:
		s.action, s.reason = actDead, reasonCompensationFailed
	case s.reason == reasonDecode: // what cannot be read was never begun
		s.action = actDead
	case b.compensate != nil:
		s.action = actCompensate
	default:
		s.action = actFail
	}
}

func (s *settlement) again(d time.Duration, park func(time.Duration) bool) {
	s.delay, s.action = d, actHandBack
	if park(d) {
		s.action = actNak
	}
}

func clampDelay(d time.Duration) time.Duration { return min(max(d, 0), maxDelay) }

// policyDelay asks the policy; one that panics must not take the attempt's outcome along.
func policyDelay(p retry.Policy, n int) (d time.Duration) {
	defer func() {
		if recover() != nil {
			d = defaultPolicy.Delay(n)
		}
	}()
	return clampDelay(p.Delay(n))
}

// explanation is what an error says of itself.
type explanation struct {
	text, class                            string
	permanent, cancelled, snoozed, delayed bool
	delay                                  time.Duration
}

// explain reads an error. Its methods are the user's: a nil pointer of an error type panics in Error.
func explain(err error) (x explanation) {
	defer func() {
		if r := recover(); r != nil {
			x = explanation{text: fmt.Sprintf("error of type %T that panics when it is read", err)}
		}
	}()
	var snooze *snoozeError
	var cancel *cancelError
	x.text = text.Storable(err.Error(), maxErrorText)
	x.class = text.Storable(errorClass(err), maxClassText)
	x.permanent = retry.IsPermanent(err)
	x.delay, x.delayed = retry.AfterDelay(err)
	x.delay = clampDelay(x.delay)
	x.cancelled = errors.As(err, &cancel)
	if errors.As(err, &snooze) {
		x.snoozed, x.delay = true, clampDelay(snooze.delay)
	}
	return x
}

// endingOf classifies what a handler that came back returned.
func endingOf(ctx context.Context, result []byte, err error) ending {
	switch {
	case err == nil:
		return ending{result: result}
	case timedOut(ctx, err):
		return ending{err: err, outcome: outcomeTimeout}
	case errors.Is(context.Cause(ctx), ErrStopping):
		return ending{err: err, outcome: outcomeFailed, stopped: true}
	}
	return ending{err: err, outcome: outcomeFailed}
}
