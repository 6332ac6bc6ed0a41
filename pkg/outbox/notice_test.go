package outbox

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestNoticePausesGrowAndEnd(t *testing.T) {
	var last time.Duration
	for tries := range 12 {
		pause := noticePause(tries)
		nominal := min(2*time.Second<<tries, 5*time.Minute)
		if pause < nominal*79/100 || pause > nominal*121/100 {
			t.Errorf("after %d tries: %v, want %v or a fifth more or less", tries, pause, nominal)
		}
		last = pause
	}
	if far := noticePause(1_000_000); far > 6*time.Minute+time.Second || last < 4*time.Minute {
		t.Errorf("after a million tries %v, after twelve %v", far, last)
	}
}

func TestNotifiersOfAConfiguration(t *testing.T) {
	ok := func(context.Context, Notice) error { return nil }
	for name, c := range map[string]struct {
		cfg  RelayConfig
		want string
	}{
		"nothing":          {RelayConfig{}, ""},
		"own":              {RelayConfig{Notifiers: map[string]Notifier{"mine": ok}, DefaultNotifier: "mine"}, ""},
		"own log":          {RelayConfig{Notifiers: map[string]Notifier{"log": ok}}, ""},
		"no function":      {RelayConfig{Notifiers: map[string]Notifier{"mine": nil}}, "mine"},
		"no name":          {RelayConfig{Notifiers: map[string]Notifier{"": ok}}, "notifier name"},
		"unknown default":  {RelayConfig{Notifiers: map[string]Notifier{"mine": ok}, DefaultNotifier: "mien"}, "mine, log"},
		"interval too low": {RelayConfig{NoticeInterval: time.Millisecond}, "at least 1s"},
	} {
		_, err := c.cfg.withDefaults()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}

// What a notifier does with its time: one that heeds its context says why it failed, one that ignores it is left alone,
// and is not called again before it has returned.
func TestNotifierHasItsTimeAndNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		heeds := &notifying{notify: func(ctx context.Context, _ Notice) error {
			<-ctx.Done()
			return errors.New("the pager did not answer")
		}}
		began := time.Now()
		if err := heeds.call(t.Context(), Notice{}); err == nil || err.Error() != "the pager did not answer" || heeds.running != nil {
			t.Errorf("got %v", err)
		}
		if took := time.Since(began); took != noticeTimeout {
			t.Errorf("it had %v, want %v", took, noticeTimeout)
		}
		release := make(chan struct{})
		ignores := &notifying{notify: func(context.Context, Notice) error { <-release; return nil }}
		if err := ignores.call(t.Context(), Notice{}); err == nil || ignores.running == nil {
			t.Errorf("got %v, running %v", err, ignores.running)
		}
		if took := noticeTimeout + time.Second; took >= stalled {
			t.Errorf("a notifier may take %v, and a loop that takes %v counts as dead", took, stalled)
		}
		close(release)
		if err := <-ignores.running; err != nil {
			t.Errorf("what it returned in the end: %v", err)
		}
		panics := &notifying{notify: func(context.Context, Notice) error { panic("a bug") }}
		if err := panics.call(t.Context(), Notice{}); !errors.Is(err, errNotifierPanic) || !strings.Contains(err.Error(), "a bug") {
			t.Errorf("got %v", err)
		}
	})
}

func TestNoticeOfManyNamesSomeAndCountsAll(t *testing.T) {
	n := Notice{BizType: "ORDER_PAYMENT", Event: EventCompensationFailed, Count: 120,
		Counts: map[string]int{EventCompensationFailed: 2, EventDead: 108, EventFailed: 10},
		Tasks: []NoticeTask{
			{ID: 42, BizID: "O-1\nX", Event: EventCompensationFailed, Attempts: 3, Reason: "compensation_failed", Error: strings.Repeat("支", 500)},
			{ID: 43, Event: EventDead, Attempts: 10, Reason: "max_attempts"},
		}}
	if got, want := n.Subject(), "taskrelay: COMPENSATION FAILED: ORDER_PAYMENT: 2 dead and not undone, 108 dead, 10 failed for good, compensation has begun"; got != want {
		t.Errorf("subject: got %q, want %q", got, want)
	}
	text := n.Text()
	for _, want := range []string{"O-1 X dead and not undone after 3 attempts", "118 more", "taskrelay dead list --type ORDER_PAYMENT", "taskrelay requeue --type ORDER_PAYMENT"} {
		if !strings.Contains(text, want) {
			t.Errorf("the text has no %q:\n%s", want, text)
		}
	}
	if len(text) > 2000 {
		t.Errorf("an error of 500 runes makes a text of %d bytes", len(text))
	}
	onlyFailed := Notice{BizType: "A", Event: EventFailed, Count: 2, Counts: map[string]int{EventFailed: 2}, Tasks: []NoticeTask{{ID: 1, Event: EventFailed}, {ID: 2, Event: EventFailed}}}
	if text := onlyFailed.Text(); strings.Contains(text, "requeue") || onlyFailed.Grave() {
		t.Errorf("a task that is being compensated is not to be requeued:\n%s", text)
	}
}
