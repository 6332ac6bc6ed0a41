package pause

import (
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
)

func TestPausesGrowAndNeverEnd(t *testing.T) {
	p := Growing(50*time.Millisecond, 2*time.Second)
	now := time.Now()
	p.Clock = clock{&now}
	p.Reset()
	for i := range 1000 {
		d := p.NextBackOff()
		if d == backoff.Stop || d < 25*time.Millisecond || d > 3*time.Second {
			t.Fatalf("pause %d is %v", i, d)
		}
		if i == 0 && d > 75*time.Millisecond || i > 20 && d < time.Second {
			t.Errorf("pause %d is %v", i, d)
		}
		now = now.Add(time.Hour)
	}
}

type clock struct{ now *time.Time }

func (c clock) Now() time.Time { return *c.now }
