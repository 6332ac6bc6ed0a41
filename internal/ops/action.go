package ops

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// maxIDs bounds one request. More is bulk work: "taskrelay requeue --type …" runs it in the relay.
const maxIDs = 1000

// An action is a function of the schema that may be asked for.
type action struct {
	name string
	what string
	// needs and takes are the fields of a request, by their names in JSON, which are the function's too. reason is
	// needed by all of them, and user may be given to all.
	needs, takes []string
}

var actions = []action{
	{"requeue", "dead and cancelled tasks run again", []string{"ids"}, []string{"allow_compensated"}},
	{"reset", "the task with this biz id runs from the start", []string{"biz_type", "biz_id"}, []string{"allow_succeeded", "allow_compensated"}},
	{"rerun", "finished tasks run once more", []string{"ids"}, []string{"allow_succeeded", "allow_compensated"}},
	{"run_now", "waiting tasks become due at once", []string{"ids"}, nil},
	{"delay", "waiting tasks become due that much later than now", []string{"ids", "by"}, nil},
	{"set_priority", "waiting tasks become high or low", []string{"ids", "priority"}, nil},
	{"cancel", "unfinished tasks end as cancelled", []string{"ids"}, []string{"compensate", "allow_uncompensated"}},
	{"discard", "dead tasks end as cancelled, their letters go away", []string{"ids"}, nil},
	{"delete_task", "tasks are removed for good", []string{"ids"}, nil},
	{"pause", "tasks of a type are held back", []string{"biz_type"}, nil},
	{"resume", "tasks of a type go on", []string{"biz_type"}, nil},
}

// types are the Postgres types of the fields.
var types = map[string]string{
	"ids": "bigint[]", "by": "interval", "priority": "text", "biz_type": "text", "biz_id": "text", "reason": "text",
	"allow_compensated": "boolean", "allow_succeeded": "boolean", "compensate": "boolean", "allow_uncompensated": "boolean",
}

// A call is a request that was understood.
type call struct {
	user   string
	fields []string
	args   []any
}

// parse reads a request. Its errors are for whoever wrote it.
func (a action) parse(data []byte) (c call, err error) {
	var given map[string]json.RawMessage
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&given); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("no body")
		}
		return c, fmt.Errorf("%w: expected %s", err, a.example())
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("more than one JSON value: expected %s", a.example())
	}
	needs := append(slices.Clone(a.needs), "reason")
	for name := range given {
		if !slices.Contains(needs, name) && !slices.Contains(a.takes, name) && name != "user" {
			return c, fmt.Errorf("field %q is not known to %s: expected %s", name, a.name, strings.Join(slices.Concat(needs, a.takes, []string{"user"}), ", "))
		}
	}
	for _, name := range needs {
		if _, ok := given[name]; !ok {
			return c, fmt.Errorf("field %q is missing: expected %s", name, a.example())
		}
	}
	if raw, ok := given["user"]; ok {
		if c.user, err = readText(raw); err != nil {
			return c, fmt.Errorf("user: %w", err)
		}
	}
	for _, name := range slices.Concat(needs, a.takes) {
		raw, ok := given[name]
		if !ok {
			continue
		}
		arg, err := read(name, raw)
		if err != nil {
			return c, fmt.Errorf("%s: %w", name, err)
		}
		c.fields, c.args = append(c.fields, name), append(c.args, arg)
	}
	// The function with allow_uncompensated has no defaults: beside the one without they could not be told apart.
	if slices.Contains(c.fields, "allow_uncompensated") && !slices.Contains(c.fields, "compensate") {
		c.fields, c.args = append(c.fields, "compensate"), append(c.args, false)
	}
	return c, nil
}

// sql names the arguments, so that a function may get further ones that have defaults.
func (a action) sql(c call) string {
	var b strings.Builder
	fmt.Fprintf(&b, "-- taskrelay: ops %s\nSELECT to_jsonb(f) FROM {{schema}}.%s(", a.name, a.name)
	for i, name := range c.fields {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s => $%d::%s", name, i+1, types[name])
	}
	b.WriteString(") AS f")
	return b.String()
}

// example is a request that works, for error texts and the service's description.
func (a action) example() string {
	examples := map[string]string{"ids": `["42"]`, "by": `"10m"`, "priority": `"high"`, "biz_type": `"ORDER_PAYMENT"`, "biz_id": `"O-1"`, "reason": `"why"`}
	var parts []string
	for _, name := range append(slices.Clone(a.needs), "reason") {
		parts = append(parts, fmt.Sprintf("%q: %s", name, examples[name]))
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

func read(name string, raw json.RawMessage) (any, error) {
	switch types[name] {
	case "bigint[]":
		return readIDs(raw)
	case "boolean":
		var b *bool
		if err := json.Unmarshal(raw, &b); err != nil || b == nil {
			return nil, errors.New("expected true or false")
		}
		return *b, nil
	case "interval":
		s, err := readText(raw)
		if err != nil {
			return nil, err
		}
		by, err := time.ParseDuration(s)
		if err != nil || by < time.Microsecond {
			return nil, fmt.Errorf("%.40q: expected a duration such as 90s, 10m or 24h", s)
		}
		return by, nil
	}
	return readText(raw)
}

func readText(raw json.RawMessage) (string, error) {
	var s *string
	switch err := json.Unmarshal(raw, &s); {
	case err != nil || s == nil || strings.TrimSpace(*s) == "":
		return "", errors.New("expected a text that is not empty")
	case strings.ContainsRune(*s, 0) || !utf8.ValidString(*s):
		return "", errors.New("it has a character that Postgres cannot hold")
	case len(*s) > 4096:
		return "", fmt.Errorf("it has %d bytes, at most 4096 are taken", len(*s))
	}
	return *s, nil
}

// readIDs takes numbers and texts: JavaScript would round a large number.
func readIDs(raw json.RawMessage) ([]int64, error) {
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil || len(list) == 0 {
		return nil, errors.New(`expected a list such as ["42", 43]`)
	}
	if len(list) > maxIDs {
		return nil, fmt.Errorf("%d ids, at most %d are taken at once: send several requests, or see taskrelay bulk --help", len(list), maxIDs)
	}
	ids := make([]int64, len(list))
	for i, one := range list {
		s := string(one)
		if strings.HasPrefix(s, `"`) {
			if err := json.Unmarshal(one, &s); err != nil {
				return nil, fmt.Errorf("%.40s is no id", one)
			}
		}
		id, err := strconv.ParseInt(s, 10, 64)
		if err != nil || id < 1 {
			return nil, fmt.Errorf("%.40s is no id: expected a whole number", one)
		}
		ids[i] = id
	}
	return ids, nil
}
