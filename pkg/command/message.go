package command

import (
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// What a message that arrived is.
type messageKind int

const (
	ours     messageKind = iota
	foreign              // of another installation: never acknowledged, terminated or claimed
	noTask               // its headers name no row: the table is the truth, so nothing is lost with it
	mistaken             // of ours, but published where it does not belong
)

// maxMicros is 9999-12-31: a later instant would make the claim of a whole batch fail in Postgres' arithmetic.
const maxMicros = 253402300799_000000

// identify reads from the headers which row the message stands for.
func (a *attempt) identify(installation string) messageKind {
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

func (a *attempt) ack()               { a.respond(ackBody) }
func (a *attempt) inProgress()        { a.respond(progressBody) }
func (a *attempt) term(reason string) { a.respond([]byte("+TERM " + reason)) }

// respond answers the message, unless its consumer is gone. An answer names a consumer and sequences and nothing else: in
// a stream and a consumer made anew under the same names, it would remove whatever has that sequence now, while another
// worker is at it.
func (a *attempt) respond(body []byte) {
	if a.born == a.lane.born.Load() {
		_ = a.msg.Respond(body)
	}
}

// deliverySequence reads from the subject that a message is answered on its number among all deliveries of its
// consumer; 0 when it has none. It is $JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.<delivery sequence>.… or
// the same with domain and account behind ACK.
func deliverySequence(reply string) (n uint64) {
	skip := 6
	if strings.Count(reply, ".") > 8 {
		skip = 8
	}
	for range skip {
		_, rest, ok := strings.Cut(reply, ".")
		if !ok {
			return 0
		}
		reply = rest
	}
	for i := 0; i < len(reply) && reply[i] != '.'; i++ {
		if reply[i] < '0' || reply[i] > '9' {
			return 0
		}
		n = n*10 + uint64(reply[i]-'0')
	}
	return n
}

// noteDelivery looks the consumer up again when its deliveries are counted from the start: then it was made anew, and
// this lane had no pull open that would have been told.
func (l *lane) noteDelivery(reply string) {
	n := deliverySequence(reply)
	if n > 0 && n <= l.delivered.Swap(n) {
		l.recheck()
	}
}

// nak asks for the message to be delivered again after d.
func (a *attempt) nak(d time.Duration) {
	if d <= 0 {
		a.respond(nakBody)
		return
	}
	b := make([]byte, 0, 48)
	b = append(b, `-NAK {"delay": `...)
	b = strconv.AppendInt(b, int64(d), 10)
	b = append(b, '}')
	a.respond(b)
}
