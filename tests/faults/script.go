package faults

import (
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"time"
)

// The two types: one whose commands can be undone, one whose cannot.
const (
	undoable = "ORDER_PAYMENT"
	plain    = "NOTICE"
)

// policyAttempts is so high that attempts lost with their workers never use it up: then the end of a task is known.
const policyAttempts = 200

// A script is the payload of a task. It says how the target answers, so that the task's end is known before it begins.
// Answers go by the number of the attempt, not by how often the target was called: an attempt that is lost on its way
// back has been made all the same.
type script struct {
	N         int64 `json:"n"`         // what the checker knows the task by; ids may be given out twice after a crash
	Rollback  bool  `json:"rollback"`  // its transaction is rolled back: a call is a violation
	Fails     int   `json:"fails"`     // attempts up to this one are answered 500
	Permanent bool  `json:"permanent"` // then 422; else 200
	Millis    int   `json:"ms"`        // how long an answer takes

	UndoFails     int  `json:"undo_fails"` // the same for compensation
	UndoPermanent bool `json:"undo_permanent"`

	bizType     string
	high        bool
	in          time.Duration
	maxAttempts int // 0: policyAttempts
}

// newScript draws a task.
func newScript(r *rand.Rand, n int64, lease time.Duration) script {
	s := script{N: n, bizType: plain, high: r.IntN(4) == 0, Millis: r.IntN(60)}
	if r.IntN(2) == 0 {
		s.bizType = undoable
	}
	switch p := r.IntN(100); {
	case p < 55: // done at once
	case p < 78: // fails first: short delays are naks, longer ones go through the table
		s.Fails = 1 + r.IntN(5)
	case p < 86:
		s.Permanent = true
		s.Fails = r.IntN(2)
	case p < 94: // uses its attempts up
		s.maxAttempts = 1 + r.IntN(4)
		s.Fails = s.maxAttempts
	case p < 97: // outlives its first lease, so heartbeats matter
		s.Millis = int(lease.Milliseconds()) * (110 + r.IntN(60)) / 100
	default:
		s.in = time.Duration(r.IntN(4000)) * time.Millisecond
	}
	if s.fatal() && s.bizType == undoable {
		switch p := r.IntN(10); {
		case p < 6:
		case p < 8 && s.limit() > 2:
			s.UndoFails = 1
		case p < 9:
			s.UndoPermanent = true
		default:
			if s.maxAttempts > 0 {
				s.UndoFails = s.maxAttempts
			}
		}
	}
	return s
}

func (s *script) limit() int {
	if s.maxAttempts > 0 {
		return s.maxAttempts
	}
	return policyAttempts
}

// fatal reports whether execute ends without success.
func (s *script) fatal() bool { return s.Permanent || s.Fails >= s.limit() }

// undone reports whether compensation succeeds, provided that no lost attempt takes the place of the one that would.
func (s *script) undone() bool { return !s.UndoPermanent && s.UndoFails < s.limit() }

// answer is what the target says to an attempt.
func (s *script) answer(compensate bool, attempt int) int {
	fails, permanent := s.Fails, s.Permanent
	if compensate {
		fails, permanent = s.UndoFails, s.UndoPermanent
	}
	switch {
	case attempt <= fails:
		return http.StatusInternalServerError
	case permanent:
		return http.StatusUnprocessableEntity
	}
	return http.StatusOK
}

func (s *script) payload() string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // a struct of numbers
	}
	return string(b)
}
