package command

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

func noCompensation(context.Context, *attempt, error) error { return nil }

func nothing(context.Context, *Task[json.RawMessage]) (any, error) { return nil, nil }

func TestRegisterRefuses(t *testing.T) {
	type C = Command[json.RawMessage]
	for _, c := range []struct {
		name, bizType, want string
		command             C
	}{
		{"no name", "", "must match", C{Execute: nothing}},
		{"two tokens", "A.B", "must match", C{Execute: nothing}},
		{"wildcard", "*", "must match", C{Execute: nothing}},
		{"leading dash", "-A", "must match", C{Execute: nothing}},
		{"too long", strings.Repeat("A", 64), "must match", C{Execute: nothing}},
		{"nothing to do", "A", "Execute is required", C{}},
		{"no attempts", "A", "MaxAttempts", C{Execute: nothing, MaxAttempts: -1}},
		{"too many attempts", "A", "MaxAttempts", C{Execute: nothing, MaxAttempts: 1001}},
		{"timeout", "A", "Timeout", C{Execute: nothing, Timeout: -time.Second}},
		{"concurrency", "A", "Concurrency", C{Execute: nothing, Concurrency: -1}},
		{"rate", "A", "Rate", C{Execute: nothing, Rate: math.NaN()}},
		{"priority", "A", "Priority", C{Execute: nothing, Priority: "urgent"}},
	} {
		var reg Registry
		if err := Register(&reg, c.bizType, c.command); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", c.name, err, c.want)
		}
		if len(reg.BizTypes()) != 0 {
			t.Errorf("%s: registered all the same", c.name)
		}
	}
}

func TestRegisterTwiceIsAnError(t *testing.T) {
	var reg Registry
	for i, want := range []bool{true, false} {
		if err := Register(&reg, "A", Command[json.RawMessage]{Execute: nothing}); (err == nil) != want {
			t.Errorf("call %d: %v", i+1, err)
		}
	}
}

func TestNewWorkerRefusesAnEmptyRegistry(t *testing.T) {
	for _, reg := range []*Registry{nil, {}} {
		if _, err := NewWorker(nil, nil, reg, WorkerConfig{}); err == nil || !strings.Contains(err.Error(), "no command is registered") {
			t.Errorf("got %v", err)
		}
	}
}

func TestTaskKey(t *testing.T) {
	for want, got := range map[string]string{
		"i-7":               taskKey("i", 7, PhaseExecute, 0),
		"i-7-r2":            taskKey("i", 7, PhaseExecute, 2),
		"i-7-compensate":    taskKey("i", 7, PhaseCompensate, 0),
		"i-7-compensate-r1": taskKey("i", 7, PhaseCompensate, 1),
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestPayloadIsDecodedOrRaw(t *testing.T) {
	a := &attempt{lane: &lane{bizType: "A", priority: "low"}, msg: &nats.Msg{Data: []byte(`{"n": 12345678901234567890.10}`)}}
	raw, err := newTask[json.RawMessage](a)
	if err != nil || string(raw.Payload) != `{"n": 12345678901234567890.10}` {
		t.Errorf("got %s, %v", raw.Payload, err)
	}
	bytes, err := newTask[[]byte](a)
	if err != nil || string(bytes.Payload) != string(raw.Payload) {
		t.Errorf("got %s, %v", bytes.Payload, err)
	}
	exact, err := newTask[struct{ N json.Number }](a)
	if err != nil || exact.Payload.N != "12345678901234567890.10" {
		t.Errorf("got %v, %v", exact, err)
	}
	_, err = newTask[struct{ N string }](a)
	if err == nil || errorClass(err) != classDecode || !strings.Contains(strings.ToLower(err.Error()), ".n of type string") {
		t.Errorf("got %v of class %q, want the field and class decode", err, errorClass(err))
	}
}

func TestResultIsEncodedOnce(t *testing.T) {
	for _, c := range []struct {
		in   any
		want string
	}{{nil, ""}, {json.RawMessage(`{"a":1}`), `{"a":1}`}, {[]byte("[1]"), "[1]"}, {"text", `"text"`}, {map[string]int{"a": 1}, `{"a":1}`}} {
		got, err := encodeResult(c.in)
		if err != nil || string(got) != c.want {
			t.Errorf("%v: got %s, %v; want %s", c.in, got, err, c.want)
		}
	}
	if _, err := encodeResult(func() {}); errorClass(err) != classResult {
		t.Errorf("got %v", err)
	}
	if err := Complete(context.Background(), nil, &Task[int]{}); err == nil {
		t.Error("a task that no worker made is completed")
	}
	if !errors.Is(Cancel(context.Canceled), context.Canceled) || Cancel(nil) == nil {
		t.Error("Cancel hides its reason, or is nil")
	}
}
