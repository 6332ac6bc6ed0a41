package tests

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// doctorReport is what the tests look at of doctor's JSON.
type doctorReport struct {
	Healthy  bool `json:"healthy"`
	Postgres struct {
		Reachable bool `json:"reachable"`
	} `json:"postgres"`
	NATS struct {
		Reachable bool `json:"reachable"`
		Streams   []struct{ Name string }
	} `json:"nats"`
	Lanes []struct {
		BizType  string `json:"biz_type"`
		Priority string `json:"priority"`
		Open     int64  `json:"open"`
		Running  int64  `json:"running"`
		Messages int64  `json:"messages"`
		Lost     int64  `json:"lost"`
		Stale    int64  `json:"stale"`
		Compared bool   `json:"compared"`
	} `json:"lanes"`
	Workers []struct {
		Name     string `json:"name"`
		Leases   int    `json:"leases"`
		OldestID string `json:"oldest_id"`
		OldestMS int64  `json:"oldest_ms"`
	} `json:"workers"`
	Findings []struct {
		Level string   `json:"level"`
		Code  string   `json:"code"`
		Where string   `json:"where"`
		Relay string   `json:"relay"`
		You   string   `json:"you"`
		IDs   []string `json:"ids"`
	} `json:"findings"`
	Fixed []struct {
		Code, Did, Error string
	} `json:"fixed"`
}

func (r doctorReport) codes() (codes []string) {
	for _, f := range r.Findings {
		codes = append(codes, f.Code)
	}
	return codes
}

// doctor runs the command and reads its JSON; each finding must say what happens and what to do.
func doctor(t *testing.T, e *testenv.Env, wantCode int, args ...string) (r doctorReport) {
	t.Helper()
	out, code := e.CLI(append([]string{"doctor", "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("doctor: %v\n%s", err, out)
	}
	if code != wantCode {
		t.Fatalf("exit code %d, want %d:\n%s", code, wantCode, out)
	}
	for _, f := range r.Findings {
		if f.Relay == "" || f.You == "" || f.Where == "" {
			t.Errorf("finding %s does not say what happens, what to do or where: %+v", f.Code, f)
		}
	}
	return r
}

// alive makes a worker of the type known that is in no process.
func alive(t *testing.T, e *testenv.Env, name, bizType, seen string) {
	t.Helper()
	e.Exec(t, `INSERT INTO taskrelay.worker (name, host, pid, biz_types, seen_at) VALUES ($1, 'here', 1, ARRAY[$2], now() - $3::interval)`, name, bizType, seen)
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ($1, $2) ON CONFLICT DO NOTHING`, bizType, name)
}

// makeStreams has a relay make the streams, and stops it.
func makeStreams(t *testing.T, e *testenv.Env) {
	t.Helper()
	relay := e.RunRelay()
	e.NATS.WaitStream(t, "TASKS_EVENTS") // the last of them
	relay.Stop()
}

func seldom(c *outbox.RelayConfig) { c.Reconcile = time.Hour }

func TestDoctorFindsNothingWhereAllIsWell(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var reg command.Registry
	var g gates
	register(t, &reg, "ORDER_PAYMENT", fast(g.execute))
	e.RunRelay()
	e.RunWorker(&reg)
	var ids []int64
	for range 3 {
		ids = append(ids, e.Insert(t, "ORDER_PAYMENT"))
	}
	later := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Hour))
	for _, id := range ids {
		g.waitRunning(t, id)
	}
	close(g.of(ids[0]))
	e.WaitStatus(t, soon, ids[0], "succeeded")
	r := doctor(t, e, 0)
	if len(r.Findings) != 0 || !r.Healthy {
		t.Errorf("findings: %+v", r.Findings)
	}
	for _, l := range r.Lanes {
		if l.BizType == "ORDER_PAYMENT" && l.Priority == "low" && (l.Running != 2 || l.Messages != 2 || !l.Compared) {
			t.Errorf("lane: %+v", l)
		}
	}
	if len(r.Workers) != 1 || r.Workers[0].Leases != 2 {
		t.Errorf("workers: %+v", r.Workers)
	}
	out, code := e.CLI("doctor")
	if code != 0 || !strings.Contains(out, "Nothing is wrong.") || !strings.Contains(out, "ORDER_PAYMENT") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
	equal(t, "the task of later", e.Task(t, later).Status, "pending")
	for _, id := range ids[1:] {
		close(g.of(id))
	}
}

// A message is lost of three tasks: one was read by position, one waits for its retry as a nak, one is on the work list.
// doctor names exactly these, and --fix has them published at once, with an entry in the audit for each.
func TestDoctorNamesTasksWithoutAMessageAndFixesThem(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(seldom)
	alive(t, e, "w", "ORDER_PAYMENT", "1 second")
	_, err := e.NATS.WaitStream(t, "TASKS").CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "ORDER_PAYMENT-low",
		FilterSubject: "tasks.ORDER_PAYMENT.low", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: -1})
	if err != nil {
		t.Fatal(err)
	}
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 5)`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, status, generation, attempt, next_attempt_at, republish_at)
		SELECT 'ORDER_PAYMENT', 'retrying', 1, 4, now(), now() FROM generate_series(1, 2)`)
	waitMessages(t, e, 7)
	e.WaitCount(t, soon, 2, `SELECT count(*) FROM taskrelay.task WHERE republish_at > now() + interval '5 minutes'`)
	e.WaitCount(t, soon, 5, `SELECT count(*) FROM taskrelay.task_view WHERE delivery = 'published' AND generation = 0`) // the position is saved
	if r := doctor(t, e, 0); len(r.Findings) != 0 {
		t.Fatalf("before anything is lost: %+v", r.Findings)
	}

	s := e.NATS.WaitStream(t, "TASKS")
	lost := []string{"2", "6"}
	for seq := uint64(1); seq <= 7; seq++ {
		m, err := s.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(lost, m.Header.Get(outbox.HeaderID)) {
			if err := s.DeleteMsg(t.Context(), seq); err != nil {
				t.Fatal(err)
			}
		}
	}
	r := doctor(t, e, 6)
	if len(r.Findings) != 1 || r.Findings[0].Code != "message_lost" || !slices.Equal(r.Findings[0].IDs, lost) {
		t.Fatalf("findings: %+v", r.Findings)
	}
	if !strings.Contains(r.Findings[0].Relay, "again in") {
		t.Errorf("it does not say when the relay looks again: %s", r.Findings[0].Relay)
	}
	equal(t, "messages after a look alone", e.NATS.Messages(t, "TASKS"), 5)

	r = doctor(t, e, 0, "--fix", "--reason", "deleted by hand")
	if len(r.Fixed) != 1 || r.Fixed[0].Error != "" || !strings.HasPrefix(r.Fixed[0].Did, "2 of 2") {
		t.Errorf("fixed: %+v", r.Fixed)
	}
	waitMessages(t, e, 7)
	equal(t, "tasks whose generation was raised", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE generation > 1`), 0)
	equal(t, "entries of the audit", e.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE action = 'look_again' AND reason = 'deleted by hand' AND actor LIKE 'cli:%'`), 2)
	if r := doctor(t, e, 0); len(r.Findings) != 0 {
		t.Errorf("after the fix: %+v", r.Findings)
	}
}

// A consumer that has done with messages that are there: --fix deletes it, and writes down who did.
func TestDoctorDeletesAConsumerThatDoesNotKnowItsMessages(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(seldom)
	alive(t, e, "w", "ORDER_PAYMENT", "1 second")
	e.Insert(t, "ORDER_PAYMENT")
	waitMessages(t, e, 1)
	stream := e.NATS.WaitStream(t, "TASKS")
	// A server cannot be told to forget; a consumer of that name with another lane's messages knows as little of ours.
	_, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "ORDER_PAYMENT-low",
		FilterSubject: "tasks.OTHER.low", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: -1})
	noError(t, "consumer", err)
	r := doctor(t, e, 0, "--fix", "--reason", "torn by a crash")
	if len(r.Fixed) != 1 || r.Fixed[0].Error != "" || r.Fixed[0].Code != "message_orphaned" {
		t.Errorf("fixed: %+v", r.Fixed)
	}
	if _, err := stream.Consumer(t.Context(), "ORDER_PAYMENT-low"); !errors.Is(err, jetstream.ErrConsumerNotFound) {
		t.Errorf("the consumer is still there: %v", err)
	}
	equal(t, "audit", e.Text(t, `SELECT concat_ws(' ', action, biz_type, before->>'consumer', reason, actor LIKE 'cli:%') FROM taskrelay.audit`),
		"delete_consumer ORDER_PAYMENT ORDER_PAYMENT-low torn by a crash t")
}

// A worker that hangs with leases, one that is gone without a trace, a lease that has ended, a type nobody knows.
func TestDoctorTellsOfWorkersAndLeases(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	alive(t, e, "hangs", "ORDER_PAYMENT", "10 minutes")
	alive(t, e, "works", "ORDER_PAYMENT", "1 second")
	run := func(owner, lease string) (id int64) {
		e.Scan(t, `INSERT INTO taskrelay.task (biz_type, status, attempt, lease_token, lease_owner, lease_until, started_at)
			VALUES ('ORDER_PAYMENT', 'running', 1, 1, $1, now() + $2::interval, now() - interval '2 hours') RETURNING id`, []any{owner, lease}, &id)
		return id
	}
	stuck, _, gone, ended := run("hangs", "20 minutes"), run("hangs", "20 minutes"), run("nobody", "20 minutes"), run("gone long ago", "-1 minute")
	e.Insert(t, "REFUND")
	_ = ended
	r := doctor(t, e, 6)
	find := func(code, where string) (ids []string) {
		t.Helper()
		for _, f := range r.Findings {
			if f.Code == code && f.Where == where {
				return append(f.IDs, "found")
			}
		}
		t.Errorf("no finding %s at %s in %v", code, where, r.codes())
		return nil
	}
	if ids := find("worker_stuck", "hangs"); !slices.Contains(ids, itoa(stuck)) && !slices.Contains(ids, itoa(stuck+1)) {
		t.Errorf("the stuck worker's oldest task is not named: %v", ids)
	}
	if ids := find("worker_gone", "nobody"); !slices.Contains(ids, itoa(gone)) {
		t.Errorf("the task of a worker that is gone is not named: %v", ids)
	}
	find("lease_ended", "ORDER_PAYMENT low")
	find("no_worker", "REFUND low")
	find("no_relay", "relays")
	find("stream_missing", "TASKS")
	for _, w := range r.Workers {
		if w.Name == "hangs" && (w.Leases != 2 || w.OldestMS < 7_000_000) {
			t.Errorf("the worker that hangs: %+v", w)
		}
	}
	out, code := e.CLI("doctor")
	if code != 6 || !strings.Contains(out, "PROBLEM hangs: ") || !strings.Contains(out, "holds 2 leases, the oldest task for 2h0m") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
}

// The stream was made anew while no relay ran, carries a message of somebody else, and has a setting that loses tasks.
func TestDoctorTellsOfStreams(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	makeStreams(t, e)
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	_, err := e.NATS.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "TASKS", Subjects: []string{"tasks.*.*"}, Retention: jetstream.WorkQueuePolicy,
		Discard: jetstream.DiscardOld, AllowDirect: true})
	if err != nil {
		t.Fatal(err)
	}
	alive(t, e, "w", "ORDER_PAYMENT", "1 second")
	e.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority) VALUES ('ORDER_PAYMENT', 'low') ON CONFLICT DO NOTHING`)
	m := nats.NewMsg("tasks.ORDER_PAYMENT.low")
	m.Header.Set(outbox.HeaderInstallation, "somebody else's")
	if _, err := e.NATS.JS.PublishMsg(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	r := doctor(t, e, 6, "--fix")
	for _, want := range []string{"no_relay", "stream_unsafe", "stream_made_anew", "message_foreign", "consumer_missing"} {
		if !slices.Contains(r.codes(), want) {
			t.Errorf("no finding %s in %v", want, r.codes())
		}
	}
	equal(t, "losses asked for", e.Int(t, `SELECT losses FROM taskrelay.installation`), 1)
	equal(t, "entries of the audit", e.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE action = 'rescan'`), 1)
}

// What is asked for is done: a stream that has lost messages in a way that the relay cannot see, and letters that somebody
// deleted.
func TestRescanAndReplayLettersAreDoneAtOnce(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(seldom)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 20)`)
	waitMessages(t, e, 20)
	dead := e.Insert(t, "REFUND")
	waitMessages(t, e, 21)
	e.Exec(t, `UPDATE taskrelay.task SET status = 'dead', finished_at = now(), dead_at = now(), dead_reason = 'permanent' WHERE id = $1`, dead)
	waitLetter(t, e, "REFUND", dead)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	for _, name := range []string{"TASKS", "TASKS_DEAD"} {
		if err := e.NATS.WaitStream(t, name).Purge(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	r := doctor(t, e, 6)
	if !slices.Contains(r.codes(), "letters_missing") {
		t.Errorf("findings: %v", r.codes())
	}
	e.Exec(t, `SELECT taskrelay.rescan('purged by hand'), taskrelay.replay_letters('purged by hand')`)
	waitMessages(t, e, 20)
	letter := waitLetter(t, e, "REFUND", dead)
	equal(t, "Task-Replayed", letter.Header.Get("Task-Replayed"), "true")
}

func TestDoctorWorksWithOneServerDown(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	makeStreams(t, e)
	none := "127.0.0.1:1"
	r := doctor(t, e, 7, "--nats-url", "nats://"+none)
	if !r.Postgres.Reachable || r.NATS.Reachable || !slices.Contains(r.codes(), "nats_down") {
		t.Errorf("NATS down: %+v", r)
	}
	r = doctor(t, e, 7, "--database-url", "postgres://app:hunter2@"+none+"/x")
	if r.Postgres.Reachable || !r.NATS.Reachable || len(r.NATS.Streams) != 3 || !slices.Contains(r.codes(), "postgres_down") {
		t.Errorf("Postgres down: %+v", r)
	}
	out, code := e.CLI("doctor", "--database-url", "postgres://app:hunter2@"+none+"/x", "--nats-url", "nats://"+none)
	if code != 7 || !strings.Contains(out, "PROBLEM postgres") || !strings.Contains(out, "PROBLEM nats") || strings.Contains(out, "hunter2") {
		t.Errorf("both down, exit code %d:\n%s", code, out)
	}
}

// Interleaving 14 by hand: the command gives copied rows a new place, and says so in the audit.
func TestRepositionCommand(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	makeStreams(t, e)
	e.Exec(t, `INSERT INTO taskrelay.lane (biz_type, priority) VALUES ('ORDER_PAYMENT', 'low') ON CONFLICT DO NOTHING`)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, xid) SELECT 'ORDER_PAYMENT', '90000000000' FROM generate_series(1, 20)`)
	if r := doctor(t, e, 6); !slices.Contains(r.codes(), "rows_of_another_cluster") {
		t.Errorf("findings: %v", r.codes())
	}
	out, code := e.CLI("reposition", "-o", "json", "--reason", "restored")
	var did outbox.Repositioned
	if err := json.Unmarshal([]byte(out), &did); err != nil || code != 0 || !did.ForeignRows || did.Rows != 20 {
		t.Fatalf("exit code %d, %v: %s", code, err, out)
	}
	equal(t, "rows ahead of the cluster", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())`), 0)
	equal(t, "entries of the audit", e.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE action = 'reposition' AND reason = 'restored' AND after->>'rows' = '20'`), 1)
	out, code = e.CLI("reposition")
	if code != 0 || !strings.Contains(out, "false\tfalse\t0") {
		t.Errorf("a second time, exit code %d:\n%s", code, out)
	}
}
