package target

import (
	"encoding/json"
	"strconv"
	"strings"

	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// call is one attempt at a task, ready to be sent.
type call struct {
	id      int64
	bizType string
	attempt int
	phase   string
	key     string            // idempotency key
	cause   string            // compensation: why execute ended
	header  map[string]string // row's headers that may be sent, then ours
	body    []byte            // payload, byte for byte
}

const (
	headerKey         = "Idempotency-Key"
	headerMaxAttempts = "Task-Max-Attempts"
	maxCause          = 1024
)

func newCall(t *command.Task[json.RawMessage], cause error) call {
	c := call{id: t.ID, bizType: t.BizType, attempt: t.Attempt, phase: t.Phase, key: t.Key(), body: t.Payload,
		header: make(map[string]string, len(t.Header)+14)}
	for name, value := range t.Header {
		if mayForward(name, value) {
			c.header[name] = value
		}
	}
	set := func(name, value string) {
		if validValue(value) {
			c.header[name] = value
		}
	}
	set(outbox.HeaderInstallation, installation(c.key, t.ID))
	set(outbox.HeaderID, strconv.FormatInt(t.ID, 10))
	set(outbox.HeaderBizType, t.BizType)
	if t.BizID != "" {
		set(outbox.HeaderBizID, t.BizID)
	}
	set(outbox.HeaderGeneration, strconv.Itoa(t.Generation))
	set(outbox.HeaderPhase, t.Phase)
	set(outbox.HeaderPriority, t.Priority)
	set(outbox.HeaderCreatedAt, strconv.FormatInt(t.CreatedAt.UnixMicro(), 10))
	set(outbox.HeaderAttempt, strconv.Itoa(t.Attempt))
	set(headerMaxAttempts, strconv.Itoa(t.MaxAttempts))
	set(headerKey, c.key)
	if cause != nil {
		c.cause = oneLine(cause.Error(), maxCause)
		set(outbox.HeaderError, c.cause)
	}
	return c
}

// installation is the beginning of the key <installation>-<id>…
func installation(key string, id int64) string {
	if i := strings.LastIndex(key, "-"+strconv.FormatInt(id, 10)); i > 0 {
		return key[:i]
	}
	return ""
}

// refused are headers that a row may not send: they would frame the message anew, steer proxies, choose another
// virtual host or carry other credentials than those of the configured target. Lower case.
var refused = map[string]bool{
	"connection": true, "keep-alive": true, "proxy-connection": true, "proxy-authenticate": true,
	"proxy-authorization": true, "te": true, "trailer": true, "transfer-encoding": true, "upgrade": true,
	"host": true, "content-length": true, "content-type": true, "content-encoding": true, "expect": true,
	"authorization": true, "cookie": true, "user-agent": true, "accept-encoding": true,
	"idempotency-key": true, "x-idempotency-key": true,
	"webhook-id": true, "webhook-timestamp": true, "webhook-signature": true,
}

func mayForward(name, value string) bool {
	lower := strings.ToLower(name)
	return !refused[lower] && !strings.HasPrefix(lower, "task-") && !strings.HasPrefix(lower, "nats-") &&
		validName(name) && validValue(value)
}

// validName reports a token of RFC 9110. net/http refuses others, and the task would fail for its header.
func validName(name string) bool {
	if name == "" {
		return false
	}
	for i := range len(name) {
		c := name[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0 {
			continue
		}
		return false
	}
	return true
}

// validValue refuses control characters: a line feed would begin a header of the row's own making.
func validValue(value string) bool {
	for i := range len(value) {
		if c := value[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// oneLine makes text fit for a header: valid UTF-8, no control characters, at most limit bytes.
func oneLine(s string, limit int) string {
	s = clean([]byte(s), limit)
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }), " ")
}

// clean makes bytes of unknown origin valid UTF-8 without NUL, cut on a rune after limit bytes. Postgres refuses
// other text, and then the outcome itself could not be stored.
func clean(b []byte, limit int) string {
	cut := len(b) > limit
	if cut {
		b = b[:limit]
		// Not half a rune: up to three bytes go.
		for i := 1; i <= 3 && i <= len(b); i++ {
			if c := b[len(b)-i]; c >= 0xc0 {
				if n := runeLength(c); n > i {
					b = b[:len(b)-i]
				}
				break
			} else if c < 0x80 {
				break
			}
		}
	}
	s := strings.ToValidUTF8(string(b), "\uFFFD")
	s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	if cut {
		s += "… [cut]"
	}
	return s
}

func runeLength(first byte) int {
	switch {
	case first >= 0xf0:
		return 4
	case first >= 0xe0:
		return 3
	}
	return 2
}
