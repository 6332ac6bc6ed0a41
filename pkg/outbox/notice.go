package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"
)

// NotifierLog is the name of the notifier that every relay has: one line in its log.
const NotifierLog = "log"

// A Notifier tells people about tasks that failed. It returns an error when it could not: then the notice is kept and
// tried again, for up to seven days, with pauses that grow to five minutes. So a notice may arrive more than once:
// Notice.ID is the same each time unless more tasks have joined it.
//
// It has 25 s; one that takes longer keeps only its own types waiting. It may be called from several relays, never
// for one type at once.
type Notifier func(ctx context.Context, n Notice) error

// A Notice is what happened to tasks of one type since the last notice about it. It holds no payload.
type Notice struct {
	ID           string         `json:"id"` // for receivers that drop repetitions
	Installation string         `json:"installation"`
	BizType      string         `json:"biz_type"`
	Title        string         `json:"title,omitempty"`       // of the type, from the table biz_type
	RunbookURL   string         `json:"runbook_url,omitempty"` // likewise
	Event        string         `json:"event"`                 // the gravest: EventCompensationFailed, EventDead, EventFailed
	Count        int            `json:"count"`                 // of all tasks
	Counts       map[string]int `json:"counts"`                // by event
	From         time.Time      `json:"from"`                  // when the first one happened
	To           time.Time      `json:"to"`                    // and the last one
	Tasks        []NoticeTask   `json:"tasks"`                 // the first ten, the gravest in front
}

// A NoticeTask is one task of a Notice.
type NoticeTask struct {
	ID           int64     `json:"id,string"`
	BizID        string    `json:"biz_id,omitempty"`
	Event        string    `json:"event"`
	Attempts     int       `json:"attempts"` // of the execute phase
	Reason       string    `json:"reason"`   // max_attempts, permanent…
	Error        string    `json:"error"`    // one line, at most 1 KiB
	ErrorClass   string    `json:"error_class,omitempty"`
	Compensation string    `json:"compensation"` // none, pending, done, failed
	At           time.Time `json:"at"`
}

// noticeTasks is how many tasks a notice names.
const noticeTasks = 10

// eventsByGravity: what could not be undone comes first.
var eventsByGravity = []string{EventCompensationFailed, EventDead, EventFailed}

// Grave reports that money may have moved and was not moved back: a person has to act, whatever the hour.
func (n Notice) Grave() bool { return n.Event == EventCompensationFailed }

// Subject is the notice in one line.
func (n Notice) Subject() string {
	loud := ""
	if n.Grave() {
		loud = "COMPENSATION FAILED: "
	}
	if n.Count == 1 && len(n.Tasks) == 1 {
		t := n.Tasks[0]
		who := fmt.Sprintf("%s task %d", n.BizType, t.ID)
		if t.BizID != "" {
			who += " (" + headerText(t.BizID) + ")"
		}
		return "taskrelay: " + loud + who + " " + map[string]string{
			EventCompensationFailed: "is dead and was not undone",
			EventDead:               "is dead",
			EventFailed:             "failed for good, compensation has begun",
		}[t.Event]
	}
	var parts []string
	for _, e := range eventsByGravity {
		if c := n.Counts[e]; c > 0 {
			parts = append(parts, fmt.Sprintf(map[string]string{
				EventCompensationFailed: "%d dead and not undone",
				EventDead:               "%d dead",
				EventFailed:             "%d failed for good, compensation has begun",
			}[e], c))
		}
	}
	return fmt.Sprintf("taskrelay: %s%s: %s", loud, n.BizType, strings.Join(parts, ", "))
}

// Text is the notice for a person: the subject, what happened, and the commands for looking and for bringing back.
func (n Notice) Text() string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-13s %s\n", name+":", fmt.Sprintf(format, args...))
	}
	b.WriteString(n.Subject() + "\n\n")
	if n.Title != "" {
		line("type", "%s, %s", n.BizType, cut(headerText(n.Title), 100))
	} else {
		line("type", "%s", n.BizType)
	}
	if n.Count == 1 && len(n.Tasks) == 1 {
		n.Tasks[0].describe(line)
	} else {
		line("tasks", "%d, from %s to %s", n.Count, clockTime(n.From), clockTime(n.To))
		for _, t := range n.Tasks {
			line("task "+fmt.Sprint(t.ID), "%s", t.brief())
		}
		if more := n.Count - len(n.Tasks); more > 0 {
			line("and", "%d more", more)
		}
		if n.Counts[EventDead]+n.Counts[EventCompensationFailed] == 0 {
			line("look", "taskrelay list --type %s", n.BizType)
		} else {
			line("look", "taskrelay dead list --type %s", n.BizType)
			line("requeue", "taskrelay requeue --type %s --reason '…'", n.BizType)
		}
	}
	if n.RunbookURL != "" {
		line("runbook", "%s", headerText(n.RunbookURL))
	}
	return b.String()
}

func (t NoticeTask) describe(line func(name, format string, args ...any)) {
	line("task", "%d", t.ID)
	if t.BizID != "" {
		line("biz id", "%s", headerText(t.BizID))
	}
	line("attempts", "%d", t.Attempts)
	line("reason", "%s", t.Reason)
	line("error", "%s", t.Error)
	line("at", "%s", clockTime(t.At))
	switch t.Compensation {
	case "done":
		line("compensation", "done, so a requeue needs --allow-compensated")
	case "", "none":
	default:
		line("compensation", "%s", t.Compensation)
	}
	line("look", "taskrelay show %d", t.ID)
	if t.Event != EventFailed {
		line("requeue", "taskrelay requeue %d --reason '…'", t.ID)
	}
}

// brief is a task of many in one line.
func (t NoticeTask) brief() string {
	s := map[string]string{EventCompensationFailed: "dead and not undone", EventDead: "dead", EventFailed: "failed for good"}[t.Event]
	if t.BizID != "" {
		s = headerText(t.BizID) + " " + s
	}
	s += fmt.Sprintf(" after %d attempts (%s)", t.Attempts, t.Reason)
	if t.Error != "" {
		s += ": " + cut(t.Error, 200)
	}
	return s
}

func cut(s string, most int) string {
	runes := []rune(s)
	if len(runes) <= most {
		return s
	}
	return string(runes[:most]) + "…"
}

func clockTime(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// logNotice is the notifier log. What needs a person now is an error; what is being undone is a warning.
func (r *Relay) logNotice(n Notice) {
	e, message := r.log.Error(), "notice: tasks dead"
	switch n.Event {
	case EventCompensationFailed:
		message = "notice: tasks dead and not undone"
	case EventFailed:
		e, message = r.log.Warn(), "notice: tasks failed for good, compensation has begun"
	}
	e = e.Str("biz_type", n.BizType).Int("count", n.Count).Time("from", n.From).Time("to", n.To)
	for _, event := range eventsByGravity {
		if c := n.Counts[event]; c > 0 && c < n.Count {
			e = e.Int(event, c)
		}
	}
	if len(n.Tasks) > 0 {
		t := n.Tasks[0]
		e = e.Int64("task_id", t.ID).Str("biz_id", t.BizID).Int("attempt", t.Attempts).Str("reason", t.Reason).Str("error", t.Error)
	}
	if len(n.Tasks) > 1 {
		ids := zerolog.Arr()
		for _, t := range n.Tasks {
			ids.Int64(t.ID)
		}
		e = e.Array("task_ids", ids)
	}
	if n.RunbookURL != "" {
		e = e.Str("runbook_url", n.RunbookURL)
	}
	e.Msg(message)
}

// checkNotices fills in and checks what a configuration says about notices.
func (c *RelayConfig) checkNotices() error {
	c.NoticeInterval = cmp.Or(c.NoticeInterval, time.Minute)
	c.DefaultNotifier = cmp.Or(c.DefaultNotifier, NotifierLog)
	if c.NoticeInterval < time.Second {
		return fmt.Errorf("notice interval %v must be at least 1s", c.NoticeInterval)
	}
	for name, notify := range c.Notifiers {
		if name == "" || len(name) > 63 {
			return fmt.Errorf("notifier name %.70q: want 1 to 63 bytes", name)
		}
		if notify == nil {
			return fmt.Errorf("notifier %q has no function", name)
		}
	}
	if !slices.Contains(c.notifierNames(), c.DefaultNotifier) {
		return fmt.Errorf("default notifier %q is none of %s", c.DefaultNotifier, strings.Join(c.notifierNames(), ", "))
	}
	return nil
}

// notifierNames lists what a type may name: ours and the log.
func (c *RelayConfig) notifierNames() []string {
	names := slices.Sorted(maps.Keys(c.Notifiers))
	if !slices.Contains(names, NotifierLog) {
		names = append(names, NotifierLog)
	}
	return names
}

var errNotifierPanic = errors.New("notifier panicked")
