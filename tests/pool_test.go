package tests

import (
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// With the smallest pool that a relay takes, loops whose statements hang hold one connection, and no more: what is
// committed is published meanwhile, and the leases are kept.
func TestBackgroundWorkHoldsOneConnection(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	relay := e.StartRelay("TASKRELAY_DATABASE_URL=" + e.URL + "&application_name=small&pool_max_conns=3")
	e.Insert(t, "ORDER_PAYMENT")
	waitMessages(t, e, 1)

	tx, err := e.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	// What retention, bulks and notices ask for.
	if _, err := tx.Exec(t.Context(), `LOCK TABLE taskrelay.retention, taskrelay.bulk, taskrelay.notice_turn`); err != nil {
		t.Fatal(err)
	}
	const hanging = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'small' AND wait_event_type = 'Lock'`
	published := uint64(1)
	e.Insert(t, "ORDER_PAYMENT")
	e.WaitCount(t, soon, 1, hanging)
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); { // each of these loops looks every second
		published++
		waitMessages(t, e, published)
		// One that was cut off after 5 s may be there until its cancel request has come.
		testenv.Eventually(t, soon, func() error {
			if n := e.Int(t, hanging); n > 1 {
				return errorf("%d connections hang", n)
			}
			return nil
		})
		e.Insert(t, "ORDER_PAYMENT")
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitMessages(t, e, published+1)
	if code := relay.Stop(t, soon); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
