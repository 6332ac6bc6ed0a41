package dev

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestEmbeddedServerKeepsItsStreamsAndRefusesASecondOne(t *testing.T) {
	dir := t.TempDir()
	first, err := StartNATS(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := StartNATS(dir, 0); err == nil {
		second.Stop()
		t.Error("a second server started on the same directory")
	} else if !strings.Contains(err.Error(), "another taskrelay dev uses") {
		t.Errorf("got %v", err)
	}
	publish(t, first.URL())
	first.Stop()

	again, err := StartNATS(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Stop()
	if got := publish(t, again.URL()); got != 2 {
		t.Errorf("got sequence %d after the restart, want 2", got)
	}
}

func publish(t *testing.T, url string) uint64 {
	t.Helper()
	nc, err := nats.Connect(url, nats.Timeout(5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	ack, err := js.Publish(t.Context(), "s", []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	return ack.Sequence
}
