package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"
)

func TestBadInputIsRefusedBeforeAnythingIsSent(t *testing.T) {
	deep := strings.Repeat("[", 10_001) + strings.Repeat("]", 10_001)
	for name, c := range map[string]struct {
		bizType string
		payload any
		opts    []Option
		want    string
	}{
		"type with a dot":         {"order.created", nil, nil, "no dots or spaces"},
		"type with a space":       {"order created", nil, nil, "biz type"},
		"type with a wildcard":    {"a*b", nil, nil, "biz type"},
		"type with a line end":    {"x\r\nPUB evil 1\r\nA", nil, nil, "biz type"},
		"type ending in newline":  {"ORDER\n", nil, nil, "biz type"},
		"type not ASCII":          {"заказ", nil, nil, "biz type"},
		"type beginning with _":   {"_a", nil, nil, "biz type"},
		"type beginning with -":   {"-a", nil, nil, "biz type"},
		"no type":                 {"", nil, nil, "biz type"},
		"type of 64":              {strings.Repeat("a", 64), nil, nil, "1 to 63"},
		"empty biz id":            {"T", nil, []Option{BizID("")}, "biz id is empty"},
		"biz id of 256":           {"T", nil, []Option{BizID(strings.Repeat("x", 256))}, "biz id is 256 bytes long, want 1 to 255"},
		"biz id of 255 wide":      {"T", nil, []Option{BizID(strings.Repeat("😀", 255))}, "1020 bytes"},
		"biz id with a line end":  {"T", nil, []Option{BizID("O-1\r\n")}, "control character at byte 3"},
		"biz id with NUL":         {"T", nil, []Option{BizID("O\x00")}, "control character at byte 1"},
		"biz id with DEL":         {"T", nil, []Option{BizID("\x7f")}, "control character"},
		"biz id not UTF-8":        {"T", nil, []Option{BizID("a\xff")}, "not valid UTF-8"},
		"At without a time":       {"T", nil, []Option{At(time.Time{})}, "not set"},
		"At 10000":                {"T", nil, []Option{At(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC))}, "year is 10000, want 1 to 9999"},
		"At rounded to 10000":     {"T", nil, []Option{At(time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC))}, "10000"},
		"At year 0":               {"T", nil, []Option{At(time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC))}, "year is 0"},
		"In the past":             {"T", nil, []Option{In(-time.Second)}, "-1s is negative"},
		"no attempts":             {"T", nil, []Option{MaxAttempts(0)}, "1 to 1000"},
		"minus one attempts":      {"T", nil, []Option{MaxAttempts(-1)}, "1 to 1000"},
		"too many attempts":       {"T", nil, []Option{MaxAttempts(1001)}, "1 to 1000"},
		"ordering":                {"T", nil, []Option{OrderingKey("k")}, "does not run tasks in order"},
		"header Task-Id":          {"T", nil, []Option{Header("task-id", "7")}, "reserved"},
		"header Nats-Msg-Id":      {"T", nil, []Option{Header("NATS-Msg-Id", "7")}, "reserved"},
		"header with a space":     {"T", nil, []Option{Header("a b", "7")}, "want a name"},
		"header without a name":   {"T", nil, []Option{Header("", "7")}, "want a name"},
		"header with CR LF":       {"T", nil, []Option{Header("a", "1\r\nTask-Id: 2")}, "control character at byte 1"},
		"header not UTF-8":        {"T", nil, []Option{Header("a", "\xff")}, "not valid UTF-8"},
		"headers too long":        {"T", nil, []Option{Header("a", strings.Repeat("x", MaxHeaders))}, "at most 49152"},
		"nil option":              {"T", nil, []Option{High(), nil}, "option 1 is nil"},
		"plain text":              {"T", "hello", nil, "not JSON"},
		"empty string":            {"T", "", nil, "it is empty"},
		"nil bytes":               {"T", []byte(nil), nil, "it is empty"},
		"two documents":           {"T", `{}{}`, nil, "not JSON"},
		"cut document":            {"T", []byte(`{`), nil, "unexpected end"},
		"byte order mark":         {"T", "\ufeff{}", nil, "not JSON"},
		"literal NUL":             {"T", "{\"a\":\"\x00\"}", nil, "not JSON"},
		"payload not UTF-8":       {"T", []byte("{\"a\":\"\xff\"}"), nil, "not valid UTF-8"},
		"surrogate as raw bytes":  {"T", []byte("{\"a\":\"\xed\xa0\x80\"}"), nil, "not valid UTF-8"},
		"payload too deep":        {"T", deep, nil, "exceeded max depth"},
		"payload too large":       {"T", `"` + strings.Repeat("x", MaxPayload-1) + `"`, nil, "payload is 524289 bytes, at most 524288"},
		"value too large":         {"T", strings.Split(strings.Repeat("x,", MaxPayload/3), ","), nil, "at most 524288"},
		"NaN":                     {"T", math.NaN(), nil, "payload: json: unsupported value: NaN"},
		"channel":                 {"T", make(chan int), nil, "unsupported type"},
		"string in a struct":      {"T", struct{ Name string }{"a\xff"}, nil, "not valid UTF-8"},
		"string in a map's key":   {"T", map[string]int{"a\xff": 1}, nil, "not valid UTF-8"},
		"string in a slice, deep": {"T", []any{map[string]any{"a": []*string{new(string), ptr("\xc3")}}}, nil, "not valid UTF-8"},
	} {
		_, err := newTaskRow(c.bizType, c.payload, c.opts)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got error %.200v, want %q in it", name, err, c.want)
		}
	}
}

func ptr[T any](v T) *T { return &v }

// Field cases C-001, C-004 to C-007: what reaches the table is byte for byte what was given.
func TestPayloadStaysAsItIs(t *testing.T) {
	type payment struct {
		Amount json.Number `json:"amount"`
		Memo   string      `json:"memo"`
		secret string
	}
	deep := strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000)
	largest := `"` + strings.Repeat("x", MaxPayload-2) + `"`
	for name, c := range map[string]struct {
		payload any
		want    string
	}{
		"nil":               {nil, `{}`},
		"null":              {"null", `null`},
		"nil pointer":       {(*payment)(nil), `null`},
		"empty object":      {[]byte(`{}`), `{}`},
		"empty string":      {`""`, `""`},
		"empty list":        {json.RawMessage(`[]`), `[]`},
		"order and spaces":  {` { "b" : 1, "a":12345678901234567890.10 } `, ` { "b" : 1, "a":12345678901234567890.10 } `},
		"escaped NUL":       {`{"a":"x\u0000y"}`, `{"a":"x\u0000y"}`},
		"half a surrogate":  {`{"a":"\ud800"}`, `{"a":"\ud800"}`},
		"replacement":       {`{"a":"\ufffd"}`, `{"a":"\ufffd"}`},
		"10,000 deep":       {deep, deep},
		"512 KiB":           {largest, largest},
		"struct":            {payment{"99.990", "<b> & Ünïcode \u2028", "x"}, `{"amount":99.990,"memo":"<b> & Ünïcode \u2028"}`},
		"value":             {map[string]int64{"id": 1970670598291982290}, `{"id":1970670598291982290}`},
		"a real U+FFFD":     {map[string]string{"a": "\ufffd"}, `{"a":"` + "\ufffd" + `"}`},
		"its escape inside": {map[string]json.RawMessage{"a": json.RawMessage(`"\ufffd"`)}, `{"a":"\ufffd"}`},
		"its escape quoted": {map[string]string{"a": `\ufffd`}, `{"a":"\\ufffd"}`},
		"bytes in a struct": {struct{ B []byte }{[]byte{0xff}}, `{"B":"/w=="}`},
		"time":              {time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), `"2026-01-02T03:04:05Z"`},
	} {
		r, err := newTaskRow("T", c.payload, nil)
		if err != nil || r.payload != c.want {
			t.Errorf("%s: got %.100s, %v, want %.100s", name, r.payload, err, c.want)
		}
	}
}

func TestOptions(t *testing.T) {
	cet := time.FixedZone("CET", 3600)
	for name, c := range map[string]struct {
		opts []Option
		want newRow
	}{
		"none": {nil, newRow{headers: "{}"}},
		"all": {
			[]Option{BizID("O-1"), High(), At(time.Date(2026, 1, 2, 3, 4, 5, 6001, cet)), MaxAttempts(3), Header("tenant", "a"), Header("traceparent", "00-\"x\"<\t>")},
			newRow{bizID: ptr("O-1"), priority: ptr("high"), runAt: ptr("2026-01-02T02:04:05.000007Z"), maxAttempts: ptr(int64(3)),
				headers: `{"tenant":"a","traceparent":"00-\"x\"<\t>"}`}},
		"low":                       {[]Option{High(), Low()}, newRow{priority: ptr("low"), headers: "{}"}},
		"in":                        {[]Option{In(1500 * time.Millisecond)}, newRow{delay: ptr(int64(1_500_000)), headers: "{}"}},
		"in, rounded up":            {[]Option{In(1)}, newRow{delay: ptr(int64(1)), headers: "{}"}},
		"in, the longest":           {[]Option{In(math.MaxInt64)}, newRow{delay: ptr(int64(math.MaxInt64/1000 + 1)), headers: "{}"}},
		"in no time":                {[]Option{In(time.Second), In(0)}, newRow{headers: "{}"}},
		"the last of At and In":     {[]Option{At(time.Now()), In(time.Second)}, newRow{delay: ptr(int64(1_000_000)), headers: "{}"}},
		"the first year":            {[]Option{At(time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC))}, newRow{runAt: ptr("0001-01-01T00:00:01Z"), headers: "{}"}},
		"the last value of a name":  {[]Option{Header("a", "1"), Header("a", "")}, newRow{headers: `{"a":""}`}},
		"a biz id of 255 and space": {[]Option{BizID(strings.Repeat("é", 127) + " ")}, newRow{bizID: ptr(strings.Repeat("é", 127) + " "), headers: "{}"}},
	} {
		got, err := newTaskRow("T", nil, c.opts)
		c.want.bizType, c.want.payload, c.want.headerMap, got.headerMap = "T", "{}", nil, nil
		if g, w := describe(got), describe(c.want); err != nil || g != w {
			t.Errorf("%s: got %s, %v, want %s", name, g, err, w)
		}
	}
}

func describe(r newRow) string {
	b, _ := json.Marshal([]any{r.bizType, r.bizID, r.priority, r.payload, r.headers, r.runAt, r.delay, r.maxAttempts})
	return string(b)
}

func TestNoTransactionIsAnError(t *testing.T) {
	ctx := context.Background()
	if _, err := Enqueue(ctx, nil, "T", nil); err == nil || !strings.Contains(err.Error(), "transaction is nil") {
		t.Errorf("Enqueue: got %v", err)
	}
	if _, err := EnqueueSQL(ctx, (*sql.Tx)(nil), "T", nil); err == nil || !strings.Contains(err.Error(), "transaction is nil") {
		t.Errorf("EnqueueSQL: got %v", err)
	}
	if _, err := EnqueueMany(ctx, nil, nil); err == nil || !strings.Contains(err.Error(), "transaction is nil") {
		t.Errorf("EnqueueMany: got %v", err)
	}
}

func TestManyNamesTheFirstBadTask(t *testing.T) {
	_, err := newBatch([]NewTask{{BizType: "T"}, {BizType: "T", Payload: "{"}, {BizType: "t.t"}})
	if err == nil || !strings.Contains(err.Error(), "task 1: payload is not JSON") {
		t.Errorf("got %v", err)
	}
}

func TestManySplitsByRowsAndBytes(t *testing.T) {
	tasks := make([]NewTask, manyRows+3)
	for i := range tasks {
		tasks[i] = NewTask{BizType: "T"}
	}
	tasks[1].Options, tasks[4].Options = []Option{BizID("a")}, []Option{BizID("a")}
	b, err := newBatch(tasks)
	if err != nil {
		t.Fatal(err)
	}
	parts := b.parts()
	if len(parts) != 2 || len(parts[0]) != manyRows || len(parts[1]) != 2 || b.repeats[4] != 1 {
		t.Errorf("got %d parts, repeats %v", len(parts), b.repeats)
	}

	large := `"` + strings.Repeat("x", MaxPayload-2) + `"`
	for i := range tasks[:20] {
		tasks[i].Payload = large
	}
	if b, err = newBatch(tasks[:20]); err != nil {
		t.Fatal(err)
	}
	for _, part := range b.parts() {
		if n := len(part) * MaxPayload; n > manyBytes {
			t.Errorf("a part of %d bytes", n)
		}
	}
}
