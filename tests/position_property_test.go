package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Reading by position (3.1; C-035, C-038, C-039, B99): whatever the order of commits, each committed row is published
// exactly once, not before it is due, and nothing that was rolled back is. A relay that is replaced in mid-work may
// repeat a message, but misses none.
//
// The writers mix short and long transactions, savepoints, rollbacks, prepared transactions and rows of the past and
// the future, on several lanes.
func TestEachCommittedRowIsPublishedOnce(t *testing.T) {
	transactions := 10_000
	e := testenv.New(t)
	w := newWriters(t, e, transactions)
	got := watchTasks(t, e)
	e.RunRelay(func(c *outbox.RelayConfig) { c.MaxPerSubject = 1_000_000 })
	w.run(t)
	got.wait(t, e)

	counts := got.byRow()
	want := w.committed(t)
	t.Logf("%d transactions, %d rows committed, seed %d", transactions, len(want), w.seed)
	for id, due := range want {
		switch m := counts[id]; {
		case m.n != 1:
			t.Errorf("task %d: published %d times, want once", id, m.n)
		case m.first.Before(due):
			t.Errorf("task %d: published at %v, due at %v", id, m.first, due)
		}
	}
	for id := range counts {
		if _, ok := want[id]; !ok {
			t.Errorf("task %d was published and is not committed", id)
		}
	}
}

// The same while relays come and go: two at once, each stopped and replaced every half second.
func TestReplacedRelaysMissNothing(t *testing.T) {
	e := testenv.New(t)
	w := newWriters(t, e, 2_500)
	got := watchTasks(t, e)
	stop := make(chan struct{})
	var relays sync.WaitGroup
	for i := range 2 {
		relays.Add(1)
		go func() {
			defer relays.Done()
			for n := 0; ; n++ {
				r := e.RunRelay(func(c *outbox.RelayConfig) {
					c.MaxPerSubject = 1_000_000
					c.Batch = 50 // so that a stop falls within a round
					c.Name = fmt.Sprintf("relay-%d-%d", i, n)
				})
				select {
				case <-stop:
					r.Stop()
					return
				case <-time.After(time.Duration(300+200*i) * time.Millisecond):
				}
				r.Stop()
			}
		}()
	}
	w.run(t)
	close(stop)
	relays.Wait()
	e.RunRelay(func(c *outbox.RelayConfig) { c.MaxPerSubject = 1_000_000 })
	got.wait(t, e)
	counts, want := got.byRow(), w.committed(t)
	repeated := 0
	for id := range want {
		if counts[id].n == 0 {
			t.Errorf("task %d was never published (seed %d)", id, w.seed)
		}
		if counts[id].n > 1 {
			repeated++
		}
	}
	for id := range counts {
		if _, ok := want[id]; !ok {
			t.Errorf("task %d was published and is not committed", id)
		}
	}
	t.Logf("%d rows, %d repeated after a relay ended", len(want), repeated)
}

type writers struct {
	e            *testenv.Env
	pool         *pgxpool.Pool
	transactions int64
	seed         uint64
	prepared     atomic.Int64
}

func newWriters(t *testing.T, e *testenv.Env, transactions int) *writers {
	cfg, err := pgxpool.ParseConfig(e.URL)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 20
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return &writers{e: e, pool: pool, transactions: int64(transactions), seed: rand.Uint64()}
}

// run writes with 12 writers until all transactions have ended.
func (w *writers) run(t *testing.T) {
	t.Helper()
	var left atomic.Int64
	left.Store(w.transactions)
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r := rand.New(rand.NewPCG(w.seed, uint64(i)))
			for left.Add(-1) >= 0 {
				if err := w.one(t.Context(), r); err != nil {
					t.Errorf("writer %d: %v", i, err)
					return
				}
			}
		}()
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// one is one random transaction.
func (w *writers) one(ctx context.Context, r *rand.Rand) error {
	conn, err := w.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
		return err
	}
	var sql []string
	for range 1 + r.IntN(3) {
		switch r.IntN(8) {
		case 0: // survives its savepoint
			sql = append(sql, "SAVEPOINT a", insertSQL(r), "RELEASE a")
		case 1: // does not
			sql = append(sql, "SAVEPOINT a", insertSQL(r), "ROLLBACK TO a")
		case 2: // nested
			sql = append(sql, "SAVEPOINT a", insertSQL(r), "SAVEPOINT b", insertSQL(r), "ROLLBACK TO b", "RELEASE a")
		default:
			sql = append(sql, insertSQL(r))
		}
	}
	if err := execAll(ctx, conn, sql); err != nil {
		return err
	}
	switch p := r.IntN(1000); {
	case p < 4: // open for long, while the others go on
		pause(ctx, time.Duration(500+r.IntN(2500))*time.Millisecond)
		if err := execAll(ctx, conn, []string{insertSQL(r)}); err != nil {
			return err
		}
	case p < 60:
		pause(ctx, time.Duration(r.IntN(40))*time.Millisecond)
	}
	switch p := r.IntN(100); {
	case p < 12:
		return execAll(ctx, conn, []string{"ROLLBACK"})
	case p < 15 && w.prepared.Add(1) <= 10: // the server holds 20 prepared transactions at most
		gid := fmt.Sprintf("p%d", r.Uint64())
		if err := execAll(ctx, conn, []string{"PREPARE TRANSACTION '" + gid + "'"}); err != nil {
			return err
		}
		pause(ctx, time.Duration(r.IntN(1500))*time.Millisecond)
		end := "COMMIT PREPARED"
		if r.IntN(3) == 0 {
			end = "ROLLBACK PREPARED"
		}
		err := execAll(ctx, conn, []string{end + " '" + gid + "'"})
		w.prepared.Add(-1)
		return err
	case p < 15:
		w.prepared.Add(-1)
	}
	return execAll(ctx, conn, []string{"COMMIT"})
}

func insertSQL(r *rand.Rand) string {
	runAt := "NULL"
	switch r.IntN(8) {
	case 0:
		runAt = fmt.Sprintf("now() + interval '%d milliseconds'", r.IntN(4000))
	case 1:
		runAt = fmt.Sprintf("clock_timestamp() + interval '%d milliseconds'", r.IntN(100)-50)
	case 2:
		runAt = fmt.Sprintf("now() - interval '%d hours'", r.IntN(100))
	}
	priority := []string{"low", "high"}[r.IntN(2)]
	return fmt.Sprintf("INSERT INTO taskrelay.task (biz_type, priority, run_at) VALUES ('P%d', '%s', %s)", r.IntN(3), priority, runAt)
}

func execAll(ctx context.Context, conn *pgxpool.Conn, sql []string) error {
	for _, s := range sql {
		tag, err := conn.Exec(ctx, s)
		if err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
		if s == "COMMIT" && tag.String() != "COMMIT" {
			return fmt.Errorf("COMMIT answered %s", tag)
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// committed returns the rows that exist, with their due time, or the zero time.
func (w *writers) committed(t *testing.T) map[int64]time.Time {
	t.Helper()
	rows, err := w.pool.Query(t.Context(), "SELECT id, coalesce(run_at, '-infinity') > '-infinity', coalesce(run_at, now()) FROM taskrelay.task")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	want := map[int64]time.Time{}
	for rows.Next() {
		var id int64
		var scheduled bool
		var due time.Time
		if err := rows.Scan(&id, &scheduled, &due); err != nil {
			t.Fatal(err)
		}
		if !scheduled {
			due = time.Time{}
		}
		want[id] = due
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return want
}

// taskMessages are the messages on the wire, by row: a plain subscription also sees what JetStream drops as a duplicate.
type taskMessages struct {
	mu   sync.Mutex
	rows map[int64]seen
}

type seen struct {
	n     int
	first time.Time
}

func watchTasks(t *testing.T, e *testenv.Env) *taskMessages {
	t.Helper()
	g := &taskMessages{rows: map[int64]seen{}}
	nc := e.Connect("watch")
	sub, err := nc.Subscribe("tasks.>", func(m *nats.Msg) {
		id, err := strconv.ParseInt(m.Header.Get(outbox.HeaderID), 10, 64)
		if err != nil || m.Header.Get(outbox.HeaderGeneration) != "0" || !strings.HasPrefix(m.Subject, "tasks."+m.Header.Get(outbox.HeaderBizType)+".") {
			t.Errorf("unexpected message on %s: %v", m.Subject, m.Header)
			return
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		s := g.rows[id]
		if s.n++; s.n == 1 {
			s.first = time.Now()
		}
		g.rows[id] = s
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return g
}

// wait waits until as many rows have been seen as are committed. What is published twice or wrongly comes earlier
// than the last one, or is caught by the count of messages, because a canary follows on every lane.
func (g *taskMessages) wait(t *testing.T, e *testenv.Env) {
	t.Helper()
	for lane := range 3 {
		for _, p := range []string{"low", "high"} {
			e.Insert(t, "P"+strconv.Itoa(lane), "priority", p, "run_at", time.Now().Add(time.Second))
		}
	}
	want := int(e.Int(t, "SELECT count(*) FROM taskrelay.task"))
	testenv.Eventually(t, 2*soon, func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		if len(g.rows) < want {
			return errorf("%d rows published, want %d", len(g.rows), want)
		}
		return nil
	})
}

func (g *taskMessages) byRow() map[int64]seen {
	g.mu.Lock()
	defer g.mu.Unlock()
	rows := make(map[int64]seen, len(g.rows))
	for k, v := range g.rows {
		rows[k] = v
	}
	return rows
}

// A transaction that stays open delays nobody else's tasks, and its own are published as soon as it commits (C-035).
func TestLongTransactionDelaysNobody(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	got := watchTasks(t, e)
	e.RunRelay()
	long, err := e.Pool.BeginTx(t.Context(), pgx.TxOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer long.Rollback(context.Background())
	var first int64
	if err := long.QueryRow(t.Context(), "INSERT INTO taskrelay.task (biz_type) VALUES ('P0') RETURNING id").Scan(&first); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		id := e.Insert(t, "P0")
		got.waitFor(t, id)
	}
	if _, early := got.byRow()[first]; early {
		t.Error("an uncommitted row was published")
	}
	if err := long.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	got.waitFor(t, first)
}

func (g *taskMessages) waitFor(t *testing.T, id int64) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		if g.byRow()[id].n == 0 {
			return errorf("task %d is not published", id)
		}
		return nil
	})
}
