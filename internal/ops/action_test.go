package ops

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func find(t *testing.T, name string) action {
	t.Helper()
	for _, a := range actions {
		if a.name == name {
			return a
		}
	}
	t.Fatalf("no action %s", name)
	return action{}
}

// The example of each action is in its description and in its errors, so it has to work.
func TestExamplesAreRequests(t *testing.T) {
	for _, a := range actions {
		c, err := a.parse([]byte(a.example()))
		if err != nil {
			t.Errorf("%s: %v", a.name, err)
			continue
		}
		if sql := a.sql(c); !strings.Contains(sql, "{{schema}}."+a.name+"(") || strings.Count(sql, "=>") != len(c.args) {
			t.Errorf("%s: %s", a.name, sql)
		}
	}
}

func TestIDsAreNumbersOrTexts(t *testing.T) {
	c, err := find(t, "requeue").parse([]byte(`{"ids": ["9007199254740993", 9007199254740993, 1], "reason": "x", "user": "alice", "allow_compensated": true}`))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(c.args), "[[9007199254740993 9007199254740993 1] x true]"; got != want || c.user != "alice" {
		t.Errorf("got %s for %s, want %s", got, c.user, want)
	}
}

// The function with allow_uncompensated has no defaults.
func TestCancelNamesBothFlagsOrNone(t *testing.T) {
	for flags, want := range map[string]string{"": "", `, "compensate": true`: ", compensate => $3::boolean",
		`, "allow_uncompensated": true`: ", allow_uncompensated => $3::boolean, compensate => $4::boolean"} {
		a := find(t, "cancel")
		c, err := a.parse([]byte(`{"ids": [1], "reason": "x"` + flags + `}`))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := a.sql(c), "cancel(ids => $1::bigint[], reason => $2::text"+want+")"; !strings.Contains(got, want) || len(c.args) != strings.Count(got, "=>") {
			t.Errorf("%s: got %s with %v, want %s", flags, got, c.args, want)
		}
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	ids := strings.TrimSuffix(strings.Repeat("1,", maxIDs+1), ",")
	for _, c := range []struct{ action, body, want string }{
		{"requeue", ``, "no body"},
		{"requeue", `[1]`, `{"ids": ["42"], "reason": "why"}`},
		{"requeue", `{"ids": [1], "reason": "x"} {}`, "more than one"},
		{"requeue", `{"ids": [1]}`, `"reason" is missing`},
		{"requeue", `{"reason": "x"}`, `"ids" is missing`},
		{"requeue", `{"id": [1], "reason": "x"}`, `"id" is not known`},
		{"requeue", `{"ids": [], "reason": "x"}`, "ids: expected a list"},
		{"requeue", `{"ids": 1, "reason": "x"}`, "ids: expected a list"},
		{"requeue", `{"ids": [1.5], "reason": "x"}`, "1.5 is no id"},
		{"requeue", `{"ids": [-1], "reason": "x"}`, "-1 is no id"},
		{"requeue", `{"ids": ["1 OR 1"], "reason": "x"}`, "is no id"},
		{"requeue", `{"ids": [99999999999999999999], "reason": "x"}`, "is no id"},
		{"requeue", `{"ids": [null], "reason": "x"}`, "is no id"},
		{"requeue", `{"ids": [` + ids + `], "reason": "x"}`, "1001 ids, at most 1000"},
		{"requeue", `{"ids": [1], "reason": " "}`, "reason: expected a text"},
		{"requeue", `{"ids": [1], "reason": 5}`, "reason: expected a text"},
		{"requeue", `{"ids": [1], "reason": "a\u0000b"}`, "cannot hold"},
		{"requeue", `{"ids": [1], "reason": "` + strings.Repeat("x", 5000) + `"}`, "at most 4096"},
		{"requeue", `{"ids": [1], "reason": "x", "allow_compensated": "yes"}`, "expected true or false"},
		{"requeue", `{"ids": [1], "reason": "x", "allow_compensated": null}`, "expected true or false"},
		{"requeue", `{"ids": [1], "reason": "x", "compensate": true}`, `"compensate" is not known to requeue`},
		{"requeue", `{"ids": [1], "reason": "x", "user": ""}`, "user: expected a text"},
		{"delay", `{"ids": [1], "reason": "x", "by": "tomorrow"}`, "expected a duration"},
		{"delay", `{"ids": [1], "reason": "x", "by": "-5s"}`, "expected a duration"},
		{"delay", `{"ids": [1], "reason": "x", "by": 5}`, "by: expected a text"},
		{"pause", `{"biz_type": "", "reason": "x"}`, "biz_type: expected a text"},
	} {
		if _, err := find(t, c.action).parse([]byte(c.body)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %.80s: got %v, want %s", c.action, c.body, err, c.want)
		}
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	for _, c := range []struct{ state, code, want string }{
		{"42501", "403", "GRANT eu_operator TO relay_user"},
		{"42883", "501", "taskrelay migrate up"},
		{"22023", "400", "the hint"},
		{"P0001", "400", "the hint"},
		{"57014", "503", "nothing was changed"},
		{"XX000", "500", "nothing was changed"},
	} {
		code, text := explain(&pgconn.PgError{Code: c.state, Message: "the message", Hint: "the hint"}, "relay_user", "eu")
		if code != c.code || !strings.Contains(text, c.want) {
			t.Errorf("%s: got %s %s", c.state, code, text)
		}
	}
	if code, text := explain(fmt.Errorf("connection refused"), "u", "s"); code != "503" || !strings.Contains(text, "not known") || strings.Contains(text, "refused") {
		t.Errorf("no answer: got %s %s", code, text)
	}
}

func TestVersionsFitTheProtocol(t *testing.T) {
	for v, want := range map[string]string{"v1.2.3": "1.2.3", "v1.2.3-4-gabcdef0-dirty": "1.2.3-4-gabcdef0-dirty", "devel": "0.0.0", "fe6a469": "0.0.0", "": "0.0.0"} {
		if got := semantic(v); got != want {
			t.Errorf("%q: got %q, want %q", v, got, want)
		}
	}
}
