package outbox

import (
	"errors"
	"fmt"
	"regexp"
	"time"
	"unicode/utf8"
)

// Limits of what a producer writes. The table has the same ones as constraints;
// here they are looked at before anything is sent, because an error from the
// server would leave the caller's transaction unusable.
const (
	MaxBizType     = 63        // bytes
	MaxBizID       = 255       // bytes
	MaxPayload     = 512 << 10 // bytes
	MaxMaxAttempts = 1000
	// MaxHeaders is the length of all header names and values together. JetStream
	// takes 64 KiB of headers a message; the rest is for ours.
	MaxHeaders = 48 << 10
)

// An Option says more about a task that is being enqueued.
type Option func(*newRow) error

// newRow is a task before it is a row: checked, in the form that is sent.
type newRow struct {
	bizType     string
	bizID       *string
	priority    *string // nil: the type's default, else low
	payload     string
	headers     string
	headerMap   map[string]string
	runAt       *string // an instant, as text: exact, and the same for every driver
	delay       *int64  // µs after Postgres's clock_timestamp()
	maxAttempts *int64
}

// BizID names the task for its producer, 1 to 255 bytes of UTF-8 without control
// characters. It is the idempotency key: a second task of the same biz type and
// BizID is not made, Enqueue returns the first one. It stays taken until the row
// is purged, whatever became of the task.
func BizID(id string) Option {
	return func(r *newRow) error {
		if err := validateKey("biz id", id, MaxBizID); err != nil {
			return err
		}
		r.bizID = &id
		return nil
	}
}

// High puts the task into the type's high lane, which is worked on before the low
// one.
func High() Option { return withPriority(PriorityHigh) }

// Low puts the task into the type's low lane, also where the type's default is
// high.
func Low() Option { return withPriority(PriorityLow) }

func withPriority(p string) Option {
	return func(r *newRow) error {
		r.priority = &p
		return nil
	}
}

// At is when the task is due, to the microsecond, in the years 1 to 9999. Without
// At and In it is due at once. Of At and In the one given last counts.
//
// The instant is compared with Postgres's clock. To wait for some time from now,
// use In: it does not depend on the clock of this machine.
func At(t time.Time) Option {
	return func(r *newRow) error {
		if t.IsZero() {
			return errors.New("At: the time is not set; leave the option out for a task that is due at once")
		}
		// Rounded up: a task never runs before its time.
		t := t.UTC()
		if rest := t.Nanosecond() % 1000; rest != 0 {
			t = t.Add(time.Duration(1000-rest) * time.Nanosecond)
		}
		if y := t.Year(); y < 1 || y > 9999 {
			return fmt.Errorf("At: the year is %d, want 1 to 9999", y)
		}
		text := t.Format("2006-01-02T15:04:05.999999Z07:00")
		r.runAt, r.delay = &text, nil
		return nil
	}
}

// In makes the task due after d, counted by Postgres's clock from the moment the
// row is written. 0 means at once; a negative d is an error. Of At and In the one
// given last counts.
func In(d time.Duration) Option {
	return func(r *newRow) error {
		if d < 0 {
			return fmt.Errorf("In: %v is negative, want 0 or more", d)
		}
		r.runAt, r.delay = nil, nil
		if d > 0 {
			// Rounded up, without the overflow of d + 999.
			micros := int64(d / time.Microsecond)
			if d%time.Microsecond != 0 {
				micros++
			}
			r.delay = &micros
		}
		return nil
	}
}

// MaxAttempts is how often the command may be tried, 1 to 1000, the first time
// included. By default the limit of the biz type counts, else the command's.
func MaxAttempts(n int) Option {
	return func(r *newRow) error {
		if n < 1 || n > MaxMaxAttempts {
			return fmt.Errorf("MaxAttempts: %d, want 1 to %d, the first attempt included", n, MaxMaxAttempts)
		}
		v := int64(n)
		r.maxAttempts = &v
		return nil
	}
}

// OrderingKey is to run tasks of one type and key one after the other. This
// version does not order, and Enqueue refuses the option: work that must not
// overtake may not be taken on with a promise that nobody keeps.
func OrderingKey(string) Option {
	return func(*newRow) error {
		return errors.New("OrderingKey: this version of taskrelay does not run tasks in order; leave the option out")
	}
}

// Header adds a header to the task's messages: a traceparent, a tenant, anything
// the worker should see beside the payload. k is a header name as in RFC 7230, at
// most 128 bytes; names that begin with Nats- or Task- (in any case) are refused,
// because they would steer the server or forge taskrelay's own. v is UTF-8
// without control characters but tab. The last value of a name counts.
func Header(k, v string) Option {
	return func(r *newRow) error {
		switch {
		case !headerName(k):
			return fmt.Errorf("header %.80q: want a name of letters, digits and !#$%%&'*+-.^_`|~, 1 to 128 bytes", k)
		case reservedHeader(k):
			return fmt.Errorf("header %q: names that begin with Nats- or Task- are reserved", k)
		case !utf8.ValidString(v):
			return fmt.Errorf("header %q: the value is not valid UTF-8", k)
		case controlCharacter(v, '\t') >= 0:
			return fmt.Errorf("header %q: the value has a control character at byte %d", k, controlCharacter(v, '\t'))
		}
		if r.headerMap == nil {
			r.headerMap = map[string]string{}
		}
		r.headerMap[k] = v
		return nil
	}
}

// newTaskRow checks everything that can be known without the server.
func newTaskRow(bizType string, payload any, opts []Option) (r newRow, err error) {
	if err := ValidateBizType(bizType); err != nil {
		return r, err
	}
	r.bizType = bizType
	if r.payload, err = encodePayload(payload); err != nil {
		return r, err
	}
	for i, opt := range opts {
		if opt == nil {
			return r, fmt.Errorf("option %d is nil", i)
		}
		if err := opt(&r); err != nil {
			return r, err
		}
	}
	r.headers, err = encodeHeaders(r.headerMap)
	return r, err
}

func encodeHeaders(h map[string]string) (string, error) {
	if len(h) == 0 {
		return "{}", nil
	}
	size := 0
	for k, v := range h {
		size += len(k) + len(v)
	}
	if size > MaxHeaders {
		return "", fmt.Errorf("headers are %d bytes together, at most %d fit into a message", size, MaxHeaders)
	}
	return marshal(h)
}

var bizTypePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$`)

// ValidateBizType refuses what is no biz type: a type is one token of a subject, and part of a consumer's name. The
// table has the same rule as a constraint.
func ValidateBizType(t string) error {
	if !bizTypePattern.MatchString(t) {
		return fmt.Errorf("biz type %.80q: want 1 to %d letters, digits, _ and - (no dots or spaces), the first a letter or digit",
			t, MaxBizType)
	}
	return nil
}

func validateKey(what, s string, limit int) error {
	switch {
	case s == "":
		return fmt.Errorf("%s is empty: leave the option out, or give 1 to %d bytes", what, limit)
	case len(s) > limit:
		return fmt.Errorf("%s is %d bytes long, want 1 to %d", what, len(s), limit)
	case !utf8.ValidString(s):
		return fmt.Errorf("%s %q is not valid UTF-8", what, s)
	case controlCharacter(s) >= 0:
		return fmt.Errorf("%s %q has a control character at byte %d", what, s, controlCharacter(s))
	}
	return nil
}

// controlCharacter returns where s has an ASCII control character that is not
// allowed, or -1.
func controlCharacter(s string, allowed ...byte) int {
	for i := range len(s) {
		if c := s[i]; (c < ' ' || c == 0x7f) && (len(allowed) == 0 || c != allowed[0]) {
			return i
		}
	}
	return -1
}
