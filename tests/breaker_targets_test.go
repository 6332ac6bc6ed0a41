package tests

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Endpoints that are no HTTP service, or a broken one. Each attempt is one call, each ends within its limit, a slot is
// never lost, and what came back is text that a person can read.
func TestEndpointsThatMisbehave(t *testing.T) {
	t.Parallel()
	// An answer with a length says that the connection closes: else the next attempt would use it, and no handler see it.
	raw := func(answer string) func(net.Conn) { return func(c net.Conn) { _, _ = io.WriteString(c, answer) } }
	kinds := map[string]struct {
		answer func(net.Conn)
		status string
		calls  int
		class  string
	}{
		"closes":       {func(net.Conn) {}, "dead", 2, "http_no_answer"},
		"resets":       {func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0) }, "dead", 2, "http_no_answer"},
		"ssh":          {raw("SSH-2.0-OpenSSH_9.2\r\n"), "dead", 2, "http_no_answer"},
		"binary":       {raw("\x00\xff\xfe\x80\r\n\r\n"), "dead", 2, "http_no_answer"},
		"half status":  {raw("HTTP/1.1 2"), "dead", 2, "http_no_answer"},
		"early hints":  {raw(strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 20)), "dead", 2, "http_no_answer"},
		"large header": {raw("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n"), "dead", 2, "http_no_answer"},
		"two lengths":  {raw("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"), "dead", 2, "http_no_answer"},
		"999":          {raw("HTTP/1.1 999 Nope\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"), "dead", 1, "http_999"},
		"bad bytes":    {raw("HTTP/1.1 500 X\r\nConnection: close\r\nContent-Length: 4\r\n\r\n\xff\xfe\x00A"), "dead", 2, "http_500"},
		// The status has come, and it decides.
		"half a body": {raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"), "succeeded", 1, ""},
		"deep result": {raw("HTTP/1.1 200 OK\r\n\r\n" + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000)), "succeeded", 1, ""},
		"NUL result":  {raw("HTTP/1.1 200 OK\r\n\r\n" + `{"a":"\u0000\ud800"}`), "succeeded", 1, ""},
		"big number":  {raw("HTTP/1.1 200 OK\r\n\r\n1e999999"), "succeeded", 1, ""},
	}
	var mu sync.Mutex
	calls := map[string]int{}
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		name := r.Header.Get("Task-Biz-Id")
		mu.Lock()
		calls[name]++
		mu.Unlock()
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		if strings.HasPrefix(name, "websocket") {
			// The bare connection stays open, longer than the attempt may take.
			_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
			<-release
			return
		}
		kinds[name].answer(conn)
	}))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(release) })

	e := testenv.New(t)
	e.StartRelay()
	worker := e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", server.URL, "TIMEOUT", "2s", "MAX_ATTEMPTS", "2", "BASE_DELAY", "50ms", "CONCURRENCY", "3")...)
	// More of these than there are slots: had one kept its slot, the others would not get through.
	for i := range 6 {
		e.Insert(t, "ORDER_PAYMENT", "biz_id", fmt.Sprint("websocket ", i))
	}
	ids := map[string]int64{}
	for name := range kinds {
		ids[name] = e.Insert(t, "ORDER_PAYMENT", "biz_id", name)
	}
	e.WaitNoneOpen(t, soon)
	mu.Lock()
	defer mu.Unlock()
	for name, want := range kinds {
		row := e.Task(t, ids[name])
		equal(t, name+": status", row.Status, want.status)
		equal(t, name+": class", text(row.ErrorClass), want.class)
		equal(t, name+": calls", calls[name], want.calls)
		equal(t, name+": attempts in the log", len(e.Attempts(t, row.ID)), want.calls)
		if want.status == "dead" {
			waitLetter(t, e, "ORDER_PAYMENT", row.ID)
		}
	}
	equal(t, "result with NUL", text(e.Task(t, ids["NUL result"]).Result), `{"a":"\u0000\ud800"}`)
	equal(t, "tasks of a websocket, dead at once", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id LIKE 'websocket%' AND status = 'dead' AND attempt = 1 AND error_class = 'http_101'`), 6)
	if strings.Contains(worker.Logs(), "leaked") {
		t.Error("a call outlived its limit")
	}
}

// C-026: five hundred tasks fail in the same moment. Their second attempts are spread over the jitter's share of the delay,
// and none comes before its time.
func TestStormOfFailuresIsSpread(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 503})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "2", "BASE_DELAY", "4s", "JITTER", "0.5", "CONCURRENCY", "500")...)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 500)`)
	e.WaitNoneOpen(t, 2*soon)
	equal(t, "calls", len(sink.Calls()), 1000)
	var early, late int64
	e.Scan(t, `SELECT count(*) FILTER (WHERE gap < 2), count(*) FILTER (WHERE gap > 3)
		FROM (SELECT extract(epoch FROM max(started_at) - min(finished_at)) AS gap FROM taskrelay.task_attempt GROUP BY task_id) AS g`, nil, &early, &late)
	equal(t, "second attempts before half the delay", early, 0)
	if late < 100 || late > 490 {
		t.Errorf("%d of 500 second attempts came in the later half of the range, want them spread", late)
	}
}
