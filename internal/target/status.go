package target

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

const (
	maxRetryAfter = 24 * time.Hour // longest pause a target may ask for
	maxResult     = 64 << 10       // bytes of a result that are kept
	maxErrorBody  = 1 << 10        // bytes of an answer that are kept in an error
)

// answer is what a target said, in HTTP's terms.
type answer struct {
	from       string // "HTTP pay.internal", "NATS billing.charge"
	class      string // "http", "nats"
	code       int
	retryAfter string
	date       string // when the target said so, by its own clock
	location   string // host of a redirect
	body       []byte
}

// outcome turns an answer into a result or an error:
//
//	2xx                        done; a JSON body of up to 64 KiB is the result
//	408, 409, 425, 429, 5xx    tried again, not before the pause that Retry-After asks for
//	anything else              permanent
func (a answer) outcome() (json.RawMessage, error) {
	if a.code >= 200 && a.code <= 299 {
		return result(a.body), nil
	}
	text := fmt.Sprintf("%s answered %d", a.from, a.code)
	if name := http.StatusText(a.code); name != "" {
		text += " " + name
	}
	if a.code >= 300 && a.code <= 399 {
		text += ", a redirect, which is not followed"
		if a.location != "" {
			text += " (to host " + a.location + ")"
		}
	} else if body := strings.TrimSpace(clean(a.body, maxErrorBody)); body != "" {
		text += ": " + body
	}
	err := error(&classError{class: a.class + "_" + strconv.Itoa(a.code), text: text})
	if !retryable(a.code) {
		return nil, retry.Permanent(err)
	}
	if d, ok := retryAfter(a.retryAfter, a.date, time.Now()); ok {
		err = retry.After(d, err)
	}
	return nil, err
}

func retryable(code int) bool {
	switch code {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	}
	return code >= 500 && code <= 599
}

// result keeps a body that Postgres will take as json. A cut document would be no JSON, so a longer one is dropped.
func result(body []byte) json.RawMessage {
	if len(body) == 0 || len(body) > maxResult || !utf8.Valid(body) || !json.Valid(body) {
		return nil
	}
	return json.RawMessage(body)
}

// retryAfter reads both forms of RFC 9110, 10.2.3: seconds, and an HTTP date. A date is compared with the sender's
// own Date where there is one, so that a clock that differs from ours does not bring us back too early.
func retryAfter(value, date string, now time.Time) (time.Duration, bool) {
	value = strings.TrimSpace(value)
	if value == "" {
		return 0, false
	}
	if digits := strings.TrimLeft(value, "0123456789"); digits == "" {
		seconds, err := strconv.ParseInt(value, 10, 64)
		if err != nil || seconds > int64(maxRetryAfter/time.Second) {
			return maxRetryAfter, true
		}
		return time.Duration(seconds) * time.Second, true
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0, false
	}
	if theirs, err := http.ParseTime(date); err == nil {
		now = theirs
	}
	return min(max(at.Sub(now), 0), maxRetryAfter), true
}

// classError is an error with the class that the attempt log shows.
type classError struct {
	class string
	text  string
	cause error
}

func (e *classError) Error() string      { return e.text }
func (e *classError) Unwrap() error      { return e.cause }
func (e *classError) ErrorClass() string { return e.class }
