package command

import (
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/text"
)

// report counts and logs one settled attempt. No payloads: they may hold secrets.
func (w *Worker) report(s *settlement, act string) {
	a := s.a
	w.meter.report(s, act)
	switch s.outcome {
	case outcomeSucceeded:
		w.stats.Succeeded.Add(1)
	case outcomeReleased:
		w.stats.Released.Add(1)
	case outcomeFailed, outcomePanic, outcomeTimeout:
		w.stats.Failed.Add(1)
	}
	switch act {
	case actSucceeded:
		if a.lane.d.keepNothing.Load() {
			w.forgets.put(a.id)
		}
		w.event(w.log.Info(), s).Msg("task succeeded")
	case actCancelled:
		w.event(w.log.Info(), s).Msg("task cancelled")
	case actDead, actFail:
		w.stats.Dead.Add(1)
		if s.outcome == outcomeSucceeded {
			w.event(w.log.Warn(), s).Msg("task compensated, dead")
			return
		}
		w.event(w.log.Error(), s).Int("max_attempts", a.limit).Str("reason", s.reason).Str("error", s.text).Msg("task dead")
	case actCompensate:
		w.event(w.log.Error(), s).Int("max_attempts", a.limit).Str("reason", s.reason).Str("error", s.text).
			Msg("task failed for good, compensation follows")
	case actNak, actHandBack:
		switch s.outcome {
		case outcomeSnoozed:
			w.event(w.log.Info(), s).Dur("delay", s.delay).Msg("task snoozed")
		case outcomeReleased:
			w.event(w.log.Info(), s).Msg("task given back, attempt not counted")
		default:
			w.event(w.log.Warn(), s).Int("max_attempts", a.limit).Dur("delay", s.delay).Str("error", s.text).
				Msg("attempt failed, retrying")
		}
	}
}

func (w *Worker) event(e *zerolog.Event, s *settlement) *zerolog.Event {
	if e == nil { // level off
		return nil
	}
	return e.Int64("task_id", s.a.id).Str("biz_type", s.a.lane.bizType).Str("phase", s.a.phase).
		Int("attempt", s.a.number).Int64("duration_ms", s.elapsed.Milliseconds())
}

// complaints keeps a condition that lasts from filling the log.
type complaints struct {
	mu   sync.Mutex
	last map[string]time.Duration
}

// complain calls log at most once a minute for each subject.
func (w *Worker) complain(subject string, log func()) {
	c, now := &w.complaints, w.now()
	c.mu.Lock()
	if c.last == nil {
		c.last = make(map[string]time.Duration)
	}
	at, ok := c.last[subject]
	due := !ok || now-at >= time.Minute
	if due {
		c.last[subject] = now
	}
	c.mu.Unlock()
	if due {
		log()
	}
}

// foreignMessage takes a message of another installation: it is not ours to answer, but must not come back at once.
func (w *Worker) foreignMessage(a *attempt) {
	w.stats.Foreign.Add(1)
	theirs := header(a.msg.Header, "Task-Installation")
	err := errForeignMessage{theirs: text.Storable(theirs, 64), ours: w.installation}
	w.health.set("foreign messages", err, w.now()+time.Minute)
	w.complain("foreign "+theirs, func() {
		w.log.Error().Err(err).Str("subject", a.msg.Subject).Msg("message of another installation left alone")
	})
	a.nak(unknownNak)
}

type errForeignMessage struct{ theirs, ours string }

func (e errForeignMessage) Error() string {
	return "the stream carries messages of installation " + e.theirs + ", this database is " + e.ours +
		": use another NATS_URL or set NAMESPACE for one of them"
}
