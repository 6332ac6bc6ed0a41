package outbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// pretender is the other end of a connection to NATS: it says what a server says first, answers pings, and to each publish
// what the test wants.
type pretender struct{ answer func(subject string) string }

func (p pretender) Dial(_, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	go func() {
		defer server.Close()
		out := make(chan string, 1000)
		defer close(out)
		go func() {
			for text := range out {
				if _, err := server.Write([]byte(text)); err != nil {
					client.Close()
				}
			}
		}()
		out <- `INFO {"server_id":"x","version":"2.15.0","proto":1,"max_payload":1048576,"headers":true}` + "\r\n"
		lines := bufio.NewScanner(server)
		for lines.Scan() {
			words := strings.Fields(lines.Text())
			switch {
			case len(words) == 0:
			case words[0] == "PING":
				out <- "PONG\r\n"
			case words[0] == "HPUB", words[0] == "PUB":
				out <- p.answer(words[1])
			}
		}
	}()
	return client, nil
}

func (p pretender) connect(t *testing.T, theirs nats.ErrHandler) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("nats://pretender:4222", nats.SetCustomDialer(p), nats.ErrorHandler(theirs))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// A server does not answer a publish that it refuses. What is in flight to that subject ends at once, and nothing else
// does; the connection's own handler hears of it once.
func TestRefusedPublishEndsAtOnce(t *testing.T) {
	var heard, other atomic.Int32
	nc := pretender{func(subject string) string {
		if subject == "tasks.OTHER.low" {
			return ""
		}
		return fmt.Sprintf("-ERR 'Permissions Violation for Publish to %q'\r\n", subject)
	}}.connect(t, func(_ *nats.Conn, _ *nats.Subscription, err error) {
		if strings.Contains(err.Error(), "tasks.REFUSED.low") {
			heard.Add(1)
		} else {
			other.Add(1)
		}
	})
	r := &Relay{nc: nc, pub: newPublisher(nc)}
	stop := r.heedRefusals(t.Context())
	ended := make(chan published, 200)
	for i := range 200 {
		subject := "tasks.REFUSED.low"
		if i%2 == 1 {
			subject = "tasks.OTHER.low"
		}
		r.pub.publish(&nats.Msg{Subject: subject, Header: nats.Header{}}, "TASKS", fmt.Sprint(i), func(p published) { ended <- p })
	}
	limit := time.After(publishTimeout - time.Second)
	for i := range 100 {
		select {
		case p := <-ended:
			var refused noPermissionError
			if p.verdict != waits || !errors.As(p.err, &refused) || refused.subject != "tasks.REFUSED.low" {
				t.Fatalf("it ended as %+v", p)
			}
		case <-limit:
			t.Fatalf("%d of 100 refused publishes have ended", i)
		}
	}
	if err := nc.Publish("$JS.API.INFO", nil); err != nil {
		t.Fatal(err)
	}
	for other.Load() == 0 { // what is not ours to mind is handed on, after all of the above
		select {
		case <-limit:
			t.Fatal("another refusal was not handed on")
		case <-time.After(time.Millisecond):
		}
	}
	if n := heard.Load(); n != 1 {
		t.Errorf("the connection's own handler heard of it %d times, want once", n)
	}
	r.pub.mu.Lock()
	left := len(r.pub.pending)
	r.pub.mu.Unlock()
	if left != 100 || len(ended) != 0 {
		t.Errorf("%d are in flight and %d more have ended, want 100 of the other subject in flight", left, len(ended))
	}

	stop()
	heard.Store(0)
	for range 2 { // now it only hands on
		nc.ErrorHandler()(nc, nil, fmt.Errorf(`%w: Permissions Violation for Publish to "tasks.REFUSED.low"`, nats.ErrPermissionViolation))
	}
	if heard.Load() != 2 {
		t.Error("a relay that has ended keeps errors to itself")
	}
}

func TestOnlyRefusalsOfOurSubjectsAreMinded(t *testing.T) {
	f := &refusedPublishes{ours: []string{"eu.tasks.", "eu.dead."}, subjects: map[string]bool{}, said: map[string]time.Time{}, news: make(chan struct{}, 1)}
	now := time.Now()
	violation := func(text string) error {
		return fmt.Errorf("%w: Permissions Violation for %s", nats.ErrPermissionViolation, text)
	}
	for _, tt := range []struct {
		err        error
		after      time.Duration
		mute, took bool
	}{
		{violation(`Publish to "eu.tasks.PAY.low"`), 0, false, true},
		{violation(`Publish to "eu.tasks.PAY.high"`), time.Second, true, true},
		{violation(`Publish to "eu.tasks.PAY.low"`), 2 * time.Minute, false, true},
		{violation(`Publish to "eu.dead.PAY.7"`), 0, false, true},
		{violation(`Publish to "eu.dead.PAY.8"`), 0, true, true},
		{violation(`Publish to "tasks.PAY.low"`), 0, false, false},
		{violation(`Subscription to "eu.tasks.PAY.low"`), 0, false, false},
		{errors.New(`Permissions Violation for Publish to "eu.tasks.PAY.low"`), 0, false, false},
		{context.Canceled, 0, false, false},
	} {
		if got := f.note(tt.err, now.Add(tt.after)); got != tt.mute {
			t.Errorf("%v: mute %v, want %v", tt.err, got, tt.mute)
		}
		if took := len(f.take()) > 0; took != tt.took {
			t.Errorf("%v: taken %v, want %v", tt.err, took, tt.took)
		}
	}
}
