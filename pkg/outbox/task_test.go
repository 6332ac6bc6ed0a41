package outbox

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

// Field case C-015: one value that Go cannot encode made a whole list fail.
func TestTaskAlwaysHasJSON(t *testing.T) {
	deep := func(n int) string { return strings.Repeat(`{"a":[`, n/2) + strings.Repeat(`]}`, n/2) }
	for name, c := range map[string]struct{ payload, want string }{
		"as it is":       {`{"id": 1970670598291982290}`, `"payload":{"id":1970670598291982290}`},
		"absent":         {"", `"xid":""`},
		"null":           {"null", `"payload":null`},
		"half surrogate": {`"\ud800"`, `"payload":"\ud800"`},
		"just readable":  {deep(9_900), `"payload":{"a":[`},
		"too deep":       {deep(10_000), `"payload":"{\"a\":[`},
		"deeper than Go": {deep(12_000), `"payload":"{\"a\":[`},
		"brackets":       {`"` + strings.Repeat(`[\"`, 12_000) + `"`, `"payload":"[\"[`},
	} {
		tasks := []Task{{ID: 1<<60 + 1, RunAt: &MaxTime, CreatedAt: MinTime, Payload: json.RawMessage(c.payload)}}
		got, err := json.Marshal(map[string]any{"tasks": tasks})
		if err != nil || !strings.Contains(string(got), c.want) {
			t.Errorf("%s: got %.200s, %v, want %s", name, got, err, c.want)
			continue
		}
		var back struct{ Tasks []Task }
		if err := json.Unmarshal(got, &back); err != nil {
			t.Errorf("%s: cannot be read again: %v", name, err)
		} else if back.Tasks[0].ID != tasks[0].ID || !back.Tasks[0].RunAt.Equal(MaxTime) {
			t.Errorf("%s: came back as %v", name, back.Tasks[0])
		}
	}
}

func TestTaskIDsAreStringsInJSON(t *testing.T) {
	token := int64(-9007199254740993)
	got, err := json.Marshal(Task{ID: 9007199254740993, LeaseToken: &token, ParentID: &token})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"id":"9007199254740993"`, `"lease_token":"-9007199254740993"`, `"parent_id":"-9007199254740993"`} {
		if !strings.Contains(string(got), want) {
			t.Errorf("%s is not in %s", want, got)
		}
	}
}

func TestDue(t *testing.T) {
	at := func(min int) *time.Time { u := time.Date(2026, 1, 1, 0, min, 0, 0, time.UTC); return &u }
	for want, task := range map[int]Task{
		1: {CreatedAt: *at(1)},
		2: {CreatedAt: *at(1), RunAt: at(2)},
		3: {CreatedAt: *at(1), RunAt: at(2), NextAttemptAt: at(3)},
	} {
		if got := task.Due().Minute(); got != want {
			t.Errorf("got minute %d, want %d", got, want)
		}
	}
}

func TestFilter(t *testing.T) {
	where, args, err := Filter{BizType: "T", Status: "retrying", BizID: "b", ErrorContains: "100%", Limit: 7, Before: 9}.where()
	want := "\n  AND t.biz_type = $1::text\n  AND t.status = $2::text\n  AND t.biz_id = $3::text" +
		"\n  AND strpos(t.last_error, $4::text) > 0\n  AND t.id < $5::bigint\nORDER BY t.id DESC\nLIMIT 7"
	if err != nil || where != want || fmt.Sprint(args) != "[T retrying b 100% 9]" {
		t.Errorf("got %q %v, %v, want %q", where, args, err, want)
	}
	if where, _, err := (Filter{}).where(); err != nil || !strings.HasSuffix(where, "LIMIT 50") {
		t.Errorf("the zero filter: got %q, %v", where, err)
	}
	for want, f := range map[string]Filter{
		"1 to 1000":         {Limit: 1001},
		"limit is -1":       {Limit: -1},
		"pending, running":  {Status: "failed"},
		"not valid UTF-8":   {BizID: "\xff"},
		"Postgres cannot h": {ErrorContains: "a\x00"},
	} {
		if _, _, err := f.where(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q in it", f, err, want)
		}
	}
}

func TestSchemaNames(t *testing.T) {
	for _, s := range []Schema{"", "taskrelay", "_x", "tr_2"} {
		if err := s.Validate(); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for _, s := range []Schema{"Taskrelay", "2x", "a-b", "a b", `a"b`, "a;drop", "é", "a\n", Schema(strings.Repeat("a", 42))} {
		if err := s.Validate(); err == nil {
			t.Errorf("%q passes", s)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%q was rendered", s)
				}
			}()
			s.Render("SELECT FROM {{schema}}.task")
		}()
	}
	if got, want := Schema("eu").Render("{{schema}}.a, {{schema}}.b"), "eu.a, eu.b"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAttemptDurationIsNeverNegative(t *testing.T) {
	now := time.Now()
	if d := (Attempt{StartedAt: now, FinishedAt: now.Add(-time.Minute)}).Duration(); d != 0 {
		t.Errorf("got %v", d)
	}
}
