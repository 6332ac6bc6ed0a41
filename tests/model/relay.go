package model

// A parcel is a message on its way to the stream: of a page, or of a look at the work list.
type parcel struct {
	id      messageID
	lane    *lane
	page    *page
	look    *look
	unsent  bool // the old dead letter of a requeued row is to be deleted first
	highest int
}

type answer struct {
	*parcel
	seq       int
	duplicate bool
	unknown   bool
}

// A look is a row taken from the work list; guard is the republish_at that the take wrote.
type look struct{ task, generation, guard int }

type page struct {
	end  key
	last bool
	left int
}

// lane is what a relay has in memory of the lane it holds.
type lane struct {
	fence, until int
	pos, low     position
	round        *round
	pages        []*page
	mark         *mark
	clear        *mark // a mark that was seen to be clear, not scanned yet
	seq, losses  int
	dirty        bool
	dropped      bool
}

// A turn is a poll between its two statements: the target is taken, the page not yet read.
type turn struct {
	lane *lane
	from position
	rd   round
}

// A save is a position between its copy from memory and its statement.
type save struct {
	lane        *lane
	incarnation int
	row         laneRow
}

type relay struct {
	name        int // a process that starts has a new one; 0: not running
	sleeps      int // until
	incarnation int
	losses      int
	rewound     bool
	highest     int
	lane        *lane
	turn        *turn
	save        *save
	parcels     []*parcel
	answers     []answer
	confirm     []look
	giveUp      []look
	seen        *seen
	letter      *letterJob
}

func (r *relay) drop() {
	if r.lane != nil {
		r.lane.dropped = true
		r.lane = nil
	}
}

// relaySteps lists what relay i could do next.
func (w *world) relaySteps(i int, add func(op, int)) {
	r, d := w.relays[i], w.db
	if r.name == 0 || r.sleeps > w.now {
		return
	}
	l := r.lane
	held := l != nil && w.now <= l.until
	if r.incarnation == 0 {
		add(opEnter, 0)
	} else if l == nil && (d.lane.owner == 0 || d.lane.until < w.now) {
		add(opTake, 0)
	}
	switch {
	case r.turn != nil:
		add(opRead, 0)
	case r.incarnation == 0:
	case d.incarnation != r.incarnation && !w.without.incarnation:
		add(opPoll, 0)
	case held && len(l.pages) < 2 && (l.round == nil || !l.round.last) &&
		(l.round != nil || d.now() != l.pos.snapshot || w.now > l.pos.at):
		add(opPoll, 0)
	}
	if len(r.parcels) > 0 {
		add(opSend, 0)
	}
	if len(r.answers) > 0 {
		add(opAnswered, 0)
	}
	if r.save != nil {
		add(opSave, 0)
	} else if l != nil && l.dirty {
		add(opCopy, 0)
	}
	if l != nil && l.until-w.now < laneLease/2 {
		add(opRenew, 0)
	}
	if held && w.listDue() {
		add(opList, 0)
	}
	if len(r.confirm)+len(r.giveUp) > 0 {
		add(opLooks, 0)
	}
	switch {
	case r.letter == nil:
		if l != nil && d.letterDue() != nil {
			add(opDead, 0)
		}
		if len(d.purges) > 0 {
			add(opPurge, 0)
		}
	case r.letter.moved:
		add(opRetract, 0)
	case r.letter.seq == 0:
		add(opLetter, 0)
	default:
		add(opLettered, 0)
	}
	if !w.reconciles {
		return
	}
	switch {
	case l == nil:
	case l.clear != nil:
		add(opRescan, 0)
	case l.mark != nil && (l.mark.seq == 0 || w.stream.goneUpTo(l.mark.seq)):
		add(opClear, 0)
	case l.mark == nil && l.pos != l.low:
		add(opMark, 0)
	}
	switch {
	case r.seen != nil:
		add(opLoss, 0)
	case d.streamCreated != w.stream.created || r.rewound || d.lane.losses == d.losses && d.lane.seq > w.stream.last:
		add(opSeen, 0)
	}
	if r.losses != d.losses {
		add(opSettings, 0)
	}
}

func (w *world) listDue() (due bool) {
	w.db.each(func(r *row) { due = due || r.listAt != none && r.listAt <= w.now })
	return due
}

// enter is enterIncarnation, and what a relay reads at its start.
func (w *world) enter(r *relay) {
	if w.db.incarnation == 0 {
		w.incarnations++
		w.db.incarnation = w.incarnations
	}
	r.drop()
	r.incarnation = w.db.incarnation
	w.readSettings(r)
	if w.db.streamCreated == 0 {
		w.db.streamCreated = w.stream.created
	}
}

func (w *world) readSettings(r *relay) {
	if w.db.losses > r.losses {
		r.rewound, r.highest = false, 0
	}
	r.losses = w.db.losses
}

// take is takeSQL.
func (w *world) take(r *relay) {
	d := w.db
	if d.incarnation != r.incarnation && !w.without.incarnation {
		return // no row; the next poll says why
	}
	d.lane.owner, d.lane.until = r.name, w.now+laneLease
	d.lane.fence++
	d.wrote()
	c := copyLane(d.lane)
	l := &lane{fence: c.fence, until: c.until, pos: c.pos, low: c.low, round: c.round, mark: c.mark, seq: c.seq, losses: c.losses}
	if l.round != nil {
		l.round.read, l.round.last = l.round.acked, false
	}
	w.restartLow(r, l)
	r.lane = l
}

// poll takes a target at what Postgres's clock says; it tells whether positions in memory still describe this database.
func (w *world) poll(r *relay, clock int) {
	if w.db.incarnation != r.incarnation && !w.without.incarnation {
		r.drop()
		r.incarnation = 0
		return
	}
	l := r.lane
	if l == nil {
		return
	}
	t := &turn{lane: l, from: l.pos}
	if l.round != nil {
		t.rd = *l.round
	} else {
		t.rd = round{target: position{w.db.now(), max(clock, l.pos.at)}, read: firstKey, acked: firstKey}
	}
	r.turn = t
}

func (w *world) read(r *relay) {
	t := r.turn
	r.turn = nil
	rows, keys := w.db.readPage(t.from, t.rd, pageSize)
	l := t.lane
	if l.dropped {
		return
	}
	if l.round == nil {
		rd := t.rd
		l.round = &rd
	}
	rd := l.round
	p := &page{end: rd.read, last: len(rows) < pageSize, left: len(rows)}
	if n := len(rows); n > 0 {
		p.end = keys[n-1]
	}
	rd.read, rd.last = p.end, p.last
	l.pages = append(l.pages, p)
	for _, row := range rows {
		r.parcels = append(r.parcels, &parcel{lane: l, page: p, id: messageID{row.id, row.uid, row.generation, row.looks}})
	}
	l.advance(p.left > 0)
}

func (l *lane) advance(moved bool) {
	if l.dropped {
		return
	}
	for len(l.pages) > 0 && l.pages[0].left == 0 {
		p := l.pages[0]
		l.pages = l.pages[1:]
		if p.last {
			l.pos, l.round = l.round.target, nil
		} else {
			l.round.acked = p.end
		}
		l.dirty = l.dirty || moved
	}
}

// How the network treats a publish.
const (
	arrives = iota
	isLost
	answerIsLost
)

func (w *world) send(r *relay, how int) {
	p := r.parcels[0]
	if p.unsent {
		p.unsent = false
		if l, ok := w.stream.letters[p.id.uid]; ok && l.generation < p.id.generation {
			delete(w.stream.letters, p.id.uid)
		}
		return
	}
	r.parcels = r.parcels[1:]
	p.highest = r.highest
	a := answer{parcel: p, unknown: how != arrives}
	if how != isLost {
		a.seq, a.duplicate = w.stream.store(p)
	}
	r.answers = append(r.answers, a)
}

func (w *world) answered(r *relay) {
	a := r.answers[0]
	r.answers = r.answers[1:]
	if a.unknown {
		switch {
		case a.look != nil:
			r.giveUp = append(r.giveUp, *a.look)
		case !a.lane.dropped:
			r.parcels = append(r.parcels, a.parcel)
		}
		return
	}
	l := a.lane
	before := a.highest
	if a.look != nil {
		before = 0
		l = r.lane
		r.confirm = append(r.confirm, *a.look)
	}
	if l != nil {
		l.seq = max(l.seq, a.seq)
		if !a.duplicate {
			r.rewound = r.rewound || a.seq <= before
			r.highest = max(r.highest, a.seq)
		}
		if a.look != nil {
			l.dirty = true
		}
	}
	if a.page != nil {
		a.page.left--
		a.lane.advance(true)
	}
}

// copyPosition is the first half of savePositions.
func (w *world) copyPosition(r *relay) {
	l := r.lane
	s := &save{lane: l, incarnation: r.incarnation, row: copyLane(laneRow{pos: l.pos, low: l.low, mark: l.mark, round: l.round, seq: l.seq, losses: l.losses})}
	if w.without.saved && l.round != nil && l.round.last {
		s.row.pos, s.row.round = l.round.target, nil
	}
	l.dirty = false
	r.save = s
}

// savePosition is saveSQL.
func (w *world) savePosition(r *relay) {
	s, d := r.save, w.db
	r.save = nil
	if d.lane.owner != r.name || d.lane.fence != s.lane.fence || d.incarnation != s.incarnation && !w.without.incarnation {
		if r.lane == s.lane {
			r.drop()
		}
		return
	}
	s.row.owner, s.row.until, s.row.fence = d.lane.owner, d.lane.until, d.lane.fence
	d.lane = s.row
	d.wrote()
}

func (w *world) renew(r *relay) {
	d := w.db
	if d.lane.owner != r.name || d.lane.fence != r.lane.fence {
		r.drop()
		return
	}
	d.lane.until, r.lane.until = w.now+laneLease, w.now+laneLease
	d.wrote()
}

// takeList is takeListSQL.
func (w *world) takeList(r *relay) {
	n := 0
	w.db.each(func(t *row) {
		if t.listAt == none || t.listAt > w.now || n == pageSize {
			return
		}
		n++
		live := t.status == running && t.leaseUntil >= w.now
		switch {
		case t.status.final():
			t.listAt = none
			return
		case live:
			t.listAt = t.leaseUntil + 2
			return
		case t.due() > w.now:
			t.listAt = t.due()
			return
		}
		t.listAt = w.now + guardAhead
		r.parcels = append(r.parcels, &parcel{id: messageID{t.id, t.uid, t.generation, t.looks}, unsent: t.lettered,
			look: &look{t.id, t.generation, t.listAt}})
	})
	w.db.wrote()
}

// endLooks is confirmListSQL and giveUpListSQL.
func (w *world) endLooks(r *relay) {
	find := func(k look) *row {
		t := w.db.rows[k.task]
		if t == nil || t.generation != k.generation || t.listAt != k.guard && !w.without.guard {
			return nil
		}
		if t.listAt != k.guard {
			w.violated("late look", "a look of %d at task %d changes an entry of the work list that was written later", k.guard, t.uid)
		}
		return t
	}
	for _, k := range r.confirm {
		if t := find(k); t != nil {
			t.listAt = w.now + lookAgain<<min(t.looks, 2)
			t.looks++
			t.lettered = false
		}
	}
	for _, k := range r.giveUp {
		if t := find(k); t != nil {
			t.listAt = w.now
		}
	}
	r.confirm, r.giveUp = nil, nil
	w.db.wrote()
}
