package testenv_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestDatabasesAreSeparate(t *testing.T) {
	a, b := testenv.DB(t), testenv.DB(t)
	id := a.Insert(t, "X", "biz_id", "1", "payload", `{"a":1}`)
	if r := a.Task(t, id); r.Status != "pending" {
		t.Errorf("status: got %s, want pending", r.Status)
	}
	if len(a.Attempts(t, id)) != 0 {
		t.Error("attempts of a new task")
	}
	b.WaitCount(t, time.Second, 0, "SELECT count(*) FROM taskrelay.task")
}

func TestRealServerKeepsMessagesOverKill(t *testing.T) {
	n := testenv.StartNATSProcess(t)
	if _, err := n.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.JS.Publish(t.Context(), "s.a", []byte("x")); err != nil {
		t.Fatal(err)
	}
	n.Kill9(t)
	n.Start(t)
	testenv.Eventually(t, 10*time.Second, func() error {
		_, err := n.JS.Stream(t.Context(), "S")
		return err
	})
	if got := n.Messages(t, "S"); got != 1 {
		t.Errorf("messages after kill -9: got %d, want 1", got)
	}
	out := testenv.NATSCLI(t, n.URL)("stream", "get", "S", "1")
	if !strings.Contains(out, "x") {
		t.Errorf("nats stream get printed %q", out)
	}
}

func TestEmbeddedServersAreSeparate(t *testing.T) {
	a, b := testenv.NATS(t), testenv.NATS(t)
	if _, err := a.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.JS.Stream(t.Context(), "S"); err == nil {
		t.Error("the other server has the stream")
	}
}
