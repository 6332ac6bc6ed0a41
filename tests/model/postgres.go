package model

import "maps"

const none = -1 // SQL's NULL, for instants

type status uint8

const (
	pending status = iota
	running
	retrying
	succeeded
	dead
	cancelled
)

var statusNames = [...]string{"pending", "running", "retrying", "succeeded", "dead", "cancelled"}

func (s status) String() string { return statusNames[s] }
func (s status) final() bool    { return s >= succeeded }

type row struct {
	id, uid    int // uid is created_at: two rows of one id differ in it
	xid        int
	runAt      int
	status     status
	compensate bool // phase
	generation int
	attempt    int
	looks      int
	owner      int
	token      int
	leaseUntil int
	nextAt     int
	listAt     int // republish_at
	cancel     bool
	lettered   bool
}

func (r *row) due() int {
	if r.nextAt != none {
		return r.nextAt
	}
	return r.runAt // none is before every instant
}

// A snapshot is a pg_snapshot: xip holds a bit for each transaction in progress.
type snapshot struct {
	xmax int
	xip  uint64
}

func (s snapshot) sees(xid int) bool { return xid < s.xmax && s.xip>>xid&1 == 0 }

type position struct {
	snapshot
	at int
}

var origin = position{snapshot{xmax: 1}, none}

// covers: the rounds up to this position have read the row.
func (p position) covers(r *row) bool { return p.sees(r.xid) && r.runAt <= p.at }

// A key is a page key: the part (0 fresh, 1 due), then (xid, id) or (run_at, id).
type key struct{ part, a, b int }

var firstKey = key{0, 0, none}

func (k key) before(o key) bool {
	if k.part != o.part {
		return k.part < o.part
	}
	if k.a != o.a {
		return k.a < o.a
	}
	return k.b < o.b
}

// A round is an open one: where it goes to, and behind which row it goes on.
type round struct {
	target      position
	read, acked key
	last        bool
}

type mark struct {
	position
	seq int
}

// laneRow is the row of table lane.
type laneRow struct {
	owner, until, fence int
	pos, low            position
	round               *round
	mark                *mark
	seq, losses         int
}

type transaction struct {
	xid  int
	rows []*row
}

type logged struct {
	uid     int
	outcome string
}

// database is what survives a crash of Postgres, and what a standby has a copy of.
type database struct {
	nextID  int
	nextXID int
	flushed int // the next transaction id as the WAL on disk knows it
	open    []*transaction
	rows    map[int]*row
	log     map[int]logged // task_attempt, by token
	purges  map[int]int    // letter_purge: letters of a task below a generation are to be deleted

	lane          laneRow
	incarnation   int // 0: emptied by a recovery
	losses        int
	streamCreated int
}

func newDatabase() *database {
	return &database{nextID: 1, nextXID: 2, flushed: 2, rows: map[int]*row{}, log: map[int]logged{}, purges: map[int]int{},
		lane: laneRow{pos: origin, low: origin, until: none}}
}

// copy is what a standby has got: committed rows only, for transactions end with their server.
func (d *database) copy() *database {
	c := *d
	c.open = nil
	c.rows = make(map[int]*row, len(d.rows))
	for id, r := range d.rows {
		r2 := *r
		c.rows[id] = &r2
	}
	c.log, c.purges = maps.Clone(d.log), maps.Clone(d.purges)
	c.lane = copyLane(d.lane)
	return &c
}

func copyLane(l laneRow) laneRow {
	if l.round != nil {
		r := *l.round
		l.round = &r
	}
	if l.mark != nil {
		m := *l.mark
		l.mark = &m
	}
	return l
}

// wrote: a commit flushes the WAL up to itself, so transaction ids handed out by now are not handed out again.
func (d *database) wrote() { d.flushed = d.nextXID }

func (d *database) now() snapshot {
	s := snapshot{xmax: d.nextXID}
	for _, t := range d.open {
		s.xip |= 1 << t.xid
	}
	return s
}

// crash is kill -9 of the server, or of one backend.
func (d *database) crash() {
	d.open = nil
	d.nextXID = d.flushed
	d.incarnation = 0
}

// begin inserts rows in a transaction that stays open.
func (w *world) begin(n, runAt int) {
	d := w.db
	t := &transaction{xid: d.nextXID}
	d.nextXID++
	for range n {
		w.uids++
		t.rows = append(t.rows, &row{id: d.nextID, uid: w.uids, xid: t.xid, runAt: runAt, nextAt: none, listAt: none, leaseUntil: none})
		d.nextID++
	}
	d.open = append(d.open, t)
}

func (w *world) commit(i int, good bool) {
	d := w.db
	t := d.open[i]
	d.open = append(d.open[:i:i], d.open[i+1:]...)
	if !good {
		return // and nothing flushes that its transaction id was used
	}
	for _, r := range t.rows {
		d.rows[r.id] = r
	}
	d.wrote()
}

// each goes in the order of ids: a map's order would be chance that no seed repeats.
func (d *database) each(f func(*row)) {
	for id := 1; id < d.nextID; id++ {
		if r := d.rows[id]; r != nil {
			f(r)
		}
	}
}

// readPage is readSQL for one lane: the next rows behind the key, fresh ones first.
func (d *database) readPage(from position, rd round, limit int) (rows []*row, keys []key) {
	d.each(func(r *row) {
		if r.status != pending || r.generation != 0 || !rd.target.covers(r) {
			return
		}
		k := key{0, r.xid, r.id}
		switch {
		case !from.sees(r.xid):
		case r.runAt > from.at:
			k = key{1, r.runAt, r.id}
		default:
			return
		}
		if rd.read.before(k) {
			rows, keys = append(rows, r), append(keys, k)
		}
	})
	for i := range keys { // insertion sort: they are few
		for j := i; j > 0 && keys[j].before(keys[j-1]); j-- {
			keys[j], keys[j-1] = keys[j-1], keys[j]
			rows[j], rows[j-1] = rows[j-1], rows[j]
		}
	}
	if len(rows) > limit {
		rows, keys = rows[:limit], keys[:limit]
	}
	return rows, keys
}

// claim is claimSQL for one message. was is the row as it was, when it was claimed.
func (w *world) claim(m *message, token, worker int) (r *row, was row, ok bool) {
	r = w.db.rows[m.task]
	if r == nil {
		return nil, was, false
	}
	mine := r.status == running && r.token == token
	switch {
	case r.generation != m.generation && !w.without.generation,
		r.uid != m.uid && !w.without.created,
		r.due() > w.now && !w.without.due,
		r.status.final(),
		r.status == running && !mine && r.leaseUntil >= w.now && !w.without.lease:
		return r, was, false
	}
	was = *r
	if was.status == running && !mine {
		w.logOnce(was.token, was.uid, "lost")
	}
	w.db.wrote()
	if r.cancel {
		r.status, r.owner, r.token, r.leaseUntil, r.nextAt, r.listAt = cancelled, 0, 0, none, none, none
		return r, was, true
	}
	if !mine {
		r.attempt++
	}
	if was.due() > w.now {
		w.violated("early", "task %d is claimed at %d and due at %d", r.uid, w.now, was.due())
	}
	r.status, r.owner, r.token, r.leaseUntil, r.nextAt = running, worker, token, w.now+lease, none
	if r.listAt != none {
		r.listAt = w.now + lease + lookAgain
	}
	return r, was, true
}

func (w *world) logOnce(token, uid int, outcome string) {
	if _, ok := w.db.log[token]; !ok {
		w.db.log[token] = logged{uid, outcome}
	}
}

// settle is settleSQL for one attempt. It returns what it did, "" for nothing.
func (w *world) settle(s *settlement) string {
	r := w.db.rows[s.msg.task]
	if r == nil || r.status != running || r.token != s.token && !w.without.fence {
		return ""
	}
	if r.token != s.token {
		w.violated("stale", "the result of lease %d changes task %d, which runs under lease %d", s.token, r.uid, r.token)
	}
	act := s.action
	if r.cancel && (act == "nak" || act == "handback") {
		act = "cancelled"
	}
	if s.outcome != "" {
		w.logOnce(s.token, r.uid, s.outcome)
	}
	w.db.wrote()
	r.owner, r.token, r.leaseUntil, r.nextAt = 0, 0, none, none
	if !s.counted && act != "compensate" {
		r.attempt--
	}
	due := w.now + s.delay
	switch act {
	case "succeeded":
		r.status, r.listAt, r.lettered = succeeded, none, false
	case "dead":
		r.status, r.listAt, r.lettered = dead, none, false
	case "cancelled":
		r.status, r.listAt, r.lettered = cancelled, none, false
	case "compensate":
		r.status, r.compensate, r.attempt, r.cancel = pending, true, 0, false
		r.generation, r.looks, r.nextAt, r.listAt = r.generation+1, 0, due, due
	case "handback":
		r.status = retrying
		r.generation, r.looks, r.nextAt, r.listAt = r.generation+1, 0, due, due
	case "nak":
		r.status, r.nextAt = retrying, due
		if r.listAt != none {
			r.listAt = max(due, min(r.listAt, due+lookAgain))
		}
	}
	return act
}

// heartbeat is heartbeatSQL for one lease.
func (w *world) heartbeat(task, token int) bool {
	r := w.db.rows[task]
	if r == nil || r.status != running || r.token != token && !w.without.fence {
		return false
	}
	r.leaseUntil = w.now + lease
	w.db.wrote()
	return true
}

// handBackEarly is handBackEarlySQL.
func (w *world) handBackEarly(m *message) bool {
	r := w.db.rows[m.task]
	if r == nil || r.generation != m.generation || r.uid != m.uid || r.status != pending && r.status != retrying || r.due() <= w.now {
		return false
	}
	due := r.due()
	r.generation, r.looks, r.nextAt, r.listAt = r.generation+1, 0, due, due
	w.db.wrote()
	return true
}

// operate is what a person does: cancel, requeue, run now or later.
func (w *world) operate(id int, act string) {
	r := w.db.rows[id]
	w.db.wrote()
	switch {
	case act == "cancel" && r.status == running:
		r.cancel = true
	case act == "cancel":
		if r.lettered {
			w.db.purges[r.uid], r.lettered = r.generation+1, false
		}
		r.status, r.generation, r.looks, r.nextAt, r.listAt = cancelled, r.generation+1, 0, none, none
	case act == "requeue":
		r.lettered = r.lettered || r.status == dead
		r.status, r.compensate, r.attempt, r.cancel = pending, false, 0, false
		r.generation, r.looks, r.nextAt, r.listAt = r.generation+1, 0, w.now, w.now
	case act == "move":
		due := w.now + 2
		r.generation, r.looks, r.nextAt, r.listAt = r.generation+1, 0, due, due
	}
}
