package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

const (
	relays    = 2
	workers   = 3
	producers = 4
	lease     = 2 * time.Second // of a claim
	laneLease = 6 * time.Second // of a relay's lane
)

// options of a run.
type options struct {
	duration time.Duration // of the faults
	seed     uint64
	rate     int            // tasks a second, about
	patience time.Duration  // for one recovery
	deadline time.Duration  // to finish everything when the faults have stopped
	mostOpen int            // producers wait while more tasks are open
	pairs    float64        // share of faults that come with a second one
	only     *regexp.Regexp // matches the names of the faults that may come
	logs     string         // a directory for the logs of all processes; empty: none are kept
}

// A run is the installation that is broken.
type run struct {
	t       *testing.T
	o       options
	rand    *rand.Rand
	began   time.Time
	pg      *pgtemp.Server
	db      *testenv.Database
	nats    *testenv.NATSProcess
	target  *target
	ledger  *ledger
	slots   []*slot
	pauses  pauses
	results results
	low     int64 // id below which everything is finished
}

// A slot is a place where one process runs: one after another, over the same links.
type slot struct {
	role string // relay or worker
	proc *testenv.Process
	pg   *proxy
	nats *proxy
	vars []string
	busy bool // a fault is at it
}

func newRun(t *testing.T, o options) *run {
	t.Helper()
	c := &run{t: t, o: o, rand: rand.New(rand.NewPCG(o.seed, 0)), ledger: &ledger{}, pauses: pauses{of: map[string][][2]time.Time{}}}
	c.pg = testenv.OwnPostgres(t)
	c.db = testenv.DBOn(t, c.pg)
	c.db.Exec(t, watchSQL)
	c.nats = testenv.StartNATSProcess(t)
	c.target = newTarget(t)
	full := []string{"100", "1000", "10000"}[c.rand.IntN(3)] // a lane that is full now and then must not matter
	for i := range relays + workers {
		s := &slot{role: "relay", pg: newProxy(t, address(t, c.db.URL)), nats: newProxy(t, address(t, c.nats.URL))}
		s.vars = []string{"TASKRELAY_DATABASE_URL=" + through(t, c.db.URL, s.pg), "TASKRELAY_NATS_URL=" + through(t, c.nats.URL, s.nats),
			"TASKRELAY_ADMIN_ADDR=127.0.0.1:0", "TASKRELAY_LOG_FORMAT=json", "TASKRELAY_LOG_LEVEL=" + map[bool]string{true: "warn", false: "debug"}[o.logs == ""]}
		if i < relays {
			s.vars = append(s.vars, "TASKRELAY_RELAY_RECONCILE=1s", "TASKRELAY_STREAM_MAX_PER_SUBJECT="+full)
		} else {
			s.role = "worker"
			common := []string{"BASE_DELAY", "200ms", "MAX_DELAY", "2s", "JITTER", "0.2", "TIMEOUT", "30s", "CONCURRENCY", "30",
				"MAX_ATTEMPTS", strconv.Itoa(policyAttempts)}
			s.vars = append(s.vars, testenv.Types(
				testenv.HTTPType(undoable, c.target.url, append(common, "COMPENSATE", c.target.url)...),
				testenv.HTTPType(plain, c.target.url, common...))...)
			// Of the delays 200 ms, 400 ms, 800 ms, 1.6 s, 2 s the first are naks, the others go through the table.
			s.vars = append(s.vars, "TASKRELAY_WORKER_LEASE="+lease.String(), "TASKRELAY_WORKER_NAK_MAX=1s", "TASKRELAY_WORKER_GRACE=10s")
		}
		c.slots = append(c.slots, s)
		c.start(s)
	}
	return c
}

func address(t testing.TB, server string) string {
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host
}

// through is a server's URL with the proxy's address in the place of its own.
func through(t testing.TB, server string, p *proxy) string {
	return strings.Replace(server, address(t, server), p.addr(), 1)
}

func (c *run) start(s *slot) {
	s.proc = testenv.Start(c.t, s.role, nil, s.vars...)
	if c.o.logs == "" {
		return
	}
	p := s.proc
	c.t.Cleanup(func() {
		name := filepath.Join(c.o.logs, fmt.Sprintf("%s-%d.log", p.Name, p.Pid()))
		if err := os.WriteFile(name, []byte(p.Logs()), 0o644); err != nil {
			c.t.Errorf("keep the log of a %s: %v", p.Name, err)
		}
	})
}

// note prints progress, with the time since the run began.
func (c *run) note(format string, args ...any) {
	c.t.Logf("%6.1fs  "+format, append([]any{time.Since(c.began).Seconds()}, args...)...)
}

// produce starts the producers. stop ends them and waits.
func (c *run) produce() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var full atomic.Bool
	var all sync.WaitGroup
	for i := range producers {
		p := &producer{pool: c.db.Pool, ledger: c.ledger, rand: rand.New(rand.NewPCG(c.o.seed, uint64(i+1))), lease: lease, full: &full,
			every: time.Duration(2.5 * producers * float64(time.Second) / float64(c.o.rate))} // 2.5 tasks each, on average
		all.Go(func() { p.run(ctx) })
	}
	all.Go(func() { // back-pressure, so that the last part of a run is not an hour of catching up
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		finished, read := 0, int64(0)
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			// From where it last read on: a move that commits late is missed, and a few do not matter here.
			var more int
			if c.db.Pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE became IN ('succeeded', 'dead', 'cancelled')), coalesce(max(seq), $1)
				FROM public.move WHERE seq > $1`, read).Scan(&more, &read) == nil {
				finished += more
				full.Store(c.ledger.count()-finished > c.o.mostOpen)
			}
		}
	})
	return func() {
		cancel()
		all.Wait()
	}
}

// openSQL counts tasks that have been waiting since an instant: due, and not begun since. It reads from the lowest
// unfinished id on, which it returns.
const openSQL = `
SELECT count(*) FILTER (WHERE t.created_at < $2 AND coalesce(t.next_attempt_at, t.run_at, '-infinity') <= now()
    AND (t.started_at IS NULL OR t.started_at < $2) AND ($3 OR t.republish_at IS NULL)),
  coalesce(min(t.id), $1)
FROM taskrelay.task AS t WHERE t.id >= $1 AND t.finished_at IS NULL`

// recovered waits until everything that was due at an instant has been begun since, and a new task of each lane, made
// now, has succeeded. It returns how long that took, from the instant.
// listed: rows on the work list too. Their messages, lost unseen, are looked for after ten minutes.
func (c *run) recovered(since time.Time, listed bool) (time.Duration, bool) {
	probes := c.probes()
	for end := time.Now().Add(c.o.patience); time.Now().Before(end); {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		var open, probed int
		low := c.low
		if len(probes) == 0 {
			probes = c.probes()
		}
		err := c.db.Pool.QueryRow(ctx, openSQL, c.low, since, listed).Scan(&open, &low)
		if err == nil {
			c.low = low
			err = c.db.Pool.QueryRow(ctx, `SELECT count(*) FROM taskrelay.task WHERE biz_type = ANY ($1) AND biz_id = ANY ($2)
				AND status = 'succeeded'`, []string{undoable, plain}, probes).Scan(&probed)
		}
		cancel()
		if err == nil && open == 0 && len(probes) > 0 && probed == len(probes) {
			return time.Since(since), true
		}
		time.Sleep(50 * time.Millisecond)
	}
	return c.o.patience, false
}

// probes makes a task in each lane that succeeds at once, and returns their biz ids; none while Postgres is away.
func (c *run) probes() (bizIDs []string) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	var entries []*entry
	for _, bizType := range []string{undoable, plain} {
		for _, high := range []bool{true, false} {
			s := script{N: c.ledger.next(), bizType: bizType, high: high}
			entries = append(entries, &entry{script: s, body: s.payload()})
			bizIDs = append(bizIDs, strconv.FormatInt(s.N, 10))
		}
	}
	p := producer{rand: c.rand}
	if err := pgx.BeginFunc(ctx, c.db.Pool, func(tx pgx.Tx) error { return p.write(ctx, tx, entries) }); err != nil {
		c.ledger.note(unknown, entries) // should they be there all the same, they must end well too
		return nil
	}
	c.ledger.note(committed, entries)
	return bizIDs
}

// waitingFor says what kept recovery from being complete.
func (c *run) waitingFor(since time.Time) (kinds string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	err := c.db.Pool.QueryRow(ctx, `SELECT coalesce(string_agg(k.kind, '; '), 'nothing any more') FROM (
		SELECT format('%s %s %s generation %s, looked at in %s s (%s looks), attempt %s: %s tasks, such as %s', t.biz_type, t.priority,
			t.status || CASE WHEN t.lease_until < now() THEN ' lease ended' WHEN t.lease_until >= now() THEN ' leased' ELSE '' END,
			t.generation, coalesce(round(extract(epoch FROM t.republish_at - now()) / 10) * 10, -1), t.looks, t.attempt, count(*), min(t.id)) AS kind
		FROM taskrelay.task AS t
		WHERE t.id >= $1 AND t.finished_at IS NULL AND t.created_at < $2 AND coalesce(t.next_attempt_at, t.run_at, '-infinity') <= now()
			AND (t.started_at IS NULL OR t.started_at < $2)
		GROUP BY t.biz_type, t.priority, t.status, t.lease_until < now(), t.lease_until >= now(), t.generation,
			round(extract(epoch FROM t.republish_at - now()) / 10), t.looks, t.attempt
		ORDER BY count(*) DESC LIMIT 6) AS k`, c.low, since).Scan(&kinds)
	if err != nil {
		return err.Error()
	}
	return kinds + c.lanes(ctx)
}

// lanes says how far each lane is, by the table and by the stream.
func (c *run) lanes(ctx context.Context) (text string) {
	rows, err := c.db.Pool.Query(ctx, `SELECT format('%s-%s', biz_type, priority), format('; mark %s, highest %s, losses %s, owner %s until %s s',
		mark_seq, max_seq, losses, owner, round(extract(epoch FROM owner_until - now()))) FROM taskrelay.lane ORDER BY 1`)
	if err != nil {
		return err.Error()
	}
	names, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (n [2]string, err error) {
		err = r.Scan(&n[0], &n[1])
		return n, err
	})
	if err != nil {
		return err.Error()
	}
	for _, n := range names {
		text += "\n    " + n[0] + n[1]
		consumer, err := c.nats.JS.Consumer(ctx, "TASKS", n[0])
		if err != nil {
			text += "; " + err.Error()
			continue
		}
		i := consumer.CachedInfo()
		text += fmt.Sprintf("; acknowledged up to %d, delivered %d, out %d, left %d, pulls %d", i.AckFloor.Stream, i.Delivered.Stream,
			i.NumAckPending, i.NumPending, i.NumWaiting)
	}
	return text
}

// tenMinutesSQL does what time would do to rows whose message was lost unseen: the relay looks at them again. By then the
// stream would have forgotten the message's id, so the look gets one of its own.
const tenMinutesSQL = `
UPDATE taskrelay.task SET republish_at = greatest(now(), next_attempt_at), looks = looks + 1
WHERE id >= $1 AND finished_at IS NULL AND republish_at > now() + interval '30 seconds'
  AND (status IN ('pending', 'retrying') OR lease_until < now())`

// tenMinutesLater ends the wait of rows on the work list whose message was taken away unseen, once the attempts that run
// now are over: they may give back a message that is gone. Nothing else waits that long.
func (c *run) tenMinutesLater() {
	called := time.Now()
	testenv.Eventually(c.t, c.o.deadline, func() error {
		ctx, cancel := context.WithTimeout(c.t.Context(), 3*time.Second)
		defer cancel()
		var running int
		if err := c.db.Pool.QueryRow(ctx, `SELECT count(*) FROM taskrelay.task
			WHERE id >= $1 AND status = 'running' AND started_at < $2 AND lease_until >= now()`, c.low, called).Scan(&running); err != nil {
			return err
		}
		if running > 0 {
			return fmt.Errorf("%d tasks have been running since the fault", running)
		}
		_, err := c.db.Pool.Exec(ctx, tenMinutesSQL, c.low)
		return err
	})
}

// quiesce waits until nothing is open, no message left and every letter out, or the deadline.
func (c *run) quiesce() {
	began, end := time.Now(), time.Now().Add(c.o.deadline)
	var why error
	for time.Now().Before(end) {
		if why = c.open(); why == nil {
			c.note("all is quiet, %.1fs after the faults stopped", time.Since(began).Seconds())
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	c.t.Errorf("not quiet after %v: %v", c.o.deadline, why)
}

func (c *run) open() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var open, letters int
	if err := c.db.Pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE finished_at IS NULL),
		count(*) FILTER (WHERE dead_at IS NOT NULL AND dead_lettered_at IS NULL) FROM taskrelay.task`).Scan(&open, &letters); err != nil {
		return err
	}
	if open > 0 || letters > 0 {
		return fmt.Errorf("%d tasks are unfinished, %d letters not out", open, letters)
	}
	if n := c.target.running(); n > 0 {
		return fmt.Errorf("%d calls are running", n)
	}
	s, err := c.nats.JS.Stream(ctx, "TASKS")
	if err != nil {
		return err
	}
	if n := s.CachedInfo().State.Msgs; n > 0 {
		return fmt.Errorf("%d messages of finished tasks are left in the stream", n)
	}
	dead, err := c.nats.JS.Stream(ctx, "TASKS_DEAD")
	if err != nil {
		return err
	}
	if err := c.db.Pool.QueryRow(ctx, `SELECT count(*) FROM taskrelay.task WHERE dead_at IS NOT NULL`).Scan(&letters); err != nil {
		return err
	}
	if n := dead.CachedInfo().State.Msgs; n != uint64(letters) {
		return fmt.Errorf("%d tasks are dead, the dead stream holds %d letters", letters, n)
	}
	return nil
}

// collect reads everything that the run has left.
func (c *run) collect() evidence {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	must := func(err error) {
		if err != nil {
			c.t.Fatalf("collect the evidence: %v", err)
		}
	}
	e := evidence{entries: c.ledger.all(), calls: c.target.all(), paused: c.pauses.during}
	var err error
	e.rows, err = readRows(ctx, c.db.Pool)
	must(err)
	e.attempts, err = readAttempts(ctx, c.db.Pool)
	must(err)
	e.moves, err = readMoves(ctx, c.db.Pool)
	must(err)
	must(c.db.Pool.QueryRow(ctx, "SELECT id::text FROM taskrelay.installation").Scan(&e.installation))
	e.letters, e.messages = make(map[int64]string), make(map[int64]bool)
	must(c.readStream(ctx, "TASKS_DEAD", func(id int64, body string) { e.letters[id] = body }))
	must(c.readStream(ctx, "TASKS", func(id int64, _ string) { e.messages[id] = true }))
	return e
}

// readStream reads every message without consuming it, also those that a consumer does not know.
func (c *run) readStream(ctx context.Context, name string, each func(id int64, body string)) error {
	s, err := c.nats.JS.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	state := s.CachedInfo().State
	for seq := state.FirstSeq; state.Msgs > 0 && seq <= state.LastSeq; seq++ {
		m, err := s.GetMsg(ctx, seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		id, err := strconv.ParseInt(m.Header.Get(outbox.HeaderID), 10, 64)
		if err != nil {
			return fmt.Errorf("message %d of %s: %w", seq, name, err)
		}
		each(id, string(m.Data))
	}
	return nil
}

// pauses remembers when which process was stopped.
type pauses struct {
	of map[string][][2]time.Time // pid → from, to
}

func (p *pauses) add(pid int, from, to time.Time) {
	k := strconv.Itoa(pid)
	p.of[k] = append(p.of[k], [2]time.Time{from, to})
}

// during reports whether a worker was paused at some time between two instants. Its name is <host>-<pid>-<random>.
func (p *pauses) during(worker string, from, to time.Time) bool {
	parts := strings.Split(worker, "-")
	if len(parts) < 3 {
		return false
	}
	return slices.ContainsFunc(p.of[parts[len(parts)-2]], func(w [2]time.Time) bool {
		return w[0].Before(to) && w[1].After(from)
	})
}

// results is the table of recovery times.
type results struct {
	names []string
	of    map[string]*result
}

type result struct {
	times          []time.Duration // from the fault's end, or from its begin where the process does not come back by itself
	held           []time.Duration
	notInTime      int
	fromTheBegin   bool
	withoutTheList bool
}

func (r *results) add(f *fault, held, took time.Duration, ok bool) {
	if r.of == nil {
		r.of = make(map[string]*result)
	}
	x := r.of[f.name]
	if x == nil {
		x = &result{fromTheBegin: f.fromBegin, withoutTheList: f.unseen}
		r.of[f.name] = x
		r.names = append(r.names, f.name)
	}
	x.held = append(x.held, held)
	if !ok {
		x.notInTime++
		return
	}
	x.times = append(x.times, took)
}

func (r *results) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-44s %5s %9s %9s %9s  %s\n", "fault", "times", "held", "median", "longest", "counted from")
	slices.Sort(r.names)
	for _, name := range r.names {
		x := r.of[name]
		slices.Sort(x.times)
		slices.Sort(x.held)
		from := "its end"
		if x.fromTheBegin {
			from = "its begin"
		}
		if x.withoutTheList {
			from += ", rows never handed back"
		}
		median, longest := "-", "-"
		if n := len(x.times); n > 0 {
			median, longest = seconds(x.times[n/2]), seconds(x.times[n-1])
		}
		if x.notInTime > 0 {
			from += fmt.Sprintf(" (%d not in time)", x.notInTime)
		}
		fmt.Fprintf(&b, "%-44s %5d %9s %9s %9s  %s\n", name, len(x.held), seconds(x.held[len(x.held)/2]), median, longest, from)
	}
	return b.String()
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2fs", d.Seconds()) }

// backend returns the process id of a connection of a role to Postgres, 0 when there is none.
func (c *run) backend(ctx context.Context, role string) (pid int, err error) {
	conn, err := pgx.Connect(ctx, c.pg.URL)
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	err = conn.QueryRow(ctx, `SELECT coalesce(min(pid), 0) FROM pg_stat_activity WHERE application_name = $1`, "taskrelay-"+role).Scan(&pid)
	return pid, err
}
