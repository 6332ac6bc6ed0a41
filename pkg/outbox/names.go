package outbox

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Every name that crosses the wire is made in this file.

// The priorities of a task; the word is also the last token of its subject. The options are High and Low.
const (
	PriorityHigh = "high"
	PriorityLow  = "low"
)

// The phases of a task: compensation is a second life with attempts counted anew.
const (
	PhaseExecute    = "execute"
	PhaseCompensate = "compensate"
)

// Headers of a message. NATS header names are case-sensitive in nats.go.
const (
	HeaderInstallation = "Task-Installation"
	HeaderID           = "Task-Id"
	HeaderBizType      = "Task-Biz-Type"
	HeaderBizID        = "Task-Biz-Id"
	HeaderGeneration   = "Task-Generation"
	HeaderPhase        = "Task-Phase"
	HeaderPriority     = "Task-Priority"
	HeaderCreatedAt    = "Task-Created-At" // µs since 1970: with id and generation the identity of a row
	HeaderAttempt      = "Task-Attempt"
	HeaderError        = "Task-Error"

	// Dead letters and events only.
	HeaderAttempts       = "Task-Attempts"
	HeaderReason         = "Task-Reason"
	HeaderErrorClass     = "Task-Error-Class"
	HeaderFirstAttemptAt = "Task-First-Attempt-At"
	HeaderDeadAt         = "Task-Dead-At"
	HeaderCompensation   = "Task-Compensation"
	HeaderRequeue        = "Task-Requeue"
	HeaderReplayed       = "Task-Replayed"
	HeaderEvent          = "Task-Event"
	HeaderCut            = "Task-Cut" // what was left out of a dead letter that did not fit
)

// MetadataInstallation is the key in a stream's metadata that names the one installation it belongs to.
const MetadataInstallation = "taskrelay-installation"

// Names makes the names of streams, subjects and consumers. The zero value has no namespace.
type Names struct {
	Namespace string // such as "eu": streams EU_TASKS…, subjects eu.tasks.…
	APIPrefix string // of JetStream's API, such as $JS.hub.API for domain hub; by default $JS.API
}

// API begins the subject of each request to JetStream; it ends in a dot.
func (n Names) API() string {
	return strings.TrimSuffix(cmp.Or(n.APIPrefix, "$JS.API"), ".") + "."
}

// natsCLI begins a line for the nats CLI that reaches our streams.
func (n Names) natsCLI() string {
	if n.APIPrefix == "" {
		return "nats"
	}
	return "nats --js-api-prefix '" + strings.TrimSuffix(n.APIPrefix, ".") + "'"
}

// JetStream returns the client for these names.
func (n Names) JetStream(nc *nats.Conn) (jetstream.JetStream, error) {
	return jetstream.NewWithAPIPrefix(nc, n.API())
}

// namespacePattern: lower case only, so that two namespaces never make one stream name.
var namespacePattern = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// apiPattern: a subject without wildcards.
var apiPattern = regexp.MustCompile(`^[A-Za-z0-9_$-]+(\.[A-Za-z0-9_$-]+)*\.?$`)

// Validate refuses a namespace that is no plain subject token, or whose subjects would lie among those of an
// installation without one, and an API prefix that is no subject.
func (n Names) Validate() error {
	switch {
	case n.APIPrefix != "" && !apiPattern.MatchString(n.APIPrefix):
		return fmt.Errorf("API prefix %q: want a subject without wildcards, such as $JS.hub.API for domain hub", n.APIPrefix)
	case n.Namespace == "":
		return nil
	case slices.Contains([]string{"tasks", "dead", "events", "taskrelay"}, n.Namespace):
		return fmt.Errorf("namespace %q is reserved: choose another word", n.Namespace)
	case !namespacePattern.MatchString(n.Namespace):
		return fmt.Errorf("namespace %q: want lower-case letters, digits and -, at most 32, beginning with a letter", n.Namespace)
	}
	return nil
}

func (n Names) stream(name string) string {
	if n.Namespace == "" {
		return name
	}
	return strings.ToUpper(strings.ReplaceAll(n.Namespace, "-", "_")) + "_" + name
}

func (n Names) subject(s string) string {
	if n.Namespace == "" {
		return s
	}
	return n.Namespace + "." + s
}

// Stream is the work queue.
func (n Names) Stream() string { return n.stream("TASKS") }

// DeadStream holds the dead letters.
func (n Names) DeadStream() string { return n.stream("TASKS_DEAD") }

// EventStream holds the events that notifiers read.
func (n Names) EventStream() string { return n.stream("TASKS_EVENTS") }

// Subject is where tasks of a lane are published: tasks.<biz_type>.<priority>.
func (n Names) Subject(bizType, priority string) string {
	return n.subject("tasks." + bizType + "." + priority)
}

// DeadSubject is where the dead letter of a task is published: dead.<biz_type>.<id>.
func (n Names) DeadSubject(bizType string, id int64) string {
	return n.subject("dead." + bizType + "." + strconv.FormatInt(id, 10))
}

// EventSubject is where an event of a type is published: events.<biz_type>.<event>.
func (n Names) EventSubject(bizType, event string) string {
	return n.subject("events." + bizType + "." + event)
}

// Wake is the core NATS subject that tells the relays to look at once.
func (n Names) Wake() string { return n.subject("taskrelay.wake") }

// Consumer is the durable pull consumer of a lane. The priority is its last part, so two lanes never share a name.
func (n Names) Consumer(bizType, priority string) string { return bizType + "-" + priority }

// NoticeConsumer is the durable consumer of the events, which all relays share: people are told of what it reads.
func (n Names) NoticeConsumer() string { return "notices" }

// Ops is the subject under which relays take operator actions: taskrelay.ops.<action>.
func (n Names) Ops() string { return n.subject("taskrelay.ops") }

// messageID is the JetStream message id: <installation>.<id>.<created_at µs>.<generation>[.<looks>].
// created_at is in it because a failover to a lagging standby hands out ids again; looks is there for a repeated
// guess, so that the server's memory of ids does not swallow it.
func messageID(installation string, id, createdMicros int64, generation, looks int) string {
	b := make([]byte, 0, len(installation)+48)
	b = append(b, installation...)
	b = append(b, '.')
	b = strconv.AppendInt(b, id, 10)
	b = append(b, '.')
	b = strconv.AppendInt(b, createdMicros, 10)
	b = append(b, '.')
	b = strconv.AppendInt(b, int64(generation), 10)
	if looks > 0 {
		b = append(b, '.')
		b = strconv.AppendInt(b, int64(looks), 10)
	}
	return string(b)
}
