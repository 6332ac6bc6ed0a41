package outbox

import (
	"encoding/json"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/text"
)

// An envelope is a message that is used for one task after the other: the client copies it while it is published. [A header
// map made and filled for each message is 13 allocations and 3 µs.]
type envelope struct {
	msg    nats.Msg
	values taskHeaders
}

// taskHeaders are the values of our headers, in one piece.
type taskHeaders [9]string

// envelopes are put back with their last payload: the collector takes them, at the latest the second time.
var envelopes = sync.Pool{New: func() any { return &envelope{msg: nats.Msg{Header: make(nats.Header, 12)}} }}

// message makes the message of a task in e: the body is the payload, byte for byte, the rest is headers.
// dropped is the number of the row's headers that cannot be sent.
func (r *Relay) message(e *envelope, rec *record) (m *nats.Msg, dropped int) {
	m = &e.msg
	clear(m.Header)
	if rec.headers != nil {
		dropped = addRowHeaders(m.Header, rec.headers)
	}
	r.addTaskHeaders(m.Header, &e.values, rec)
	m.Subject, m.Data = r.names.Subject(rec.bizType, rec.priority), rec.payload
	return m, dropped
}

// addTaskHeaders sets ours, last, so that a row cannot forge them. Their values are kept in v.
func (r *Relay) addTaskHeaders(h nats.Header, v *taskHeaders, rec *record) {
	n := 0
	set := func(name, value string) {
		v[n] = value
		h[name] = v[n : n+1 : n+1]
		n++
	}
	set(HeaderInstallation, r.installation)
	set(HeaderID, strconv.FormatInt(rec.id, 10))
	set(HeaderBizType, rec.bizType)
	if rec.bizID != nil {
		set(HeaderBizID, *rec.bizID)
	}
	set(HeaderGeneration, strconv.Itoa(rec.generation))
	set(HeaderPhase, rec.phase)
	set(HeaderPriority, rec.priority)
	set(HeaderCreatedAt, strconv.FormatInt(rec.created.UnixMicro(), 10))
	if rec.phase == PhaseCompensate {
		set(HeaderError, headerText(rec.cause))
	}
}

// addRowHeaders copies what a producer wrote in headers. Keys that would steer the server (Nats-) or forge ours
// (Task-), that are no header names, and values that are no strings or have control characters (an HTTP client refuses
// them) are left out and counted.
func addRowHeaders(h nats.Header, raw []byte) (dropped int) {
	var all map[string]any
	if err := json.Unmarshal(raw, &all); err != nil {
		return 1
	}
	for k, v := range all {
		s, ok := v.(string)
		if !ok || !headerName(k) || controlCharacter(s, '\t') >= 0 || reservedHeader(k) {
			dropped++
			continue
		}
		h[k] = []string{s}
	}
	return dropped
}

func reservedHeader(k string) bool {
	return len(k) >= 5 && (strings.EqualFold(k[:5], "nats-") || strings.EqualFold(k[:5], "task-"))
}

// headerName reports whether k is a token as RFC 7230 (3.2.6) has it.
func headerName(k string) bool {
	if k == "" || len(k) > 128 {
		return false
	}
	for i := range len(k) {
		c := k[i]
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return true
}

// headerText makes one line of at most 1 KiB of an error text, cut on a rune.
func headerText(s string) string {
	s = strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }), " ")
	return text.Storable(s, 1024)
}

func headerTime(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}
