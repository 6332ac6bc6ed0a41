package config

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// List is a comma separated list. Blanks around an item are dropped; an empty item or one given twice is refused.
type List []string

// Set parses the list.
func (l *List) Set(s string) error {
	var list List
	for item := range strings.SplitSeq(s, ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			return expected("a comma separated list without empty items, such as A,B")
		}
		for _, other := range list {
			if other == item {
				return expected("a list that names " + strconv.Quote(item) + " once")
			}
		}
		list = append(list, item)
	}
	*l = list
	return nil
}

func (l List) String() string { return strings.Join(l, ",") }

// Retention is how long finished rows are kept. The zero value keeps them until a person decides.
type Retention struct {
	Limited bool          // false: kept
	After   time.Duration // 0: deleted as soon as they finish
}

const retentionForm = `days or a duration, such as 30d or 12h; 0 deletes at once`

// Set parses days (30d), a Go duration (12h) or 0.
func (r *Retention) Set(s string) error {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 32)
		if err != nil || n > 36500 {
			return expected(retentionForm)
		}
		*r = Retention{Limited: true, After: time.Duration(n) * 24 * time.Hour}
		return nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return expected(retentionForm)
	}
	*r = Retention{Limited: true, After: d}
	return nil
}

// age is the same for a relay.
func (r Retention) age() time.Duration {
	switch {
	case !r.Limited:
		return outbox.Forever
	case r.After == 0:
		return outbox.AtOnce
	}
	return r.After
}

func (r Retention) String() string {
	if !r.Limited {
		return "kept"
	}
	if r.After > 0 && r.After%(24*time.Hour) == 0 {
		return strconv.Itoa(int(r.After/(24*time.Hour))) + "d"
	}
	return r.After.String()
}

const redacted = "[redacted]"

// Secret is a value that no print shows. string(s) is the value.
type Secret string

// Format prints a placeholder whatever the verb; a Stringer alone would let %d and %#v through.
func (s Secret) Format(f fmt.State, _ rune) {
	if s != "" {
		_, _ = io.WriteString(f, redacted)
	}
}

// MarshalText keeps the value out of JSON and of logs.
func (s Secret) MarshalText() ([]byte, error) { return fmt.Append(nil, s), nil }

// URL is an address that may hold a password or a token. string(u) is the value; a print shows scheme, host and
// path only.
type URL string

// Redacted is the address without user information and query.
func (u URL) Redacted() string {
	if u == "" {
		return ""
	}
	parts := strings.Split(string(u), ",")
	if strings.Count(string(u), "://") != len(parts) {
		parts = []string{string(u)} // not a list: a Postgres URL may name several hosts
	}
	for i, part := range parts {
		p, err := url.Parse(part)
		if err != nil || p.Scheme == "" || strings.Count(part, "://") != 1 {
			return redacted // such as host=… password=…
		}
		if p.Opaque != "" {
			parts[i] = p.Scheme + ":" + p.Opaque
			continue
		}
		shown := p.Scheme + "://"
		if p.User != nil {
			shown += "xxxxx@" // the user part alone may be a token
		}
		parts[i] = shown + p.Host + p.Path
	}
	return strings.Join(parts, ",")
}

// Format prints the redacted address whatever the verb.
func (u URL) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, u.Redacted()) }

// MarshalText keeps user information out of JSON and of logs.
func (u URL) MarshalText() ([]byte, error) { return []byte(u.Redacted()), nil }

// expected is the error of a Set method: what the value should have looked like.
func expected(form string) error { return expectedError{form} }

type expectedError struct{ form string }

func (e expectedError) Error() string { return "expected " + e.form }

// Error is a configuration error: the process should not start, and restarting it does not help.
type Error struct{ err error }

func (e *Error) Error() string { return e.err.Error() }
func (e *Error) Unwrap() error { return e.err }

// Wrong makes an [Error] of what another package says of the environment.
func Wrong(err error) error { return &Error{err} }

// Invalid returns an [Error] about one variable; name has no prefix.
func Invalid(name, format string, args ...any) error {
	return &Error{fmt.Errorf(Prefix+name+": "+format, args...)}
}

func joined(errs []error) error {
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	return &Error{errors.Join(errs...)}
}
