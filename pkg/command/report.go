package command

import (
	"github.com/rs/zerolog"
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
