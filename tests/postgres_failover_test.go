//go:build soak

package tests

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Issue 3, part 4; interleavings 3 and 11: the primary dies, and a standby that lacks its last transactions takes its
// address. Ids and transaction ids are given out again. What is left is done, what is gone stays gone, its messages are
// dropped, and no position skips a new row.
func TestLaggingStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	p := testenv.OwnPostgres(t)
	e := testenv.NewEnv(t, testenv.DBOn(t, p), testenv.NATS(t))
	s := testenv.Standby(t, p)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 20 * time.Millisecond})
	// Tasks whose settle was lost with the old primary wait for the end of their lease, not for the reconciler.
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=60s", "TASKRELAY_RELAY_RECONCILE=5s")
	// Behind a pooler a client's connection outlives the server that it spoke to.
	pooled := slices.Concat(vars, []string{"TASKRELAY_DATABASE_URL=" + startBouncer(t, pgbouncer(t), e.Database, "transaction", "server_login_retry=1")})
	all := []*testenv.Process{e.StartRelay(pooled...), e.StartWorker(pooled...), e.StartRelay(vars...), e.StartWorker(vars...)}
	l := startLoad(t, e, sink, "ORDER_PAYMENT", 20*time.Millisecond)
	l.warmUp(20)

	behind := time.Now() // before it has caught up, or a row could be committed before and miss it
	caughtUp(t, p, s)
	if err := s.Shutdown(); err != nil {
		t.Fatal(err)
	}
	alone := time.Now() // from now on nothing reaches the standby
	// Rows that only the old primary has: their messages wait in the stream, since nobody handles their type yet.
	waits := testenv.HTTPType("WAITS", sink.URL)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, biz_id) SELECT 'WAITS', 'gone-' || g FROM generate_series(1, 50) AS g`)
	called := len(sink.Calls())
	testenv.Eventually(t, soon, func() error {
		m := e.NATS.WaitStream(t, "TASKS")
		if n, err := m.Info(t.Context()); err != nil || n.State.Msgs < 50 {
			return errorf("messages of WAITS are not all in the stream: %v", err)
		}
		return nil
	})
	l.sink.WaitCalls(t, soon, called+50) // done on the old primary, and forgotten with it
	oldID, oldXID := e.Int(t, `SELECT max(id) FROM taskrelay.task`), e.Int(t, `SELECT pg_current_xact_id()::text::bigint`)

	if err := p.Kill9(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	inRecovery := waitLogged(t, "recovery", []*testenv.Process{all[2]})
	if err := s.Move(ctx, p.Port); err != nil {
		t.Fatal(err)
	}
	inRecovery() // a standby answers for a while before it is promoted
	// Until now nobody but the old primary can have answered a commit. It did so for a while after it was killed: a backend
	// notices that its server is dead when it waits for its client, and on a busy machine the client is quicker.
	l.loses(behind, time.Now())
	if err := s.Promote(ctx); err != nil {
		t.Fatal(err)
	}
	l.recovery("lagging standby, from its promotion", time.Now(), 15*time.Second)
	fresh := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE id <= $1 AND xid::text::bigint <= $2 AND created_at > $3`, oldID, oldXID, alone)
	if fresh == 0 {
		t.Error("no id and transaction id was given out twice: the test shows nothing")
	}
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, biz_id) SELECT 'WAITS', 'new-' || g FROM generate_series(1, 50) AS g`)
	late := e.StartWorker(slices.Concat(waits, []string{"TASKRELAY_WORKER_LEASE=60s"})...)
	// A task whose settle was lost with the old primary runs again, and so does one that was running then.
	if lost := l.verdict(2); lost == 0 {
		t.Error("no task was lost with the old primary: the test shows nothing")
	}
	for _, c := range sink.Calls() {
		if strings.HasPrefix(c.BizID, "gone-") {
			t.Errorf("%s was called, its row is gone", c.BizID)
		}
	}
	equal(t, "new tasks done", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id LIKE 'new-%' AND status = 'succeeded'`), 50)
	late.WaitLog(t, soon, "message dropped")
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left in the stream", n)
		}
		return nil
	})
	stillRunning(t, append(all, late)...)
}

// caughtUp waits until a standby has replayed what the primary has written until now.
func caughtUp(t *testing.T, p, s *pgtemp.Server) {
	t.Helper()
	primary, err := pgx.Connect(t.Context(), p.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer primary.Close(t.Context())
	var lsn string
	if err := primary.QueryRow(t.Context(), "SELECT pg_current_wal_insert_lsn()::text").Scan(&lsn); err != nil {
		t.Fatal(err)
	}
	standby, err := pgx.Connect(t.Context(), s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer standby.Close(t.Context())
	testenv.Eventually(t, soon, func() error {
		var there bool
		if err := standby.QueryRow(t.Context(), "SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn", lsn).Scan(&there); err != nil {
			return err
		}
		if !there {
			return errorf("the standby has not replayed %s", lsn)
		}
		return nil
	})
}

// loses says that what is committed between the two may be lost: it was on a server that is gone, and on no other.
func (l *load) loses(from, to time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lag = [2]time.Time{from, to}
}
