package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/taskrelay/taskrelay/internal/pg"
)

const (
	pagesInFlight = 4        // of one lane; reading goes on while they are acknowledged
	readBytes     = 32 << 20 // of payloads in one read; what is beyond is read again
	waitFirst     = 25 * time.Millisecond
	waitLongest   = time.Second
)

// A parcel is a message of a page on its way to the stream.
type parcel struct {
	lane    *lane
	page    *page
	rec     *record
	resent  bool   // it is one of the lane's burst
	highest uint64 // sequence known when it was sent
	refusal error  // the server's answer, when it refused this message
	passed  int64  // how many messages the relay had published at that time
}

var errNATSAway = errors.New("NATS is not connected, tasks wait in the table")

// readLanes publishes one page of every lane that has news. It returns how long to wait for the next turn.
func (r *Relay) readLanes(ctx context.Context) (time.Duration, error) {
	if !r.nc.IsConnected() {
		return r.cfg.PollMax, errNATSAway
	}
	if r.halted() {
		return listTick, nil // Ready says why
	}
	began := time.Now()
	r.resend(began)
	busy, more, err := r.readPages(ctx)
	r.meter.polled(busy, err, r.pollTook)
	if err != nil {
		if errors.Is(err, errOtherIncarnation) {
			r.log.Warn().Msg(err.Error())
			return 0, r.enterIncarnation(ctx)
		}
		return 0, err
	}
	if more {
		return 0, nil
	}
	wait := r.cfg.PollMax
	if busy {
		wait = r.cfg.PollMin
	}
	r.pace.note(r.pollTook)
	cost := r.pace.cost()
	r.rest(ctx, cost, max(4*cost, wait-time.Since(began)))
	return 0, nil
}

// rest waits at least the first time and, unless a producer says that there is something, the second.
// Without the first, hints from many producers would make the relay poll without pause. [Undebounced hints cost
// unthrottled producers 45 % of their rate.]
func (r *Relay) rest(ctx context.Context, atLeast, atMost time.Duration) {
	t := time.NewTimer(atLeast)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return
	case <-t.C:
	}
	t.Reset(max(atMost-atLeast, 0))
	select {
	case <-ctx.Done():
	case <-t.C:
	case <-r.wake:
	}
}

// readPages takes a target, reads a page of each lane and publishes it. busy: something was read; more: some lane has
// further pages that can be read at once.
func (r *Relay) readPages(ctx context.Context) (busy, more bool, err error) {
	began := time.Now()
	target, err := r.takeTarget(ctx)
	r.pollTook = time.Since(began) // in Postgres alone: publishing may take long, and is no reason to read less often
	if err != nil {
		return false, false, err
	}
	if r.nothingNew(target) {
		r.noteRead()
		return false, false, nil
	}
	lanes := r.readable(target)
	if len(lanes) == 0 {
		r.noteRead()
		return false, false, nil
	}
	pages, err := r.readRows(ctx, lanes)
	r.pollTook = time.Since(began)
	if err != nil {
		return false, false, err
	}
	r.noteRead()

	parcels := pack(lanes, pages.rows) // before the lock: answers need it at the same time
	var out []*parcel
	r.mu.Lock()
	for i, rows := range pages.rows {
		l := lanes[i].lane
		if l.dropped || pages.cut >= 0 && i > pages.cut {
			continue // not read whole: its round and key stay as they are
		}
		if l.round == nil {
			l.round = &round{target: lanes[i].round.target, read: lanes[i].round.read, acked: lanes[i].round.read}
		}
		rd := l.round
		p := &page{end: rd.read, last: len(rows) < lanes[i].limit && i != pages.cut, left: len(rows)}
		if n := len(rows); n > 0 {
			p.end = rows[n-1].keyAfter(rd.read, snapshotMax(rd.target.snapshot))
			l.rowBytes = sizeOf(rows) / n
			r.spend(l.bizType, n)
			busy = true
		}
		rd.read, rd.last = p.end, p.last
		l.pages = append(l.pages, p)
		r.meter.sent(l, p, rows, target)
		for _, c := range parcels[i] {
			c.page, c.highest = p, r.highest
		}
		out = append(out, parcels[i]...)
		r.advance(l, p.left > 0)
		more = more || l.round != nil && !l.round.last && len(l.pages) < pagesInFlight
	}
	r.mu.Unlock()
	r.send(out)
	if !busy {
		err = r.noteCalm(ctx, target)
	}
	return busy, more, err
}

// takeTarget also checks that Postgres is still the one our positions describe.
func (r *Relay) takeTarget(ctx context.Context) (position, error) {
	var p position
	var incarnation *string
	var standby bool
	// Alone and without settings: it runs at every poll, and one statement is its own transaction at any level.
	err := r.withPatience(ctx, targetSQL, queryTimeout, func(ctx context.Context) error {
		return r.pool.QueryRow(ctx, r.cfg.Schema.Render(targetSQL)).Scan(&p.snapshot, &p.at, &incarnation, &standby)
	})
	if pg.Code(err) == "0A000" {
		return p, errOtherIncarnation // an unlogged table cannot be read in recovery
	}
	if err != nil {
		return p, fmt.Errorf("take target: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if standby || incarnation == nil || *incarnation != r.incarnation {
		return p, errOtherIncarnation
	}
	return p, nil
}

// A laneRead is what readRows needs of a lane, copied under the lock.
type laneRead struct {
	lane  *lane
	from  position
	round round
	limit int
}

// readable lists the lanes that may be read now, high before low: ours, not waiting, not paused, with room in flight.
func (r *Relay) readable(target position) []laneRead {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	var reads []laneRead
	busy := 1
	for _, l := range r.lanes {
		if l.round != nil {
			busy++
		}
	}
	for _, l := range r.lanes {
		switch {
		case now.After(l.until), l.leaving > 0, !l.waitUntil.IsZero(), len(l.again) > 0, len(l.pages) >= pagesInFlight,
			l.round != nil && l.round.last, !r.settings.mayPublish(l.laneKey), r.mayRead(l.bizType, now) < 1:
			continue
		}
		lr := laneRead{lane: l, from: l.pos, limit: min(r.cfg.Batch, r.mayRead(l.bizType, now))}
		if l.rowBytes > 0 { // large payloads must neither fill the memory nor keep the lanes behind from being read
			lr.limit = min(lr.limit, max(readBytes/busy/l.rowBytes, 1))
		}
		if l.round != nil {
			lr.round = *l.round
		} else {
			lr.round = round{target: position{snapshot: target.snapshot, at: later(target.at, l.pos.at)}, read: firstKey(l.pos)}
		}
		reads = append(reads, lr)
	}
	slices.SortFunc(reads, func(a, b laneRead) int {
		if c := strings.Compare(a.lane.priority, b.lane.priority); c != 0 { // "high" sorts before "low"
			return c
		}
		return strings.Compare(a.lane.bizType, b.lane.bizType)
	})
	return reads
}

type pagesRead struct {
	rows [][]pageRow
	cut  int // index of the lane at which reading stopped because of size, or -1
}

func (r *Relay) readRows(ctx context.Context, reads []laneRead) (pagesRead, error) {
	n := len(reads)
	types, priorities := make([]string, n), make([]string, n)
	s, s2, kx := make([]string, n), make([]string, n), make([]string, n)
	t2, kr := make([]pgtype.Timestamptz, n), make([]pgtype.Timestamptz, n)
	ki, kri, limit := make([]int64, n), make([]int64, n), make([]int32, n)
	for i, l := range reads {
		types[i], priorities[i] = l.lane.bizType, l.lane.priority
		s[i], s2[i], t2[i] = l.from.snapshot, l.round.target.snapshot, l.round.target.at
		kx[i], ki[i], kr[i], kri[i] = l.round.read.xid, l.round.read.id, l.round.read.runAt, l.round.read.runID
		limit[i] = int32(l.limit)
	}
	got := pagesRead{rows: make([][]pageRow, n), cut: -1}
	var size int
	scan := func(rows pgx.Rows) error {
		if size > readBytes {
			return nil
		}
		var i int
		var row pageRow
		if err := rows.Scan(&i, &row.part, &row.id, &row.xid, &row.runAt, &row.created, &row.bizID, &row.headers, &row.payload); err != nil {
			return err
		}
		i--
		row.bizType, row.priority, row.phase = types[i], priorities[i], PhaseExecute
		got.rows[i] = append(got.rows[i], row)
		if size += len(row.payload) + headerOverhead; size > readBytes {
			got.cut = i
		}
		return nil
	}
	// A statement walks past rows that are not to be published, such as millions scheduled by one transaction: it may take
	// longer in the end than any other.
	args := []any{types, priorities, s, s2, t2, kx, ki, kr, kri, limit}
	err := r.withPatience(ctx, readSQL, longestRead, func(ctx context.Context) error {
		return pg.QueryCached(ctx, r.pool, r.cfg.Schema.Render(readSQL), args, scan)
	})
	if err != nil {
		return got, fmt.Errorf("read lanes: %w", err)
	}
	return got, nil
}

func sizeOf(rows []pageRow) (n int) {
	for i := range rows {
		n += len(rows[i].payload) + headerOverhead
	}
	return n
}

// pack makes a parcel of each row. One that waits keeps its whole page in memory, which pagesInFlight and readBytes bound.
func pack(lanes []laneRead, pages [][]pageRow) [][]*parcel {
	parcels := make([][]*parcel, len(pages))
	for i, rows := range pages {
		all := make([]parcel, len(rows))
		parcels[i] = make([]*parcel, len(rows))
		for j := range rows {
			all[j] = parcel{lane: lanes[i].lane, rec: &rows[j].record}
			parcels[i][j] = &all[j]
		}
	}
	return parcels
}

// send publishes parcels.
func (r *Relay) send(parcels []*parcel) {
	if len(parcels) == 0 {
		return
	}
	e := envelopes.Get().(*envelope)
	dropped := 0
	for _, p := range parcels {
		m, n := r.message(e, p.rec)
		if !p.resent {
			dropped += n
		}
		id := messageID(r.installation, p.rec.id, p.rec.created.UnixMicro(), p.rec.generation, p.rec.looks)
		r.pub.publish(m, r.names.Stream(), id, func(res published) { r.answered(p, res) })
	}
	envelopes.Put(e)
	if dropped > 0 {
		r.mu.Lock()
		r.counts.DroppedHeaders += int64(dropped)
		r.mu.Unlock()
	}
}

// answered takes the stream's answer to a parcel of a page.
func (r *Relay) answered(p *parcel, res published) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := p.lane
	if p.resent {
		p.resent = false
		l.resent--
	}
	l.tally.answered(res)
	switch res.verdict {
	case acked:
		r.counts.Published++
		if res.duplicate {
			r.counts.Duplicates++
		}
		r.noteSequence(l, res.sequence, p.highest, res.duplicate)
		l.waitUntil, l.waitStep, l.trouble = time.Time{}, 0, nil
		p.page.left--
		r.advance(l, true)
	case oversize:
		p.refusal = res.err
		r.refusals = append(r.refusals, p)
	case refused:
		// One row is refused for good only if others pass; else it is the stream that is at fault.
		if tooLarge(res.err) || p.refusal != nil && r.counts.Published > p.passed {
			p.refusal = r.sized(res.err, p.rec)
			r.refusals = append(r.refusals, p)
			return
		}
		p.refusal, p.passed = res.err, r.counts.Published
		r.hold(l, p, res.err)
	default:
		r.hold(l, p, res.err)
	}
}

// hold keeps a parcel to be published again.
func (r *Relay) hold(l *lane, p *parcel, err error) {
	if l.dropped {
		return
	}
	l.again = append(l.again, p)
	r.wait(l, err)
}

// wait lets a lane that could not take a message rest, longer each time it is in vain; r.mu is held.
func (r *Relay) wait(l *lane, err error) {
	l.burst, l.listLimit = 1, 1
	now := time.Now()
	if now.Before(l.waitUntil) {
		return // of the same wave
	}
	if !full(err) { // a full lane is ordinary: its workers are slower than its producers
		l.trouble = err
	}
	l.waitStep = min(max(2*l.waitStep, waitFirst), waitLongest)
	if errors.Is(err, errNoAnswer) { // after so long Ready is to tell. [A full disk of NATS: red after 38 s without this.]
		l.waitStep = waitLongest
	}
	l.waitUntil = now.Add(l.waitStep)
	if (l.waitStep == waitLongest || !full(err)) && l.notice.due(now) {
		r.log.Warn().Err(err).Str("biz_type", l.bizType).Str("priority", l.priority).Dur("delay", l.waitStep).
			Msg("lane waits, its tasks stay in the table")
	}
}

// resend publishes again what lanes could not take, once their wait is over: one parcel, and as long as all are
// accepted twice as many each time. [A lane that its workers keep full has room for a few; all at once would be
// 2,000 publishes for each few, 40 times a second.]
func (r *Relay) resend(now time.Time) {
	var parcels []*parcel
	r.mu.Lock()
	for _, l := range r.lanes {
		if now.After(l.until) || l.resent > 0 || now.Before(l.waitUntil) || !r.settings.mayPublish(l.laneKey) {
			continue
		}
		if len(l.again) == 0 {
			l.waitUntil = time.Time{}
			continue
		}
		n := min(max(l.burst, 1), len(l.again))
		for _, p := range l.again[:n] {
			p.resent, p.highest = true, r.highest
		}
		parcels = append(parcels, l.again[:n]...)
		l.again, l.resent, l.burst = l.again[n:], n, 2*n
		if len(l.again) == 0 {
			l.again = nil
		}
	}
	r.mu.Unlock()
	r.send(parcels)
}

// advance moves a lane over the pages that are acknowledged whole; r.mu is held. moved: something was published, so
// the position is worth saving; a lane without news need not be.
func (r *Relay) advance(l *lane, moved bool) {
	if l.dropped {
		return
	}
	for len(l.pages) > 0 && l.pages[0].left == 0 {
		p := l.pages[0]
		l.pages = l.pages[1:]
		r.meter.stored(l, p)
		if p.last {
			l.pos, l.round = l.round.target, nil
		} else {
			l.round.acked = p.end
		}
		l.dirty = l.dirty || moved
	}
}

func (r *Relay) noteRead() {
	r.mu.Lock()
	r.lastRead = time.Now()
	r.mu.Unlock()
}

// snapshotMax is pg_snapshot_xmax: the second field of xmin:xmax:list.
func snapshotMax(s string) string {
	_, rest, _ := strings.Cut(s, ":")
	m, _, _ := strings.Cut(rest, ":")
	return m
}
