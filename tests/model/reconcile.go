package model

// seen is what a relay has read of the stream, before it reads the table.
type seen struct{ created, last int }

func (w *world) restartLow(r *relay, l *lane) {
	if l.losses < r.losses {
		l.low, l.seq, l.losses = origin, 0, r.losses
		l.mark = &mark{position: l.pos}
		l.dirty = true
	}
}

// rescan is rescanSQL, from low-water to a mark that was seen to be clear.
func (w *world) rescan(r *relay) {
	l := r.lane
	m := *l.clear
	l.clear = nil
	wide := l.low == origin
	put := false
	w.db.each(func(t *row) {
		if !m.covers(t) || l.low.covers(t) || t.status.final() {
			return
		}
		due := max(w.now, t.nextAt)
		if t.listAt != none && !(wide && t.listAt > due) {
			return
		}
		if t.status == running && t.leaseUntil >= w.now {
			due = t.leaseUntil
		}
		t.listAt, put = due, true
		t.looks++
	})
	w.db.wrote()
	l.low, l.mark = m.position, nil
	l.dirty = l.dirty || put || m.seq > 0
}

// checkLoss compares what was seen of the stream with what the table knows.
func (w *world) checkLoss(r *relay) {
	s, d := *r.seen, w.db
	r.seen = nil
	rewound := r.rewound || d.lane.losses == d.losses && d.lane.seq > max(s.last, w.stream.last)
	if d.streamCreated == s.created && !rewound {
		return
	}
	if d.losses == r.losses && (d.streamCreated != s.created || rewound) {
		d.losses++
		d.streamCreated = s.created
		d.wrote()
	}
	r.losses = d.losses
	r.rewound, r.highest = false, 0
	if r.lane != nil {
		w.restartLow(r, r.lane)
	}
}
