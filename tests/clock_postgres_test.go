package tests

import (
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Issue 3, part 5; C-014, C-016, interleaving 12: Postgres's clock is the only one, and somebody sets it: a day ahead, back
// again, a day behind, and to the night on which summer time begins. Work goes on within seconds, each task is called
// once, and a delay is as long as it says. A relay and a worker die right after the clock was set back, when their leases
// end in the far future.
func TestPostgresClockIsSet(t *testing.T) {
	t.Parallel()
	p, clock := testenv.PostgresWithClock(t)
	e := testenv.NewEnv(t, testenv.DBOn(t, p), testenv.NATS(t))
	e.Exec(t, "ALTER DATABASE "+e.Name+" SET timezone = 'America/New_York'")
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 20 * time.Millisecond})
	vars := testenv.Types(testenv.HTTPType("ORDER_PAYMENT", sink.URL), testenv.HTTPType("RETRIED", sink.URL, "BASE_DELAY", "1s"))
	vars = append(vars, "TASKRELAY_WORKER_LEASE=20s", "TASKRELAY_RETAIN_SUCCEEDED=3650d") // summer time is more than a month away
	start := func() (relay, worker *testenv.Process) {
		return e.StartRelay(vars...), e.StartWorker(vars...)
	}
	relay, worker := start()
	l := startLoad(t, e, sink, "ORDER_PAYMENT", 20*time.Millisecond)
	l.otherClock = true
	l.warmUp(20)

	tomorrow := insertDue(t, e, "12 hours")
	nextWeek := insertDue(t, e, "7 days")
	n := 0
	delaysHold := func(when string) {
		t.Helper()
		n++
		bizID := "retried-" + itoa(int64(n))
		sink.Script(bizID, testenv.Statuses(500, 200)...)
		inserted := time.Now()
		soonDue := insertDue(t, e, "2 seconds")
		retried := e.Insert(t, "RETRIED", "biz_id", bizID)
		later := insertDue(t, e, "1 hour")
		e.WaitStatus(t, soon, soonDue, "succeeded")
		e.WaitStatus(t, soon, retried, "succeeded")
		if d := sink.CallsOf(soonDue)[0].At.Sub(inserted); d < 1900*time.Millisecond || d > 15*time.Second {
			t.Errorf("%s: a task due in 2s ran after %v", when, d)
		}
		if c := sink.CallsOf(retried); len(c) != 2 || c[1].At.Sub(c[0].Ended) < 950*time.Millisecond || c[1].At.Sub(c[0].Ended) > 15*time.Second {
			t.Errorf("%s: %d attempts, want two with 1s between them", when, len(c))
		}
		if calls := len(sink.CallsOf(later)); calls != 0 {
			t.Errorf("%s: a task due in an hour was called %d times", when, calls)
		}
		e.Exec(t, `DELETE FROM taskrelay.task WHERE id = $1`, later)
	}
	set := func(what string, offset time.Duration) {
		t.Helper()
		clock.Set(t, offset)
		testenv.Eventually(t, soon, func() error {
			var off float64
			e.Scan(t, `SELECT extract(epoch FROM clock_timestamp())::float8 - $1::float8`, []any{float64(time.Now().UnixMilli()) / 1000}, &off)
			if d := off - offset.Seconds(); d < -60 || d > 60 {
				return errorf("Postgres's clock is off by %v s, want %v", off, offset.Seconds())
			}
			return nil
		})
		l.recovery("clock of Postgres: "+what, time.Now(), 15*time.Second)
	}

	const day = 24 * time.Hour
	set("a day ahead", day)
	e.WaitStatus(t, soon, tomorrow, "succeeded") // by the only clock it was due
	delaysHold("a day ahead")
	l.sink.WaitCalls(t, soon, 1)
	clock.Set(t, 0)
	relay.Kill9(t) // its lanes are leased until tomorrow
	relay2, worker2 := start()
	l.recovery("clock of Postgres: set back, and the relay killed", time.Now(), 25*time.Second)
	delaysHold("set back")
	if *soak {
		set("a day behind", -day)
		delaysHold("a day behind")
		set("right again", 0)
		delaysHold("right again")
	}
	// Summer time begins on the second Sunday of March at 07:00 UTC, in New York. Two seconds before it.
	eve := time.Date(time.Now().Year()+1, time.March, 8, 6, 59, 58, 0, time.UTC)
	for eve.Weekday() != time.Sunday {
		eve = eve.AddDate(0, 0, 1)
	}
	set("the eve of summer time", time.Until(eve))
	delaysHold("as summer time begins")
	e.WaitCount(t, soon, 1, `SELECT count(*) WHERE (clock_timestamp() AT TIME ZONE 'America/New_York')::time >= '03:00'`) // it was 01:59
	e.WaitStatus(t, soon, nextWeek, "succeeded")
	l.verdict(1)
	stillRunning(t, worker, relay2, worker2)
}

// What a clock that was a day ahead leaves behind when it is set back: leases that end tomorrow, of a relay and a worker
// that are gone. No lease is that long, so they are over. Nor does a bulk, a notice or the full pass of retention wait for then.
func TestLeasesThatEndTomorrowAreOver(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.Exec(t, `INSERT INTO taskrelay.relay (name, host, pid, version, seen_at) VALUES ('gone', 'host', 1, 'test', now() + interval '1 day')`)
	e.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority, owner, owner_until) SELECT 'TYPE_' || g, 'low', 'gone', now() + interval '1 day'
		FROM generate_series(1, 8) AS g`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'TYPE_' || g FROM generate_series(1, 8) AS g`)
	deadTasks(t, e.Database, "DIED", 1)
	for _, bulk := range []string{`owner = 'gone', owner_until = now() + interval '1 day'`, `next_at = now() + interval '1 day'`} {
		e.Exec(t, `SELECT taskrelay.start_bulk('discard', '{"type": "DIED"}', 'x', rate => 100)`)
		e.Exec(t, `UPDATE taskrelay.bulk SET filter = filter || jsonb_build_object('error', id::text), `+bulk+` WHERE id = (SELECT max(id) FROM taskrelay.bulk)`)
	}
	e.Exec(t, `UPDATE taskrelay.retention SET owner = 'gone', owner_until = now() + interval '1 day', full_at = now() + interval '1 day'`)
	e.Exec(t, `INSERT INTO taskrelay.notice (id, biz_type, event, task_id, attempts, reason, error, error_class, compensation, happened_at)
		SELECT n, n, 'dead', 1, 1, 'lost', '', '', 'none', now() FROM (VALUES ('TAKEN'), ('RESTS')) AS v (n)`)
	e.Exec(t, `INSERT INTO taskrelay.notice_turn (biz_type, next_at, taken_by, taken_until) VALUES
		('TAKEN', now(), 'gone', now() + interval '1 day'), ('RESTS', now() + interval '1 day', NULL, NULL)`)
	e.StartRelay()
	// None waits for tomorrow, and the one that is gone gets no share of them again and again.
	waitMessages(t, e, 8)
	began := time.Now()
	testenv.Never(t, 3*time.Second, func() error {
		if n := e.Int(t, `SELECT count(*) FROM taskrelay.lane WHERE owner IS NULL OR owner = 'gone'`); n != 0 && time.Since(began) > time.Second {
			return errorf("%d lanes are left to a relay that is gone", n)
		}
		return nil
	})
	e.WaitCount(t, soon, 2, `SELECT count(*) FROM taskrelay.bulk WHERE state = 'done'`)
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.notice`)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.retention WHERE full_at <= clock_timestamp()`)
	// As the claim of a worker left it that was killed then. Its message comes again after AckWait.
	e.Exec(t, `UPDATE taskrelay.task SET status = 'running', attempt = 1, lease_owner = 'gone', lease_token = 1,
		started_at = now() + interval '1 day', lease_until = now() + interval '1 day 30 s' WHERE biz_type = 'TYPE_1'`)
	e.StartWorker(testenv.HTTPType("TYPE_1", sink.URL)...)
	id := e.Int(t, `SELECT id FROM taskrelay.task WHERE biz_type = 'TYPE_1'`)
	e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "outcomes", e.Text(t, `SELECT string_agg(outcome, ' ' ORDER BY outcome) FROM taskrelay.task_attempt WHERE task_id = $1`, id), "lost succeeded")
	equal(t, "calls", len(sink.CallsOf(id)), 1)
}

// insertDue inserts a task that is due after a while, by Postgres's clock.
func insertDue(t *testing.T, e *testenv.Env, in string) (id int64) {
	t.Helper()
	e.Scan(t, `INSERT INTO taskrelay.task (biz_type, run_at) VALUES ('ORDER_PAYMENT', clock_timestamp() + $1::text::interval) RETURNING id`, []any{in}, &id)
	return id
}

// C-013, C-014: the zone of a session comes from the URL, or from the role; values travel as text or in binary. None of
// that moves an instant, nor do times that exist twice or not at all on a local clock.
func TestTimeZonesOfURLsAndRoles(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("retried", testenv.Statuses(500, 200)...)
	role := "zone_" + e.Name
	e.Exec(t, "CREATE ROLE "+role+" SUPERUSER LOGIN PASSWORD 'zone'; ALTER ROLE "+role+" SET timezone = 'America/New_York'; ALTER ROLE "+role+" SET datestyle = 'Postgres, DMY'")
	t.Cleanup(func() {
		if err := pgxExec(e, "DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	byRole, err := url.Parse(e.URL)
	if err != nil {
		t.Fatal(err)
	}
	byRole.User = url.UserPassword(role, "zone")
	relay := e.StartRelay("TASKRELAY_DATABASE_URL=" + e.URL + "&TimeZone=Asia/Shanghai&default_query_exec_mode=simple_protocol")
	worker := e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "BASE_DELAY", "1s"), "TASKRELAY_DATABASE_URL="+byRole.String())...)
	producer := openPool(t, e.URL+"&TimeZone=America/New_York", func(c *pgxpool.Config) { c.MaxConns = 1 })
	insert := func(due string) (id int64) {
		t.Helper()
		err := producer.QueryRow(t.Context(), `INSERT INTO taskrelay.task (biz_type, run_at) VALUES ('ORDER_PAYMENT', `+due+`) RETURNING id`).Scan(&id)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	began := time.Now()
	at := insert(`to_char(clock_timestamp() + interval '2 seconds', 'YYYY-MM-DD HH24:MI:SS.US')::timestamptz`)
	past := []int64{
		insert(`'2026-03-08 02:30'`), // not on New York's clocks: they went from 02:00 to 03:00
		insert(`'2026-11-01 01:30'`), // twice on them
		insert(`'1883-11-18 12:03:57'`),
		insert(`'-infinity'`),
	}
	future := []int64{insert(`'2100-03-14 02:30'`), insert(`'infinity'`), insert(`'294276-12-31'`)}
	retried := e.Insert(t, "ORDER_PAYMENT", "biz_id", "retried")
	now := append(past, at, retried)
	e.WaitCount(t, soon, int64(len(now)), `SELECT count(*) FROM taskrelay.task WHERE id = ANY ($1::bigint[]) AND status = 'succeeded'`, now)
	if d := sink.CallsOf(at)[0].At.Sub(began); d < 1900*time.Millisecond || d > 20*time.Second {
		t.Errorf("a task due in 2s ran after %v", d)
	}
	if c := sink.CallsOf(retried); len(c) != 2 || c[1].At.Sub(c[0].Ended) < 950*time.Millisecond {
		t.Errorf("%d attempts, want two with 1s between them", len(c))
	}
	for _, id := range future {
		equal(t, "state of a task of the far future", e.Text(t, `SELECT status FROM taskrelay.task WHERE id = $1`, id), "pending")
		equal(t, "calls of it", len(sink.CallsOf(id)), 0)
	}
	stillRunning(t, relay, worker)
}
