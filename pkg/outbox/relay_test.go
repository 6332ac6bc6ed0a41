package outbox

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"pgregory.net/rapid"
)

func TestPublishAnswerIsJudgedByItsCode(t *testing.T) {
	tests := []struct {
		data string
		want verdict
		seq  uint64
		dup  bool
	}{
		{`{"stream":"TASKS","seq":123}`, acked, 123, false},
		{`{"stream":"TASKS", "seq":7,"duplicate":true}`, acked, 7, true},
		{`{"stream":"TASKS","seq":7,"duplicate": true}`, acked, 7, true}, // as nats-server writes it
		{`{"stream":"TASKS","domain":"hub","seq":9}`, acked, 9, false},
		{`{"error":{"code":503,"err_code":10077,"description":"maximum messages per subject exceeded"},"stream":"TASKS","seq":0}`, waits, 0, false},
		{`{"error":{"code":400,"err_code":10060,"description":"expected stream does not match"},"stream":"X","seq":0}`, waits, 0, false},
		{`{"error":{"code":404,"err_code":10059,"description":"stream not found"}}`, waits, 0, false},
		{`{"error":{"code":429,"err_code":10167,"description":"too many requests"}}`, waits, 0, false},
		{`{"error":{"code":409,"err_code":10158,"description":"duplicate message id is in process"}}`, waits, 0, false},
		{`{"error":{"code":400,"err_code":10002,"description":"resource limits exceeded for account"}}`, waits, 0, false},
		{`{"error":{"code":503,"err_code":19999,"description":"something new"}}`, waits, 0, false},
		{`{"error":{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"}}`, refused, 0, false},
		{`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence"}}`, refused, 0, false},
		{`{"stream":"TASKS"}`, unknown, 0, false},
		{`{"stream":"TASKS","seq":0}`, unknown, 0, false},
		{`not json`, unknown, 0, false},
	}
	for _, tt := range tests {
		got := parseAnswer(&nats.Msg{Data: []byte(tt.data)})
		if got.verdict != tt.want || got.sequence != tt.seq || got.duplicate != tt.dup {
			t.Errorf("%s: got %+v, want verdict %d seq %d dup %v", tt.data, got, tt.want, tt.seq, tt.dup)
		}
		if (got.err == nil) != (tt.want == acked) {
			t.Errorf("%s: got error %v", tt.data, got.err)
		}
	}
	none := parseAnswer(&nats.Msg{Header: nats.Header{"Status": []string{"503"}}})
	if none.verdict != waits || !errors.Is(none.err, jetstream.ErrNoStreamResponse) {
		t.Errorf("no responders: got %+v", none)
	}
}

func TestRowHeadersCannotSteerTheServerNorForgeOurs(t *testing.T) {
	h := nats.Header{}
	dropped := addRowHeaders(h, []byte(`{
		"traceparent": "00-1", "tenant": "blue",
		"Nats-Rollup": "all", "nats-msg-id": "x", "TASK-Generation": "9", "Task-Id": "1",
		"a b": "x", "x:y": "z", "evil\r\nX": "1", "cr": "a\r\nPUB evil 1", "n": 5, "o": {}, "": "x"}`))
	if dropped != 11 {
		t.Errorf("got %d dropped, want 11", dropped)
	}
	if len(h) != 2 || h.Get("traceparent") != "00-1" || h.Get("tenant") != "blue" {
		t.Errorf("got headers %v", h)
	}
}

func TestHeaderTextIsOneValidLineOfOneKiB(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.String().Draw(t, "text") + strings.Repeat("é", rapid.IntRange(0, 900).Draw(t, "n"))
		got := headerText(s)
		if len(got) > 1024 || !utf8.ValidString(got) || strings.ContainsAny(got, "\r\n\x00") {
			t.Fatalf("got %d bytes: %q", len(got), got)
		}
	})
}

func TestEveryRelayChoosesTheSameOwnerAndOnlyItsLanesMoveWhenItLeaves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var peers []peer
		for i := range rapid.IntRange(1, 6).Draw(t, "relays") {
			peers = append(peers, peer{name: fmt.Sprintf("host-%d-%06x", i, i*7919)})
		}
		gone := rapid.IntRange(0, len(peers)-1).Draw(t, "gone")
		var rest []peer
		for i := range peers {
			if i != gone {
				rest = append(rest, peers[i])
			}
		}
		for i := range 40 {
			k := laneKey{fmt.Sprintf("TYPE_%d", i), PriorityLow}
			owner := chooseRelay(k, peers)
			reversed := make([]peer, len(peers))
			for j := range peers {
				reversed[len(peers)-1-j] = peers[j]
			}
			if got := chooseRelay(k, reversed); got != owner {
				t.Fatalf("order of relays matters: %s and %s", owner, got)
			}
			if len(rest) > 0 && owner != peers[gone].name && chooseRelay(k, rest) != owner {
				t.Fatalf("lane %v moved although its relay stayed", k)
			}
		}
	})
}

func TestLanesAreSharedFairly(t *testing.T) {
	peers := []peer{{name: "a-1-x"}, {name: "a-2-y"}, {name: "a-3-z"}, {name: "limited", bizTypes: []string{"TYPE_1"}}}
	n := map[string]int{}
	for i := range 300 {
		n[chooseRelay(laneKey{fmt.Sprintf("TYPE_%d", i), PriorityHigh}, peers)]++
	}
	for _, name := range []string{"a-1-x", "a-2-y", "a-3-z"} {
		if n[name] < 60 {
			t.Errorf("relay %s has %d of 300 lanes", name, n[name])
		}
	}
	if n["limited"] > 1 {
		t.Errorf("a relay limited to one type got %d lanes", n["limited"])
	}
}

func TestSubjectFilterCovers(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"tasks.>", "tasks.*.*", true}, {"tasks.*.*", "tasks.*.*", true}, {">", "tasks.*.*", true},
		{"tasks.*", "tasks.*.*", false}, {"tasks.A.*", "tasks.*.*", false}, {"eu.tasks.>", "tasks.*.*", false},
		{"tasks.*.*.*", "tasks.*.*", false}, {"tasks.a.low", "tasks.a.low", true},
	} {
		if got := covers(tt.a, tt.b); got != tt.want {
			t.Errorf("covers(%q, %q) = %v", tt.a, tt.b, got)
		}
	}
}

func TestMessageIDTellsRowsGenerationsAndLooksApart(t *testing.T) {
	seen := map[string]bool{}
	for _, id := range []string{
		messageID("i", 1, 2, 0, 0), messageID("i", 1, 2, 1, 0), messageID("i", 1, 2, 0, 1), messageID("i", 1, 3, 0, 0),
		messageID("i", 2, 2, 0, 0), messageID("j", 1, 2, 0, 0), messageID("i", 12, 0, 0, 0), messageID("i", 1, 20, 0, 0),
	} {
		if seen[id] {
			t.Errorf("id %q twice", id)
		}
		seen[id] = true
	}
	if got, want := messageID("inst", 42, 1700000000000001, 3, 2), "inst.42.1700000000000001.3.2"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestInstantOfAPositionNeverMovesBack(t *testing.T) {
	at := func(s int64) pgtype.Timestamptz { return pgtype.Timestamptz{Time: time.Unix(s, 0), Valid: true} }
	old := pgtype.Timestamptz{Valid: true, InfinityModifier: pgtype.NegativeInfinity}
	if got := later(at(5), at(9)); got != at(9) {
		t.Errorf("got %v", got)
	}
	if got := later(at(9), at(5)); got != at(9) {
		t.Errorf("got %v", got)
	}
	if got := later(at(1), old); got != at(1) {
		t.Errorf("got %v", got)
	}
}

func TestPageKeyEntersTheDuePartBehindAllFreshRows(t *testing.T) {
	p := position{snapshot: "10:12:10", at: pgtype.Timestamptz{Time: time.Unix(5, 0), Valid: true}}
	k := firstKey(p)
	if k.xid != "0" || k.id != -1 || k.runID != math.MaxInt64 || k.runAt != p.at {
		t.Fatalf("first key %+v", k)
	}
	fresh := pageRow{part: 2, xid: "15", record: record{id: 7}}
	if got := fresh.keyAfter(k, snapshotMax("14:20:14,16")); got.xid != "15" || got.id != 7 || got.runAt != p.at || got.runID != k.runID {
		t.Errorf("after a fresh row: %+v", got)
	}
	due := pageRow{part: 3, xid: "3", runAt: pgtype.Timestamptz{Time: time.Unix(6, 0), Valid: true}, record: record{id: 9}}
	if got := due.keyAfter(k, snapshotMax("14:20:14,16")); got.xid != "20" || got.id != -1 || got.runAt != due.runAt || got.runID != 9 {
		t.Errorf("after a due row: %+v", got)
	}
}

func TestNamespacePrecedesEveryName(t *testing.T) {
	n := Names{Namespace: "eu-1"}
	got := []string{n.Stream(), n.DeadStream(), n.EventStream(), n.Subject("A", PriorityLow), n.DeadSubject("A", 7), n.EventSubject("A", EventDead), n.Wake()}
	want := []string{"EU_1_TASKS", "EU_1_TASKS_DEAD", "EU_1_TASKS_EVENTS", "eu-1.tasks.A.low", "eu-1.dead.A.7", "eu-1.events.A.dead", "eu-1.taskrelay.wake"}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("got %q, want %q", got[i], want[i])
		}
	}
}
