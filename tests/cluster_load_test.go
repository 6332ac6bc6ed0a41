package tests

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// The tests of clusters, databases, clocks and deploys have a long form, which make soak runs.
var soak = flag.Bool("soak", false, "run the long forms: every fault of a list, where the short form has the worst ones")

// A load commits tasks all the time while something breaks, rolls some back, and judges in the end: each committed task
// was called as often as it may be, none that was rolled back ever was.
type load struct {
	t       *testing.T
	e       *testenv.Env
	sink    *testenv.Sink
	bizType string
	pool    *pgxpool.Pool
	end     context.CancelFunc
	done    chan struct{}

	mu         sync.Mutex
	committed  map[string]time.Time // by biz id: when the commit was answered
	otherClock bool                 // the database's clock is not ours, so instants tell nothing
	lag        [2]time.Time         // what was committed between these was lost with its server, and may be gone
	unknown    []string             // the commit was not answered
	rolledBack []string
	refusals   map[string]int // errors by their text
}

// startLoad commits a task of the type every pause. It uses the same URL as everybody.
func startLoad(t *testing.T, e *testenv.Env, sink *testenv.Sink, bizType string, pause time.Duration) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{t: t, e: e, sink: sink, bizType: bizType, end: cancel, done: make(chan struct{}),
		committed: make(map[string]time.Time), refusals: make(map[string]int)}
	l.pool = openPool(t, e.URL, func(c *pgxpool.Config) { c.MaxConns = 2; c.ConnConfig.ConnectTimeout = 2 * time.Second })
	go func() {
		defer close(l.done)
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			l.produce(ctx, fmt.Sprintf("%s-%d", bizType, i), i%7 == 6)
		}
	}()
	t.Cleanup(l.stop)
	return l
}

// produce runs one transaction. Only an answered commit is a promise; one that was not answered may be either.
func (l *load) produce(ctx context.Context, bizID string, rollBack bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	tx, err := l.pool.Begin(ctx)
	if err == nil {
		_, err = tx.Exec(ctx, `INSERT INTO taskrelay.task (biz_type, biz_id, payload) VALUES ($1, $2, '{"amount": 1}')`, l.bizType, bizID)
		if err != nil || rollBack {
			_ = tx.Rollback(ctx)
		}
	}
	if err != nil || rollBack {
		l.mu.Lock()
		defer l.mu.Unlock()
		if err != nil {
			l.refusals[err.Error()]++
		}
		l.rolledBack = append(l.rolledBack, bizID)
		return
	}
	err = tx.Commit(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.unknown = append(l.unknown, bizID)
		return
	}
	l.committed[bizID] = time.Now()
}

// stop ends the producer. Further calls do nothing.
func (l *load) stop() {
	l.end()
	<-l.done
}

// counts tells how many tasks committed before at were not called, and whether one committed after it was.
func (l *load) counts(at time.Time) (waiting int, fresh bool) {
	called := make(map[string]bool)
	for _, c := range l.sink.Calls() {
		called[c.BizID] = true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, when := range l.committed {
		switch {
		case when.Before(at) && !called[id] && !l.lagged(when):
			waiting++
		case when.After(at) && called[id]:
			fresh = true
		}
	}
	return waiting, fresh
}

func (l *load) lagged(at time.Time) bool { return !at.Before(l.lag[0]) && !at.After(l.lag[1]) }

// warmUp waits until calls come.
func (l *load) warmUp(calls int) {
	l.t.Helper()
	l.sink.WaitCalls(l.t, 2*soon, calls)
}

// recovery waits until a task committed after from has been called, and tells how long that took; then until all
// committed before from have been called too.
func (l *load) recovery(what string, from time.Time, limit time.Duration) time.Duration {
	l.t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var took time.Duration
	for {
		waiting, fresh := l.counts(from)
		if took == 0 && fresh {
			took = time.Since(from)
		}
		if took > 0 && waiting == 0 {
			break
		}
		if time.Since(from) > 2*time.Minute {
			l.t.Fatalf("%s: not recovered after %v: new tasks are called: %t, older ones that wait: %d", what, time.Since(from), fresh, waiting)
		}
		<-tick.C
	}
	l.t.Logf("%-60s work goes on after %5.2fs, all caught up after %5.2fs", what, took.Seconds(), time.Since(from).Seconds())
	if took > limit {
		l.t.Errorf("%s: work went on after %v, want %v", what, took, limit)
	}
	return took
}

// verdict stops the load, waits until everything is finished and checks that nothing was lost, doubled or made up.
// most is how often a task may be called: 1, unless leases could end.
func (l *load) verdict(most int) (lost int) {
	l.t.Helper()
	l.stop()
	l.e.WaitNoneOpen(l.t, 2*time.Minute)
	calls := make(map[string][]testenv.Call)
	for _, c := range l.sink.Calls() {
		if c.BizType == l.bizType {
			calls[c.BizID] = append(calls[c.BizID], c)
		}
	}
	type row struct {
		status   string
		finished time.Time
	}
	rows := make(map[string]row)
	all, err := l.e.Pool.Query(l.t.Context(), `SELECT biz_id, status, finished_at FROM taskrelay.task WHERE biz_type = $1 AND biz_id IS NOT NULL`, l.bizType)
	if err != nil {
		l.t.Fatal(err)
	}
	var id, status string
	var finished time.Time
	if _, err := pgx.ForEachRow(all, []any{&id, &status, &finished}, func() error {
		rows[id] = row{status, finished}
		return nil
	}); err != nil {
		l.t.Fatal(err)
	}

	var wrong []string
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	doubled := 0
	one := func(id string, r row) {
		n := len(calls[id])
		switch {
		case r.status != "succeeded":
			say("%s is %s, want succeeded", id, r.status)
		case n == 0:
			say("%s was never called", id)
		case n > most:
			say("%s was called %d times, want at most %d", id, n, most)
		}
		if n > 1 {
			doubled++
		}
		for _, c := range calls[id] {
			if c.At.After(r.finished) && !l.otherClock {
				say("%s was called at %v, it was finished at %v", id, c.At, r.finished)
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, when := range l.committed {
		r, ok := rows[id]
		if ok {
			one(id, r)
			continue
		}
		lost++
		if !l.lagged(when) {
			say("%s was committed and is not there", id)
		}
	}
	for _, id := range l.unknown {
		if r, ok := rows[id]; ok {
			one(id, r)
		} else if len(calls[id]) > 0 && l.lag[1].IsZero() {
			say("%s was called, it is not there and its commit was not answered", id)
		}
	}
	for _, id := range l.rolledBack {
		if _, ok := rows[id]; ok || len(calls[id]) > 0 {
			say("%s was rolled back: a row is there: %t, calls: %d", id, ok, len(calls[id]))
		}
	}
	slices.Sort(wrong)
	if len(wrong) > 0 {
		l.t.Errorf("%d tasks are wrong, such as\n%s", len(wrong), strings.Join(wrong[:min(len(wrong), 10)], "\n"))
	}
	if most == 1 {
		noOverlaps(l.t, l.sink)
	}
	noDoubleSuccess(l.t, l.e)
	if len(l.committed) < 20 {
		l.t.Errorf("only %d tasks were committed: too few to prove anything", len(l.committed))
	}
	l.t.Logf("%s: committed=%d lost=%d doubled=%d unknown=%d rolled_back_or_refused=%d", l.bizType, len(l.committed), lost, doubled, len(l.unknown), len(l.rolledBack))
	return lost
}

// stillRunning checks that no process has ended.
func stillRunning(t *testing.T, processes ...*testenv.Process) {
	t.Helper()
	for _, p := range processes {
		select {
		case <-p.Done():
			t.Errorf("%s has ended:\n%s", p.Name, lastLines(p.Logs(), 5))
		default:
		}
	}
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// eventuallySQL runs a statement on a connection of its own until it succeeds: the servers of these tests come and go.
func eventuallySQL(t *testing.T, url, sql string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		c, err := pgx.Connect(ctx, url)
		if err != nil {
			return err
		}
		defer c.Close(ctx)
		_, err = c.Exec(ctx, sql)
		return err
	})
}
