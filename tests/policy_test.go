package tests

import (
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Interleaving 13: a round never passes a row for policy. What waited for its type to be allowed, or to be resumed, is
// published then, and other lanes do not wait with it.
func TestLaneThatMayNotPublishDoesNotMove(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `UPDATE taskrelay.installation SET strict_types = true`)
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('KNOWN', 'test')`)
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by, paused_at) VALUES ('PAUSED', 'test', now())`)
	for range 3 {
		e.Insert(t, "STRANGE")
		e.Insert(t, "PAUSED")
	}
	e.RunRelay()
	e.Insert(t, "KNOWN")
	waitMessages(t, e, 1)
	e.Insert(t, "STRANGE", "run_at", time.Now().Add(-time.Hour))
	testenv.Never(t, 3*time.Second, func() error { // longer than the relay takes to read its settings again
		if n := e.NATS.Messages(t, "TASKS"); n != 1 {
			return errorf("%d messages, want 1", n)
		}
		return nil
	})
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('STRANGE', 'test')`)
	waitMessages(t, e, 5)
	e.Exec(t, `UPDATE taskrelay.biz_type SET paused_at = NULL`)
	waitMessages(t, e, 8)
}
