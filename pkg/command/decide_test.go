package command

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/taskrelay/taskrelay/internal/text"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

func testAttempt(phase string, number, limit int) *attempt {
	return &attempt{phase: phase, number: number, limit: limit}
}

func parkUpTo(limit time.Duration) func(time.Duration) bool {
	return func(d time.Duration) bool { return d <= limit }
}

func TestDecide(t *testing.T) {
	flaky := errors.New("flaky")
	failed := func(err error) ending { return ending{err: err, outcome: outcomeFailed} }
	plain := &binding{retry: retry.Fixed{Base: 10 * time.Second}}
	undoing := &binding{retry: retry.Fixed{Base: 10 * time.Second}, compensate: noCompensation}
	for _, c := range []struct {
		name  string
		a     *attempt
		b     *binding
		e     ending
		want  string // action outcome delay reason
		class string
	}{
		{"success", testAttempt(PhaseExecute, 1, 3), plain, ending{}, "succeeded succeeded 0s ", ""},
		{"undone", testAttempt(PhaseCompensate, 1, 3), undoing, ending{}, "dead succeeded 0s ", ""},
		{"error", testAttempt(PhaseExecute, 2, 3), plain, failed(flaky), "nak failed 10s ", "error"},
		{"last error", testAttempt(PhaseExecute, 3, 3), plain, failed(flaky), "fail failed 0s max_attempts", "error"},
		{"last error, undoing", testAttempt(PhaseExecute, 3, 3), undoing, failed(flaky), "compensate failed 0s max_attempts", "error"},
		{"last error, phase compensate", testAttempt(PhaseCompensate, 3, 3), undoing, failed(flaky), "dead failed 0s compensation_failed", "error"},
		{"permanent", testAttempt(PhaseExecute, 1, 3), plain, failed(retry.Permanent(flaky)), "fail failed 0s permanent", "permanent"},
		{"permanent, wrapped", testAttempt(PhaseExecute, 1, 3), plain, failed(fmt.Errorf("x: %w", retry.Permanent(flaky))), "fail failed 0s permanent", "permanent"},
		{"after", testAttempt(PhaseExecute, 1, 3), plain, failed(retry.After(time.Minute, flaky)), "handback failed 1m0s ", "error"},
		{"after, far", testAttempt(PhaseExecute, 1, 3), plain, failed(retry.After(1000*time.Hour, flaky)), "handback failed 24h0m0s ", "error"},
		{"after, used up", testAttempt(PhaseExecute, 3, 3), plain, failed(retry.After(time.Minute, flaky)), "fail failed 0s max_attempts", "error"},
		{"snooze", testAttempt(PhaseExecute, 3, 3), plain, failed(Snooze(time.Second)), "nak snoozed 1s ", ""},
		{"snooze backwards", testAttempt(PhaseExecute, 3, 3), plain, failed(Snooze(-time.Second)), "nak snoozed 0s ", ""},
		{"cancel", testAttempt(PhaseExecute, 1, 3), undoing, failed(Cancel(flaky)), "cancelled cancelled 0s ", ""},
		{"cancel, phase compensate", testAttempt(PhaseCompensate, 1, 3), undoing, failed(Cancel(flaky)), "dead failed 0s compensation_failed", "permanent"},
		{"decode", testAttempt(PhaseExecute, 1, 3), undoing, failed(&classError{class: classDecode, err: flaky}), "dead failed 0s decode", "decode"},
		{"panic", testAttempt(PhaseExecute, 1, 3), plain, ending{err: flaky, outcome: outcomePanic}, "nak panic 10s ", "panic"},
		{"timeout", testAttempt(PhaseExecute, 1, 3), plain, ending{err: flaky, outcome: outcomeTimeout}, "nak timeout 10s ", "timeout"},
		{"timeout, but permanent", testAttempt(PhaseExecute, 1, 3), plain, ending{err: retry.Permanent(flaky), outcome: outcomeTimeout}, "fail failed 0s permanent", "permanent"},
		{"leaked, then compensate", testAttempt(PhaseExecute, 3, 3), undoing, ending{err: flaky, outcome: outcomeTimeout, leaked: true}, "compensate timeout 30s max_attempts", "timeout"},
		{"stopped", testAttempt(PhaseExecute, 3, 3), plain, ending{err: flaky, outcome: outcomeFailed, stopped: true}, "nak released 0s ", "error"},
		{"stopped, but permanent", testAttempt(PhaseExecute, 1, 3), plain, ending{err: retry.Permanent(flaky), outcome: outcomeFailed, stopped: true}, "fail failed 0s permanent", "permanent"},
	} {
		s := decide(c.a, c.b, c.e, 30*time.Second, parkUpTo(30*time.Second))
		got := fmt.Sprintf("%s %s %v %s", s.action, s.outcome, s.delay, s.reason)
		if got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
		if c.name != "stopped" && s.class != c.class {
			t.Errorf("%s: class %q, want %q", c.name, s.class, c.class)
		}
		if counted := s.outcome != outcomeSnoozed && s.outcome != outcomeReleased; s.counted != counted {
			t.Errorf("%s: counted %v, want %v", c.name, s.counted, counted)
		}
	}
}

func TestPolicyThatPanicsOrLiesIsSurvived(t *testing.T) {
	for _, p := range []retry.Policy{
		brokenPolicy(func(int) time.Duration { panic("policy") }),
		brokenPolicy(func(int) time.Duration { return -time.Hour }),
		brokenPolicy(func(int) time.Duration { return 1 << 62 }),
	} {
		if d := policyDelay(p, 1); d < 0 || d > maxDelay {
			t.Errorf("delay %v, want 0 to %v", d, maxDelay)
		}
	}
}

type brokenPolicy func(int) time.Duration

func (p brokenPolicy) Delay(n int) time.Duration { return p(n) }

func TestUsedUp(t *testing.T) {
	undoing := &binding{compensate: noCompensation}
	for want, s := range map[string]*settlement{
		"fail lost":                usedUp(testAttempt(PhaseExecute, 4, 3), &binding{}, time.Second),
		"compensate lost":          usedUp(testAttempt(PhaseExecute, 4, 3), undoing, time.Second),
		"dead compensation_failed": usedUp(testAttempt(PhaseCompensate, 4, 3), undoing, time.Second),
	} {
		if got := s.action + " " + s.reason; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		if s.logged || s.counted || s.delay != time.Second {
			t.Errorf("%s: logged %v, counted %v, delay %v: want no log, no count, a lease's delay", want, s.logged, s.counted, s.delay)
		}
	}
}

func TestJudge(t *testing.T) {
	const created, lease, nakMax = 1000, 30 * time.Second, 30 * time.Second
	row := func(status, phase string, generation int, lease, due time.Duration) rowState {
		return rowState{found: true, status: status, phase: phase, generation: generation, createdMicros: created, lease: lease, due: due}
	}
	for _, c := range []struct {
		name  string
		row   rowState
		want  answer
		delay time.Duration
	}{
		{"missing", rowState{}, answerTerm, 0},
		{"id given out again", rowState{found: true, status: "pending", createdMicros: 1}, answerTerm, 0},
		{"finished", row("succeeded", PhaseExecute, 1, 0, 0), answerAck, 0},
		{"finished and requeued since", row("pending", PhaseExecute, 2, 0, 0), answerAck, 0},
		{"newer than its row", row("pending", PhaseExecute, 0, 0, 0), answerAck, 0},
		{"blocked", row("blocked", PhaseExecute, 1, 0, 0), answerNak, lease},
		{"running", row("running", PhaseExecute, 1, 10*time.Second, 0), answerNak, 10*time.Second + 50*time.Millisecond},
		{"running under a longer lease", row("running", PhaseExecute, 1, time.Hour, 0), answerNak, lease},
		{"early", row("pending", PhaseExecute, 1, 0, 10*time.Second), answerNak, 10*time.Second + time.Millisecond},
		{"much too early", row("retrying", PhaseExecute, 1, 0, time.Hour), answerHandBack, 0},
		{"cannot compensate", row("pending", PhaseCompensate, 1, 0, 0), answerNak, unknownNak},
		{"locked", row("pending", PhaseExecute, 1, 0, 0), answerNak, skippedNak},
		{"ended lease, locked", row("running", PhaseExecute, 1, -time.Second, 0), answerNak, skippedNak},
	} {
		a := &attempt{id: 1, generation: 1, createdMicros: created}
		got, delay, _ := answerTo(a, c.row, false, lease, nakMax)
		if got != c.want || delay != c.delay {
			t.Errorf("%s: got %v after %v, want %v after %v", c.name, got, delay, c.want, c.delay)
		}
	}
}

func TestStorableIsValidShortAndMarked(t *testing.T) {
	for _, s := range []string{"", "plain", "a\x00b", "\xff\xfe", strings.Repeat("ü", 5000), strings.Repeat("\xf0\x9f\x98\x80", 3000),
		strings.Repeat("\xff", 9000), "x" + strings.Repeat("€", 4000)} {
		got := text.Storable(s, maxErrorText)
		if len(got) > maxErrorText || !utf8.ValidString(got) || strings.ContainsRune(got, 0) || strings.ContainsRune(got, utf8.RuneError) {
			t.Errorf("%.20q of %d bytes became %d bytes, valid %v", s, len(s), len(got), utf8.ValidString(got))
		}
		if cut := strings.HasSuffix(got, "… [cut]"); cut != (len(s) > maxErrorText) {
			t.Errorf("%.20q of %d bytes: marked as cut: %v", s, len(s), cut)
		}
	}
	if got := text.Storable("plain", maxErrorText); got != "plain" {
		t.Errorf("got %q", got)
	}
}

func TestParkingForgetsWhatIsOver(t *testing.T) {
	var p parking
	for range 3 {
		if !p.add(0, 5*time.Second, 3) {
			t.Fatal("refused below the limit")
		}
	}
	if p.add(time.Second, time.Second, 3) {
		t.Error("more than the limit are parked")
	}
	if !p.add(7*time.Second, time.Second, 1) {
		t.Error("what is over still counts")
	}
}
