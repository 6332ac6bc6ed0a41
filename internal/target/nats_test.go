package target

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/connect"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

func startNATS(t *testing.T) *server.Server {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("nats-server did not start")
	}
	return s
}

func natsCommand(t *testing.T, s *server.Server) (command.Command[json.RawMessage], *nats.Conn) {
	t.Helper()
	nc, err := connect.NATS(s.ClientURL(), connect.Identity{}, "worker", zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	c, err := NewMaker(nc, 1, zerolog.Nop()).Command(config.BizType{Name: "A", Target: "nats://billing.charge",
		Secret: "s3cret", Retry: retry.Fixed{Base: time.Second}})
	if err != nil {
		t.Fatal(err)
	}
	return c, nc
}

func TestNATSTarget(t *testing.T) {
	s := startNATS(t)
	c, _ := natsCommand(t, s)
	service, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err = c.Execute(ctx, newTask())
	if !errors.Is(err, nats.ErrNoResponders) || retry.IsPermanent(err) || class(err) != "nats_no_responders" {
		t.Fatalf("no responder: got %v", err)
	}

	var got *nats.Msg
	var answer nats.Msg
	if _, err := service.Subscribe("billing.charge", func(m *nats.Msg) {
		got = m
		_ = m.RespondMsg(&nats.Msg{Data: answer.Data, Header: answer.Header})
	}); err != nil {
		t.Fatal(err)
	}
	if err := service.Flush(); err != nil {
		t.Fatal(err)
	}

	tsk := newTask()
	tsk.Header = map[string]string{"traceparent": "00-abc-def-01", "Nats-Expected-Stream": "X", "task-id": "99"}
	if result, err := c.Execute(ctx, tsk); result != nil || err != nil {
		t.Errorf("empty reply: got %v, %v", result, err)
	}
	if string(got.Data) != string(tsk.Payload) {
		t.Errorf("body %q", got.Data)
	}
	for name, want := range map[string]string{"Task-Id": "12", "Task-Biz-Type": "ORDER_PAYMENT", "Task-Attempt": "2",
		"Task-Phase": "execute", "traceparent": "00-abc-def-01"} {
		if v := got.Header[name]; len(v) != 1 || v[0] != want {
			t.Errorf("%s: got %q, want %q", name, v, want)
		}
	}
	for _, name := range []string{"webhook-id", "webhook-signature", "Idempotency-Key"} {
		if _, ok := got.Header[name]; !ok {
			t.Errorf("%s is missing", name)
		}
	}
	for _, name := range []string{"Nats-Expected-Stream", "task-id"} {
		if v, ok := got.Header[name]; ok {
			t.Errorf("%s was sent: %q", name, v)
		}
	}

	for _, c2 := range []struct {
		header nats.Header
		body   string
		want   string // done, permanent, retry
		class  string
		text   string
	}{
		{nats.Header{"Task-Status": {"200"}}, `{"paid":1}`, "done", "", ""},
		{nats.Header{"Task-Status": {"204"}}, ``, "done", "", ""},
		{nats.Header{"Task-Status": {"422"}}, `card expired`, "permanent", "nats_422", "card expired"},
		{nats.Header{"Task-Status": {"409"}}, ``, "retry", "nats_409", "Conflict"},
		{nats.Header{"Task-Status": {"503"}}, "\xff down", "retry", "nats_503", "\uFFFD down"},
		{nats.Header{"Task-Status": {"fine"}}, ``, "retry", "nats_unclear", "fine"},
		{nats.Header{"Task-Status": {"100"}}, ``, "retry", "nats_unclear", "Task-Status"},
		{nats.Header{"Nats-Service-Error-Code": {"404"}, "Nats-Service-Error": {"no such order"}}, ``, "permanent", "nats_404", "no such order"},
		{nats.Header{"Nats-Service-Error": {"boom"}}, ``, "retry", "nats_500", "boom"},
		{nil, `ERR insufficient funds`, "retry", "nats_unclear", "Task-Status"},
	} {
		answer = nats.Msg{Header: c2.header, Data: []byte(c2.body)}
		result, err := c.Execute(ctx, newTask())
		outcome := "retry"
		switch {
		case err == nil:
			outcome = "done"
		case retry.IsPermanent(err):
			outcome = "permanent"
		}
		if outcome != c2.want || class(err) != c2.class || err != nil && !strings.Contains(err.Error(), c2.text) {
			t.Errorf("%v %q: got %s, class %q, %v", c2.header, c2.body, outcome, class(err), err)
		}
		if r, ok := result.(json.RawMessage); (c2.body == `{"paid":1}`) != ok || ok && string(r) != c2.body {
			t.Errorf("%v %q: result %v", c2.header, c2.body, result)
		}
	}

	answer = nats.Msg{Header: nats.Header{"Task-Status": {"429"}, "Retry-After": {"7"}}}
	_, err = c.Execute(ctx, newTask())
	if d, _ := retry.AfterDelay(err); d != 7*time.Second {
		t.Errorf("Retry-After: got %v, %v", d, err)
	}
}

func TestSilentServiceEndsWithTheAttempt(t *testing.T) {
	s := startNATS(t)
	c, nc := natsCommand(t, s)
	if _, err := nc.Subscribe("billing.charge", func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := c.Execute(ctx, newTask()); !errors.Is(err, context.DeadlineExceeded) || class(err) != "nats_no_answer" {
		t.Errorf("got %v", err)
	}
}

// Nothing was sent: an outage of ours uses up no attempt.
func TestLostConnectionSnoozes(t *testing.T) {
	s := startNATS(t)
	c, nc := natsCommand(t, s)
	gone := make(chan struct{})
	nc.SetDisconnectErrHandler(func(*nats.Conn, error) { close(gone) })
	s.Shutdown()
	s.WaitForShutdown()
	<-gone
	_, err := c.Execute(t.Context(), newTask())
	if err == nil || err.Error() != command.Snooze(notConnected).Error() {
		t.Errorf("got %v", err)
	}
}
