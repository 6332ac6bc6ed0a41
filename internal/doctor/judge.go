package doctor

import (
	"fmt"
	"slices"
	"strings"
)

// judgeLane reports what a lane's own numbers tell.
func (e *examination) judgeLane(l *Lane) {
	r, where := e.report, l.key().String()
	alive := slices.ContainsFunc(r.Relays, func(m Member) bool { return m.SilentMS < relaySilence.Milliseconds() })
	work := l.Due + l.Open
	if l.Paused && work > 0 {
		r.add(Finding{Level: Notice, Code: "paused", Where: where, What: fmt.Sprintf("its type is paused, %s", count(work, "task waits", "tasks wait")),
			Relay: "publishes nothing of it", You: "when it may go on: taskrelay resume " + l.BizType + " --reason '...'"})
	}
	if l.LiveWorkers == 0 && work > 0 {
		r.add(Finding{Level: Problem, Code: "no_worker", Where: where, What: fmt.Sprintf("no live worker knows its type, %s", count(work, "task waits", "tasks wait")),
			Relay: "publishes them all the same; no attempt is used up", You: "start a worker that has " + l.BizType})
	}
	if l.LeaseEnded > 0 {
		r.add(Finding{Level: Notice, Code: "lease_ended", Where: where,
			What:  fmt.Sprintf("%s under a lease that has ended: the worker died, hangs or is cut off", count(l.LeaseEnded, "task runs", "tasks run")),
			Relay: "nothing: the message comes to another worker within one ack wait (30 s), and that one takes the task over", You: "nothing, if a worker of the type is alive"})
	}
	if l.Paused {
		return
	}
	if l.Relay == "" && alive {
		r.add(Finding{Level: Notice, Code: "lane_without_relay", Where: where, What: "no relay holds this lane",
			Relay: "takes it within 12 s, unless its TASKRELAY_RELAY_BIZ_TYPES leaves the type out", You: "see whether some relay has the type"})
	}
	if l.OldestDue > late.Milliseconds() && alive && !l.full {
		r.add(Finding{Level: Problem, Code: "not_published", Where: where,
			What:  fmt.Sprintf("%s not published, the oldest for %v", count(l.Due, "due task is", "due tasks are"), ago(l.OldestDue)),
			Relay: "publishes them as soon as the stream takes them",
			You:   "look at the relay's log and /readyz: they say why the lane waits"})
	}
	if l.losses < r.Postgres.Losses && l.Relay != "" {
		r.add(Finding{Level: Notice, Code: "comparing", Where: where, What: "the stream has lost messages, and this lane has not been compared since",
			Relay: "is about to: all its unfinished tasks are published again", You: "nothing"})
	}
	if l.Foreign > 0 {
		r.add(Finding{Level: Problem, Code: "message_foreign", Where: where,
			What:  fmt.Sprintf("%s of another installation", count(l.Foreign, "message is", "messages are")),
			Relay: "leaves them alone, and so do workers", You: "find who publishes to this stream: each installation needs a NATS account or a TASKRELAY_NAMESPACE of its own"})
	}
}

func (e *examination) judgeRelays() {
	r := e.report
	alive := 0
	for _, m := range r.Relays {
		if m.SilentMS < relaySilence.Milliseconds() {
			alive++
			continue
		}
		r.add(Finding{Level: Notice, Code: "relay_silent", Where: m.Name, What: fmt.Sprintf("this relay (%s, pid %d) has not been heard of for %v", m.Host, m.PID, ago(m.SilentMS)),
			Relay: "another one takes its lanes; its row goes after an hour", You: "nothing, if it was stopped; else look at its log"})
	}
	if alive == 0 {
		var due int64
		for _, l := range r.Lanes {
			due += l.Due
		}
		r.add(Finding{Level: Problem, Code: "no_relay", Where: "relays", What: fmt.Sprintf("no relay is alive, %s to be published", count(due, "task is", "tasks are")),
			Relay: "goes on where the last one stopped, when one is started", You: "start a relay"})
	}
}

func (e *examination) judgeWorkers() {
	r := e.report
	for i := range r.Workers {
		m := &r.Workers[i]
		if h := e.held[m.Name]; h != nil {
			m.Leases, m.OldestMS, m.OldestID = h.Leases, h.OldestMS, h.OldestID
			delete(e.held, m.Name)
		}
		silent := m.SilentMS > workerSilence.Milliseconds()
		switch {
		case silent && m.Leases > 0:
			r.add(Finding{Level: Problem, Code: "worker_stuck", Where: m.Name, IDs: []ID{m.OldestID},
				What: fmt.Sprintf("this worker (%s, pid %d) has not been heard of for %v and holds %s, the oldest task for %v", m.Host, m.PID,
					ago(m.SilentMS), count(int64(m.Leases), "lease", "leases"), ago(m.OldestMS)),
				Relay: "nothing: another worker takes each task over when its lease ends", You: "look at that process; kill it if it hangs: what it writes later is refused"})
		case silent:
			r.add(Finding{Level: Notice, Code: "worker_silent", Where: m.Name, What: fmt.Sprintf("this worker (%s, pid %d) has not been heard of for %v; it holds nothing", m.Host, m.PID, ago(m.SilentMS)),
				Relay: "nothing", You: "nothing, if it was stopped; else look at its log"})
		case m.OldestMS > long.Milliseconds():
			r.add(Finding{Level: Notice, Code: "attempt_long", Where: m.Name, IDs: []ID{m.OldestID},
				What:  fmt.Sprintf("an attempt has been running for %v, and its worker renews the lease", ago(m.OldestMS)),
				Relay: "nothing: its worker ends it at its timeout", You: "taskrelay show " + m.OldestID.String()})
		}
	}
	var gone []string
	for name := range e.held {
		gone = append(gone, name)
	}
	slices.Sort(gone)
	for _, name := range gone {
		h := e.held[name]
		r.add(Finding{Level: Notice, Code: "worker_gone", Where: name, IDs: []ID{h.OldestID},
			What:  fmt.Sprintf("%s held by a worker that is in no list: it died or was stopped", count(int64(h.Leases), "lease is", "leases are")),
			Relay: "nothing: another worker takes each task over when its lease ends", You: "nothing"})
	}
}

// judgeSequence reports a stream that has lost its end: sequences that were acknowledged are to be handed out again.
func (e *examination) judgeSequence() {
	r := e.report
	var last uint64
	name := e.broker.names.Stream()
	for _, s := range r.NATS.Streams {
		if s.Name == name {
			last = s.LastSequence
		}
	}
	var behind []string
	for _, l := range r.Lanes {
		if l.losses == r.Postgres.Losses && l.maxSeq > 0 && uint64(l.maxSeq) > last {
			behind = append(behind, l.key().String())
		}
	}
	anew := slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Code == "stream_made_anew" })
	if len(behind) > 0 && !anew {
		r.add(Finding{Level: Problem, Code: "stream_rewound", Where: name,
			What:  fmt.Sprintf("the stream has lost its end: it stands at message %d, and later ones were published (%s)", last, strings.Join(behind, ", ")),
			Relay: "sees that within 5 s and publishes all unfinished tasks again", You: "start a relay, if none runs", fix: &fix{kind: fixRescan}})
	}
}
