package cli

import (
	"fmt"
	"time"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// next is what happens to a task by itself, and when; or what a person has to do.
type next struct {
	What    string     `json:"what"`
	At      *time.Time `json:"at,omitempty"`
	Command string     `json:"command,omitempty"`
}

// surroundings is what the next step of a task depends on beside its row.
type surroundings struct {
	now          time.Time // Postgres's
	pausedAt     *time.Time
	pausedReason string
	relay        string // that holds its lane
	workers      int    // alive, that know its type
}

func nextStep(t outbox.Task, delivery string, w surroundings) next {
	due := t.Due()
	later := due.After(w.now)
	at := func(when time.Time, format string, args ...any) next {
		return next{What: fmt.Sprintf(format, args...), At: &when}
	}
	switch t.Status {
	case "succeeded":
		return next{What: "nothing: it is done"}
	case "cancelled":
		if t.Phase == outbox.PhaseCompensate && t.Compensation != "done" {
			return next{What: "nothing, and what it began was not undone: undo it by hand, unless somebody brings it back", Command: requeue(t)}
		}
		return next{What: "nothing, unless somebody brings it back", Command: requeue(t)}
	case "dead":
		if t.DeadLetteredAt == nil {
			return next{What: "its dead letter follows as soon as NATS takes it; then it waits for a person", Command: requeue(t)}
		}
		return next{What: "nothing: it waits for a person", Command: requeue(t)}
	case "blocked":
		return next{What: "it waits for an earlier task with ordering key " + t.OrderingKey}
	case "running":
		switch {
		case t.LeaseUntil == nil || !t.LeaseUntil.After(w.now):
			return next{What: "its lease has ended: the next worker that gets its message takes it over, and this attempt counts as lost" + nobody(w)}
		case t.CancelRequestedAt != nil:
			return at(*t.LeaseUntil, "worker %s is asked to stop it: it ends cancelled unless it finishes first", t.LeaseOwner)
		}
		return at(*t.LeaseUntil, "worker %s finishes it, and renews its lease meanwhile; without that another one takes over after %s", t.LeaseOwner, stamp(t.LeaseUntil))
	}
	if t.CancelRequestedAt != nil {
		return next{What: "it becomes cancelled as soon as a worker meets it" + nobody(w)}
	}
	switch delivery {
	case "paused":
		return next{What: fmt.Sprintf("nothing until its type is resumed; paused at %s: %s", stamp(w.pausedAt), w.pausedReason),
			Command: "taskrelay resume " + t.BizType + " --reason '...'"}
	case "unknown type":
		return next{What: "nothing until a worker that knows its type is started; no attempt is used up meanwhile"}
	case "waiting for relay":
		switch {
		case later:
			return at(due, "the relay publishes it when it is due, at %s", stamp(&due))
		case w.relay == "":
			return next{What: "no relay holds its lane: start one, then it is published"}
		}
		return next{What: "relay " + w.relay + " publishes it next"}
	case "on work list":
		when := due
		if t.RepublishAt != nil {
			when = *t.RepublishAt
		}
		if when.After(w.now) {
			return at(when, "the relay publishes it again at %s", stamp(&when))
		}
		if w.relay == "" {
			return next{What: "no relay holds its lane: start one, then it is published"}
		}
		return next{What: "relay " + w.relay + " publishes it next"}
	}
	found := ""
	if t.RepublishAt != nil && t.RepublishAt.After(w.now) {
		found = "; if its message was lost, the relay finds that by " + stamp(t.RepublishAt)
	}
	if later && w.workers > 0 {
		return at(due, "its message comes back to a worker at %s%s", stamp(&due), found)
	}
	if w.workers == 0 {
		return next{What: "its message waits" + nobody(w) + found}
	}
	return next{What: "a worker takes it next" + found}
}

func nobody(w surroundings) string {
	if w.workers > 0 {
		return ""
	}
	return ": no worker that knows its type is alive, start one"
}

// requeue is the command that brings a task back.
func requeue(t outbox.Task) string {
	command := fmt.Sprintf("taskrelay requeue %d --reason '...'", t.ID)
	if t.Compensation == "done" {
		command += " --allow-compensated"
	}
	return command
}
