package command

import (
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// What a message that arrived is.
type verdict int

const (
	ours     verdict = iota
	foreign          // of another installation: never acknowledged, terminated or claimed
	noTask           // its headers name no row: the table is the truth, so nothing is lost with it
	mistaken         // of ours, but published where it does not belong
)

// maxMicros is 9999-12-31: a later instant would make the claim of a whole batch fail in Postgres' arithmetic.
const maxMicros = 253402300799_000000

// identify reads from the headers which row the message stands for.
func (a *attempt) identify(installation string) verdict {
	h := a.msg.Header
	switch header(h, outbox.HeaderInstallation) {
	case installation:
	case "":
		return noTask
	default:
		return foreign
	}
	id, err1 := strconv.ParseInt(header(h, outbox.HeaderID), 10, 64)
	generation, err2 := strconv.ParseInt(header(h, outbox.HeaderGeneration), 10, 32)
	created, err3 := strconv.ParseInt(header(h, outbox.HeaderCreatedAt), 10, 64)
	if err1 != nil || err2 != nil || err3 != nil || generation < 0 || created < -maxMicros/4 || created > maxMicros {
		return noTask
	}
	if header(h, outbox.HeaderBizType) != a.lane.bizType {
		return mistaken
	}
	a.id, a.generation, a.createdMicros = id, int(generation), created
	return ours
}

// header reads a header without canonicalizing its name, which nats.go does not do either.
func header(h nats.Header, name string) string {
	if v := h[name]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// rowHeaders returns what the producer wrote in headers: all that is neither ours nor the server's.
func rowHeaders(h nats.Header) map[string]string {
	var own map[string]string
	for k, v := range h {
		if strings.HasPrefix(k, "Task-") || strings.HasPrefix(k, "Nats-") || len(v) == 0 {
			continue
		}
		if own == nil {
			own = make(map[string]string)
		}
		own[k] = v[0]
	}
	return own
}

// The answers to a message. They are core publishes and may be lost with the connection: the message then comes
// again after AckWait and the row says what it is worth. So their errors are nobody's concern.

var (
	ackBody      = []byte("+ACK")
	nakBody      = []byte("-NAK")
	progressBody = []byte("+WPI")
)

func (a *attempt) ack()        { _ = a.msg.Respond(ackBody) }
func (a *attempt) inProgress() { _ = a.msg.Respond(progressBody) }

func (a *attempt) term(reason string) { _ = a.msg.Respond([]byte("+TERM " + reason)) }

// nak asks for the message to be delivered again after d.
func (a *attempt) nak(d time.Duration) {
	if d <= 0 {
		_ = a.msg.Respond(nakBody)
		return
	}
	b := make([]byte, 0, 48)
	b = append(b, `-NAK {"delay": `...)
	b = strconv.AppendInt(b, int64(d), 10)
	b = append(b, '}')
	_ = a.msg.Respond(b)
}
