package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func TestNextStepSaysWhoMovesTheTaskAndWhen(t *testing.T) {
	now := time.Date(2026, 11, 30, 3, 0, 0, 0, time.UTC)
	before, after := now.Add(-time.Minute), now.Add(time.Minute)
	there := surroundings{now: now, relay: "r1", workers: 2}
	alone := surroundings{now: now}
	pending := outbox.Task{ID: 7, BizType: "A", Status: "pending", CreatedAt: before}
	with := func(f func(*outbox.Task)) outbox.Task { t := pending; f(&t); return t }
	for name, tt := range map[string]struct {
		task     outbox.Task
		delivery string
		around   surroundings
		want     string
		at       *time.Time
		command  string
	}{
		"succeeded": {with(func(t *outbox.Task) { t.Status = "succeeded" }), "", there, "done", nil, ""},
		"dead":      {with(func(t *outbox.Task) { t.Status, t.DeadLetteredAt = "dead", &before }), "", there, "waits for a person", nil, "taskrelay requeue 7 --reason '...'"},
		"letter":    {with(func(t *outbox.Task) { t.Status = "dead" }), "", there, "dead letter follows", nil, "requeue 7"},
		"undone":    {with(func(t *outbox.Task) { t.Status, t.Compensation = "dead", "done" }), "", there, "", nil, "--allow-compensated"},
		"calledoff": {with(func(t *outbox.Task) { t.Status, t.Phase, t.Compensation = "cancelled", "compensate", "failed" }), "", there, "not undone", nil, "requeue 7"},
		"cancelled": {with(func(t *outbox.Task) { t.Status = "cancelled" }), "", there, "brings it back", nil, "requeue 7"},
		"running":   {with(func(t *outbox.Task) { t.Status, t.LeaseOwner, t.LeaseUntil = "running", "w1", &after }), "published", there, "w1 finishes it", &after, ""},
		"asked":     {with(func(t *outbox.Task) { t.Status, t.LeaseUntil, t.CancelRequestedAt = "running", &after, &before }), "published", there, "asked to stop", &after, ""},
		"lost":      {with(func(t *outbox.Task) { t.Status, t.LeaseUntil = "running", &before }), "published", there, "lease has ended", nil, ""},
		"lost, no worker": {with(func(t *outbox.Task) { t.Status, t.LeaseUntil = "running", &before }), "published", alone,
			"no worker that knows its type is alive", nil, ""},
		"paused":    {pending, "paused", surroundings{now: now, pausedAt: &before, pausedReason: "bank is down"}, "bank is down", nil, "taskrelay resume A"},
		"unknown":   {pending, "unknown type", there, "until a worker that knows its type is started", nil, ""},
		"scheduled": {with(func(t *outbox.Task) { t.RunAt = &after }), "waiting for relay", there, "when it is due", &after, ""},
		"no relay":  {pending, "waiting for relay", alone, "no relay holds its lane", nil, ""},
		"relay":     {pending, "waiting for relay", there, "relay r1 publishes it next", nil, ""},
		"listed":    {with(func(t *outbox.Task) { t.Status, t.NextAttemptAt, t.RepublishAt = "retrying", &after, &after }), "on work list", there, "publishes it again", &after, ""},
		"overdue":   {with(func(t *outbox.Task) { t.RepublishAt = &before }), "on work list", there, "relay r1 publishes it next", nil, ""},
		"parked":    {with(func(t *outbox.Task) { t.Status, t.NextAttemptAt = "retrying", &after }), "published", there, "comes back to a worker", &after, ""},
		"published": {with(func(t *outbox.Task) { t.RepublishAt = &after }), "published", there, "a worker takes it next; if its message was lost", nil, ""},
		"nobody":    {pending, "published", alone, "no worker that knows its type is alive", nil, ""},
		"cancel":    {with(func(t *outbox.Task) { t.CancelRequestedAt = &before }), "published", there, "becomes cancelled", nil, ""},
		"blocked":   {with(func(t *outbox.Task) { t.Status, t.OrderingKey = "blocked", "k1" }), "blocked", there, "ordering key k1", nil, ""},
	} {
		got := nextStep(tt.task, tt.delivery, tt.around)
		if !strings.Contains(got.What, tt.want) || !strings.Contains(got.Command, tt.command) || (tt.command == "") != (got.Command == "") {
			t.Errorf("%s: got %q, %q; want %q, %q", name, got.What, got.Command, tt.want, tt.command)
		}
		if (got.At == nil) != (tt.at == nil) || got.At != nil && !got.At.Equal(*tt.at) {
			t.Errorf("%s: got time %v, want %v", name, got.At, tt.at)
		}
	}
}
