package faults

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

var (
	duration = flag.Duration("duration", 0, "how long faults go on; by default the short form, which has limits of its own")
	seed     = flag.Uint64("seed", 1, "which faults come in which order, and which tasks")
	rate     = flag.Int("rate", 120, "tasks a second, about")
	logs     = flag.String("logs", "", "a directory for the logs of all processes, at level debug; by default none are kept")
	only     = flag.String("only", "", "a regular expression for the names of the faults that may come; by default all")
)

// summary is the last line printed.
var summary string

func TestMain(m *testing.M) {
	testenv.Main(m, func() {
		if summary != "" {
			fmt.Fprintln(os.Stdout, summary)
		}
	})
}

// Issue 3: whatever dies, a committed task is done or visibly dead, a stale worker changes nothing, and nobody repairs
// by hand.
func TestNothingIsLostWhateverDies(t *testing.T) {
	o := options{duration: *duration, seed: *seed, rate: *rate, only: regexp.MustCompile(*only), logs: *logs, pairs: 0.3,
		patience: 60 * time.Second, deadline: 2 * time.Minute, mostOpen: 5000}
	if o.duration == 0 { // little time: mostly two faults at once, and no long wait for a recovery that is only measured
		o.duration, o.pairs, o.patience, o.deadline, o.mostOpen = 20*time.Second, 0.7, 10*time.Second, time.Minute, 1500
	}
	summary = "the run did not come to its end"
	c := newRun(t, o)
	c.began = time.Now()
	stop := c.produce()
	testenv.Eventually(t, 30*time.Second, func() error {
		if n := len(c.target.all()); n < 2*o.rate {
			return fmt.Errorf("%d calls have come, faults begin after %d", n, 2*o.rate)
		}
		return nil
	})
	c.breakThings()
	stop()
	c.note("the faults have stopped, seed %d", o.seed)
	c.quiesce()

	v := check(c.collect())
	t.Logf("recovery: everything due has been begun\n%s", &c.results)
	for _, text := range v.text {
		t.Error(text)
	}
	if v.violations() > 0 {
		t.Errorf("%d violations; run again with -seed=%d", v.violations(), o.seed)
	}
	if v.tasks < o.rate {
		t.Errorf("%d tasks were made: too few to prove anything", v.tasks)
	}
	summary = v.String()
}
