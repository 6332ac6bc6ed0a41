//go:build measure

package tests

import (
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// The stream is wiped while 50,000 tasks are unfinished: all of them are published again within a minute. Too much work for
// every run of the tests; make recovery.
func TestStreamOfFiftyThousandTasksWiped(t *testing.T) {
	const types, each = 10, 5_000
	n := testenv.StartNATSProcess(t)
	e := testenv.NewEnv(t, testenv.DB(t), &n.NATSServer)
	e.StartRelay()
	begun := time.Now()
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, payload) SELECT 'TYPE-' || i % $1::int, json_build_object('text', repeat('x', 240))
		FROM generate_series(1, $1::int * $2::int) AS i`, types, each)
	within(t, e, types*each, begun, 2*time.Minute, "published for the first time")
	wiped := time.Now()
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	took := within(t, e, types*each, wiped, 2*time.Minute, "published again")
	if took > time.Minute {
		t.Errorf("published again after %v, the contract says 60 s", took)
	}
	equal(t, "tasks whose generation was raised", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE generation > 0`), 0)
}

// within waits until the stream holds so many messages, and says how long that took.
func within(t *testing.T, e *testenv.Env, messages int, since time.Time, limit time.Duration, what string) time.Duration {
	t.Helper()
	testenv.Eventually(t, limit, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n < uint64(messages) {
			return errorf("%d of %d %s", n, messages, what)
		}
		return nil
	})
	took := time.Since(since)
	t.Logf("%d tasks %s in %v", messages, what, took.Round(time.Millisecond))
	return took
}
