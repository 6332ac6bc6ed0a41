package outbox

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/text"
)

// message makes the message of a task: the body is the payload, byte for byte, the rest is headers.
// dropped is the number of the row's headers that cannot be sent.
func (r *Relay) message(rec *record) (m *nats.Msg, dropped int) {
	h := make(nats.Header, 12)
	if rec.headers != nil {
		dropped = addRowHeaders(h, rec.headers)
	}
	r.addTaskHeaders(h, rec)
	return &nats.Msg{Subject: r.names.Subject(rec.bizType, rec.priority), Header: h, Data: rec.payload}, dropped
}

// addTaskHeaders sets ours, last, so that a row cannot forge them.
func (r *Relay) addTaskHeaders(h nats.Header, rec *record) {
	h[HeaderInstallation] = []string{r.installation}
	h[HeaderID] = []string{strconv.FormatInt(rec.id, 10)}
	h[HeaderBizType] = []string{rec.bizType}
	if rec.bizID != nil {
		h[HeaderBizID] = []string{*rec.bizID}
	}
	h[HeaderGeneration] = []string{strconv.Itoa(rec.generation)}
	h[HeaderPhase] = []string{rec.phase}
	h[HeaderPriority] = []string{rec.priority}
	h[HeaderCreatedAt] = []string{strconv.FormatInt(rec.created.UnixMicro(), 10)}
	if rec.phase == PhaseCompensate {
		h[HeaderError] = []string{headerText(rec.cause)}
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
