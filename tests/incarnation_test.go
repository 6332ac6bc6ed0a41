package tests

import (
	"context"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Interleaving 3: after a crash of Postgres, transaction ids that were rolled back or not yet on disk are handed out again.
// A position that a relay has in memory, or saves then, would take the new rows for old ones, and nobody would ever read
// them. A poll of an empty table would put it right by chance; so the row comes first here. Without NATS a relay does not
// poll, but it goes on saving.
func TestReusedTransactionIDsAreNotSkipped(t *testing.T) {
	t.Parallel()
	// Here nothing but a commit writes the log to disk.
	p := testenv.PostgresWith(t, map[string]string{"wal_writer_delay": "10s", "bgwriter_delay": "10s"})
	f := &forgetful{Env: testenv.NewEnv(t, testenv.DBOn(t, p), testenv.NATS(t))}
	// The reconciler would find what the rounds skip.
	alone := func(c *outbox.RelayConfig) { c.Reconcile = time.Hour }

	t.Run("a position in memory is dropped", func(t *testing.T) {
		f.t = t
		g, _ := gatedRelay(t, f.Env, alone)
		f.insert()
		f.waitAllInStream()
		before := f.Text(t, `SELECT id::text FROM taskrelay.incarnation`)
		f.untilReused(g, func() (last int64) {
			last = f.burn()
			f.waitPolls(3) // the relay's position is behind them now
			g.cut(true)
			pid := f.Int(t, `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'relay' LIMIT 1`)
			if err := syscall.Kill(int(pid), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			f.Pool.Reset()
			f.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.incarnation`)
			return last
		})
		f.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.incarnation WHERE id::text <> $1`, before)
	})

	t.Run("and not saved", func(t *testing.T) {
		f.t = t
		g, relay := gatedRelay(t, f.Env, alone)
		f.insert()
		f.waitAllInStream()
		f.untilReused(g, func() (last int64) {
			f.burn()
			g.hold(true, "")
			stored := relay.Counts().Published
			var lost int64
			lost, last = f.insertUnwritten()
			f.waitAllInStream() // its row is read, its PubAck held
			if err := p.Kill9(); err != nil {
				t.Fatal(err)
			}
			g.hold(false, "")
			testenv.Eventually(t, soon, func() error {
				if relay.Counts().Published == stored {
					return errorf("the PubAck has not come")
				}
				return nil
			})
			g.cut(true)
			if err := p.Restart(context.Background()); err != nil {
				t.Fatal(err)
			}
			f.Pool.Reset()
			f.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.relay WHERE seen_at > pg_postmaster_start_time()`) // it has saved
			if f.Int(t, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND xid::text::bigint = $2`, lost, last) > 0 {
				return 0
			}
			f.gone++
			return last
		})
	})
}

// forgetful is an environment whose Postgres forgets in a crash what nobody has committed since.
type forgetful struct {
	*testenv.Env
	t    *testing.T
	gone uint64 // rows whose message is in the stream and which a crash has taken
}

// untilReused crashes Postgres until a row gets a transaction id that was used before: another commit (a heartbeat of the
// relay) may have come in between, and then nothing was forgotten. In any case each row is published.
func (f *forgetful) untilReused(g *gate, crash func() (last int64)) {
	f.t.Helper()
	for end := time.Now().Add(soon); time.Now().Before(end); {
		f.waitRenewal()
		last := crash()
		xid := f.insert()
		g.cut(false)
		f.waitAllInStream()
		if xid <= last {
			return
		}
		f.t.Logf("transaction %d was not forgotten, the next row has %d", last, xid)
	}
	f.t.Error("no transaction id was handed out twice: the test shows nothing")
}

// burn uses up transaction ids and rolls back. It returns the last one.
func (f *forgetful) burn() (last int64) {
	f.t.Helper()
	return f.lastValue(strings.Repeat("BEGIN; SELECT pg_current_xact_id(); ROLLBACK;", 100))
}

// insertUnwritten commits a row without waiting for the disk, as a producer may that cares for speed more than for its row.
func (f *forgetful) insertUnwritten() (id, xid int64) {
	f.t.Helper()
	both := f.lastValue(`BEGIN; SET LOCAL synchronous_commit = off;
		INSERT INTO taskrelay.task (biz_type) VALUES ('ORDER_PAYMENT') RETURNING xid::text::bigint << 32 | id; COMMIT`)
	return both & (1<<32 - 1), both >> 32
}

// lastValue runs several statements in one message and returns the last value that one of them yields.
func (f *forgetful) lastValue(sql string) (last int64) {
	f.t.Helper()
	c, err := f.Pool.Acquire(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	defer c.Release()
	results, err := c.Conn().PgConn().Exec(f.t.Context(), sql).ReadAll()
	if err != nil {
		f.t.Fatal(err)
	}
	for _, r := range results {
		if len(r.Rows) > 0 {
			if last, err = strconv.ParseInt(string(r.Rows[0][0]), 10, 64); err != nil {
				f.t.Fatal(err)
			}
		}
	}
	return last
}

// insert commits a row as soon as Postgres takes it.
func (f *forgetful) insert() (xid int64) {
	f.t.Helper()
	testenv.Eventually(f.t, soon, func() error {
		return f.Pool.QueryRow(f.t.Context(), `INSERT INTO taskrelay.task (biz_type) VALUES ('ORDER_PAYMENT') RETURNING xid::text::bigint`).Scan(&xid)
	})
	return xid
}

// messages is how many the stream holds when each row has been published once.
func (f *forgetful) messages() uint64 {
	f.t.Helper()
	return uint64(f.Int(f.t, `SELECT count(*) FROM taskrelay.task`)) + f.gone
}

func (f *forgetful) waitAllInStream() {
	f.t.Helper()
	waitMessages(f.t, f.Env, f.messages())
}

// waitRenewal waits for the commits that a relay makes every two seconds, so that none comes soon.
func (f *forgetful) waitRenewal() {
	f.t.Helper()
	const until = `SELECT max(owner_until)::text FROM taskrelay.lane`
	before := f.Text(f.t, until)
	testenv.Eventually(f.t, soon, func() error {
		if f.Text(f.t, until) == before {
			return errorf("the lanes' leases were not renewed")
		}
		return nil
	})
}

// waitPolls waits until the relay has asked Postgres for news that many times since.
func (f *forgetful) waitPolls(n int) {
	f.t.Helper()
	begun := f.Text(f.t, `SELECT clock_timestamp()::text`)
	seen := map[string]bool{}
	testenv.Eventually(f.t, soon, func() error {
		seen[f.Text(f.t, `SELECT max(query_start)::text FROM pg_stat_activity WHERE datname = current_database()
			AND query LIKE '-- taskrelay: take target%' AND query_start > $1::text::timestamptz`, begun)] = true
		delete(seen, "")
		if len(seen) < n {
			return errorf("%d polls were seen, want %d", len(seen), n)
		}
		return nil
	})
}
