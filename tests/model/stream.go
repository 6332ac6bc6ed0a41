package model

import "maps"

// A messageID is <id>.<created_at>.<generation>.<looks>; a dead letter's has the generation alone.
type messageID struct{ task, uid, generation, looks int }

// A message is one in the stream. uid is created_at, and with it the payload: whoever runs a message runs that payload.
type message struct {
	seq        int
	id         messageID
	task, uid  int
	generation int
	out        bool // delivered, not answered
	until      int  // of out: ack wait; else: not delivered before
}

type letter struct{ seq, generation int }

// stream is JetStream: the work queue with its one consumer, and the dead letters.
type stream struct {
	created int
	last    int
	msgs    []*message
	ids     map[messageID]int // duplicate window

	letterSeq int
	letters   map[int]letter // by uid: one message a subject
}

func newStream() *stream {
	return &stream{created: 1, ids: map[messageID]int{}, letters: map[int]letter{}}
}

func (s *stream) copy() *stream {
	c := *s
	c.msgs = nil
	for _, m := range s.msgs {
		m2 := *m
		m2.out, m2.until = false, 0
		c.msgs = append(c.msgs, &m2)
	}
	c.ids, c.letters = maps.Clone(s.ids), maps.Clone(s.letters)
	c.forget()
	return &c
}

// forget is what a restart does to the duplicate window: it is made again from the messages that are there.
func (s *stream) forget() {
	clear(s.ids)
	for _, m := range s.msgs {
		s.ids[m.id] = m.seq
	}
}

func (s *stream) restart() {
	s.forget()
	for _, m := range s.msgs {
		m.out, m.until = false, 0
	}
}

// lose takes the last messages away, and their sequences are handed out again.
func (s *stream) lose(n int) {
	s.msgs = s.msgs[:max(len(s.msgs)-n, 0)]
	s.last = 0
	if k := len(s.msgs); k > 0 {
		s.last = s.msgs[k-1].seq
	}
	s.restart()
}

// recreate is a stream that was deleted and made again.
func (s *stream) recreate() {
	s.created++
	s.last, s.msgs = 0, nil
	clear(s.ids)
}

// store answers a publish: the sequence, and whether the id was there before.
func (s *stream) store(p *parcel) (seq int, duplicate bool) {
	if seq, ok := s.ids[p.id]; ok {
		return seq, true
	}
	s.last++
	m := &message{seq: s.last, id: p.id, task: p.id.task, uid: p.id.uid, generation: p.id.generation}
	s.msgs = append(s.msgs, m)
	s.ids[p.id] = m.seq
	return m.seq, false
}

// waiting is the index of the next message that the consumer would deliver, or -1.
func (s *stream) waiting(now int) int {
	for i, m := range s.msgs {
		if m.until <= now {
			return i
		}
	}
	return -1
}

func (s *stream) find(seq int) *message {
	for _, m := range s.msgs {
		if m.seq == seq {
			return m
		}
	}
	return nil
}

// ack removes a message. An answer names a sequence and nothing else, so one that comes late may hit a message that a
// stream made anew has given the same sequence.
func (s *stream) ack(seq int) {
	for i, m := range s.msgs {
		if m.seq == seq && m.out {
			s.msgs = append(s.msgs[:i:i], s.msgs[i+1:]...)
			return
		}
	}
}

func (s *stream) nak(seq, until int) {
	if m := s.find(seq); m != nil && m.out {
		m.out, m.until = false, until
	}
}

// goneUpTo: the lane has no message up to the sequence.
func (s *stream) goneUpTo(seq int) bool { return len(s.msgs) == 0 || s.msgs[0].seq > seq }
