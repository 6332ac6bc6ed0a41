package target

import (
	"bufio"
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/webhook"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

type task = command.Task[json.RawMessage]

const uuid = "6f1c1c52-31a4-4b76-9d57-0f3f3c5d7b11"

func newTask() *task {
	return &task{ID: 12, BizType: "ORDER_PAYMENT", BizID: "O-1", Priority: "high", Phase: "execute", Attempt: 2, MaxAttempts: 10,
		Generation: 3, CreatedAt: time.UnixMicro(1700000000123456), Payload: json.RawMessage(`{"amount": 12345678901234567890.10 }`)}
}

// commandFor makes a command with a fixed delay of a second.
func commandFor(t *testing.T, bt config.BizType) command.Command[json.RawMessage] {
	t.Helper()
	bt.Name, bt.Retry = "ORDER_PAYMENT", retry.Fixed{Base: time.Second}
	m := NewMaker(nil, 4, zerolog.Nop())
	t.Cleanup(m.client.http.CloseIdleConnections)
	c, err := m.Command(bt)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func execute(t *testing.T, address string, tsk *task) (any, error) {
	t.Helper()
	return commandFor(t, config.BizType{Target: config.URL(address)}).Execute(t.Context(), tsk)
}

func serve(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

func class(err error) string {
	if c, ok := errors.AsType[interface {
		error
		ErrorClass() string
	}](err); ok {
		return c.ErrorClass()
	}
	return ""
}

func TestRequestIsThePayloadAndItsHeaders(t *testing.T) {
	var got *http.Request
	var body []byte
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
	})
	tsk := newTask()
	tsk.Header = map[string]string{"traceparent": "00-abc-def-01", "X-Tenant": "Zürich"}
	if _, err := execute(t, url+"/tasks?x=1", tsk); err != nil {
		t.Fatal(err)
	}
	if string(body) != `{"amount": 12345678901234567890.10 }` || got.ContentLength != int64(len(body)) {
		t.Errorf("body %q, length %d", body, got.ContentLength)
	}
	if got.Method != "POST" || got.URL.String() != "/tasks?x=1" {
		t.Errorf("%s %s", got.Method, got.URL)
	}
	for name, want := range map[string]string{
		"Content-Type": "application/json", "Task-Id": "12", "Task-Biz-Type": "ORDER_PAYMENT", "Task-Biz-Id": "O-1",
		"Task-Priority": "high", "Task-Phase": "execute", "Task-Attempt": "2", "Task-Max-Attempts": "10",
		"Task-Generation": "3", "Task-Created-At": "1700000000123456", "Traceparent": "00-abc-def-01", "X-Tenant": "Zürich",
	} {
		if v := got.Header.Get(name); v != want {
			t.Errorf("%s: got %q, want %q", name, v, want)
		}
	}
	if v := got.Header.Get("Webhook-Signature"); v != "" {
		t.Errorf("signed without a secret: %q", v)
	}
}

func TestKeyGivesTheInstallation(t *testing.T) {
	for key, want := range map[string]string{
		uuid + "-11":               uuid, // also the end of the uuid
		uuid + "-11-compensate":    uuid,
		uuid + "-11-compensate-r1": uuid,
		uuid + "-11-r11":           uuid,
		"":                         "",
	} {
		if got := installation(key, 11); got != want {
			t.Errorf("%q: got %q, want %q", key, got, want)
		}
	}
}

// Both headers come from the key, on each attempt the same.
func TestIdempotencyKeyAndSignature(t *testing.T) {
	type request struct {
		header http.Header
		body   []byte
	}
	var got []request
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = append(got, request{r.Header, b})
	})
	for secret, key := range map[string]string{
		"whsec_" + base64.StdEncoding.EncodeToString([]byte("k1\x00\xff")): "k1\x00\xff",
		"plain secret": "plain secret",
	} {
		got = nil
		k, err := webhook.Key(secret)
		if err != nil {
			t.Fatal(err)
		}
		do, err := newClient(1).target(url, k)
		if err != nil {
			t.Fatal(err)
		}
		c := newCall(newTask(), nil)
		c.key = uuid + "-12"
		for range 2 {
			if _, err := do(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range got {
			if v := r.header.Values("Idempotency-Key"); len(v) != 1 || v[0] != c.key {
				t.Errorf("Idempotency-Key %q", v)
			}
			if v := r.header.Get("Webhook-Id"); v != c.key {
				t.Errorf("webhook-id %q", v)
			}
			mac := hmac.New(sha256.New, []byte(key))
			fmt.Fprintf(mac, "%s.%s.%s", c.key, r.header.Get("Webhook-Timestamp"), r.body)
			if got, want := r.header.Get("Webhook-Signature"), "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)); got != want {
				t.Errorf("signature %q, want %q", got, want)
			}
		}
	}
	if _, err := webhook.Key("whsec_%%%"); err == nil || strings.Contains(err.Error(), "%%%") {
		t.Errorf("got %v", err)
	}
}

// The vector of Standard Webhooks' reference implementations.
func TestSignatureOfTheSpecification(t *testing.T) {
	key, err := webhook.Key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	if err != nil {
		t.Fatal(err)
	}
	h := http.Header{}
	webhook.Sign(h.Set, key, "msg_p5jXN8AQM9LWM0D4loKWxJek", time.Unix(1614265330, 0), []byte(`{"test": 2432232314}`))
	if got, want := h.Get("webhook-signature"), "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// B73, and everything else a row could try.
func TestRowCannotChooseTargetNorForgeHeaders(t *testing.T) {
	var evil atomic.Int32
	evilURL := serve(t, func(http.ResponseWriter, *http.Request) { evil.Add(1) })
	var got *http.Request
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		_, _ = io.Copy(io.Discard, r.Body)
	})
	tsk := newTask()
	tsk.Header = map[string]string{
		"Target": evilURL, "Location": evilURL, "Host": "evil", "host": "evil", "X-Ok": "1", "Bad Name": "x", "": "x",
		"X-Crlf": "a\r\nTask-Id: 99", "X-Nul": "a\x00b",
		"Content-Length": "3", "Transfer-Encoding": "chunked", "Connection": "close, x-ok", "Upgrade": "h2c", "TE": "trailers",
		"Content-Type": "text/html", "content-encoding": "gzip", "Expect": "100-continue",
		"Authorization": "Bearer stolen", "Proxy-Authorization": "x", "Cookie": "a=b",
		"Idempotency-Key": "forged", "idempotency-key": "forged", "Task-Id": "99", "task-phase": "compensate", "TASK-ATTEMPT": "1",
		"Nats-Msg-Id": "x", "webhook-id": "forged", "Webhook-Signature": "v1,forged", "User-Agent": "x",
	}
	if _, err := execute(t, strings.Replace(url, "http://", "http://user:pass@", 1), tsk); err != nil {
		t.Fatal(err)
	}
	if n := evil.Load(); n != 0 {
		t.Errorf("%d calls to the row's target", n)
	}
	if user, pass, _ := got.BasicAuth(); user != "user" || pass != "pass" {
		t.Errorf("the configured credentials were not sent: %q %q", user, pass)
	}
	if got.Host == "evil" || got.ContentLength != int64(len(tsk.Payload)) || len(got.TransferEncoding) > 0 {
		t.Errorf("host %q, length %d, encoding %q", got.Host, got.ContentLength, got.TransferEncoding)
	}
	for name, want := range map[string]string{"X-Ok": "1", "Task-Id": "12", "Task-Phase": "execute", "Task-Attempt": "2",
		"Content-Type": "application/json", "Idempotency-Key": "", "User-Agent": "taskrelay"} {
		if v := got.Header.Get(name); v != want {
			t.Errorf("%s: got %q, want %q", name, v, want)
		}
	}
	for _, name := range []string{"X-Crlf", "X-Nul", "Cookie", "Content-Encoding", "Nats-Msg-Id", "Webhook-Id", "Webhook-Signature", "Expect", "Te", "Upgrade"} {
		if v, ok := got.Header[name]; ok {
			t.Errorf("%s was sent: %q", name, v)
		}
	}
}

func TestStatusDecides(t *testing.T) {
	var code atomic.Int32
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(int(code.Load()))
		_, _ = io.WriteString(w, "why")
	})
	for c, want := range map[int]string{
		200: "done", 201: "done", 202: "done", 204: "done", 299: "done",
		300: "permanent", 301: "permanent", 304: "permanent", 307: "permanent",
		400: "permanent", 401: "permanent", 403: "permanent", 404: "permanent", 410: "permanent", 422: "permanent", 451: "permanent",
		408: "retry", 409: "retry", 425: "retry", 429: "retry", 500: "retry", 501: "retry", 502: "retry", 503: "retry", 504: "retry", 599: "retry",
		600: "permanent",
	} {
		code.Store(int32(c))
		_, err := execute(t, url, newTask())
		got := "retry"
		switch {
		case err == nil:
			got = "done"
		case retry.IsPermanent(err):
			got = "permanent"
		}
		if got != want {
			t.Errorf("%d: got %s, want %s (%v)", c, got, want, err)
		}
		if err != nil && class(err) != fmt.Sprintf("http_%d", c) {
			t.Errorf("%d: class %q", c, class(err))
		}
		if _, asked := retry.AfterDelay(err); asked {
			t.Errorf("%d: a delay although none was asked for", c)
		}
		if want == "retry" && !strings.Contains(err.Error(), "why") {
			t.Errorf("%d: the error %q lacks the answer", c, err)
		}
	}
}

func TestJSONBodyIsTheResult(t *testing.T) {
	var body string
	url := serve(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, body) })
	big := `"` + strings.Repeat("x", maxResult-2) + `"`
	for answer, want := range map[string]any{
		`{"ok": true}`:        json.RawMessage(`{"ok": true}`),
		` [1.10] `:            json.RawMessage(` [1.10] `),
		big:                   json.RawMessage(big),
		big + " ":             nil, // over the cap: dropped, not cut
		`OK`:                  nil,
		``:                    nil,
		"\"\xff\"":            nil, // Postgres would refuse it, and a success would look like a failure
		`{"a": 1}{"b": 2}`:    nil,
		`<html>fine</html>`:   nil,
		`{"unfinished": true`: nil,
	} {
		body = answer
		got, err := execute(t, url, newTask())
		if err != nil || fmt.Sprintf("%T%s", got, got) != fmt.Sprintf("%T%s", want, want) {
			t.Errorf("%.40q: got %T %.60s, %v", answer, got, got, err)
		}
	}
}

// C-002.
func TestErrorTextIsValidUTF8(t *testing.T) {
	for name, body := range map[string]string{
		"stray bytes": "\xff\xfe\x80A",
		"latin 1":     "Zahlung f\xfcr B\xfcro",
		"nul":         "a\x00b",
		"long":        strings.Repeat("é", 5000),
		"odd cut":     "x" + strings.Repeat("é", 5000),
		"emoji cut":   strings.Repeat("x", maxErrorBody-2) + "🙂🙂",
	} {
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(500)
			_, _ = io.WriteString(w, body)
		})
		_, err := execute(t, url, newTask())
		if err == nil {
			t.Fatal("no error")
		}
		text := err.Error()
		if !utf8.ValidString(text) || strings.ContainsRune(text, 0) || len(text) > maxErrorBody+200 {
			t.Errorf("%s: %d bytes, %q", name, len(text), text)
		}
		if strings.Contains(name, "cut") && strings.Contains(text, "\uFFFD") {
			t.Errorf("%s: half a rune was left: %q", name, text[len(text)-40:])
		}
	}
}

// C-028.
func TestRetryAfterIsHonoured(t *testing.T) {
	var header string
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if header != "" {
			w.Header().Set("Retry-After", header)
		}
		w.WriteHeader(429)
	})
	date := func(d time.Duration) string { return time.Now().Add(d).UTC().Format(http.TimeFormat) }
	for _, c := range []struct {
		header    string
		low, high time.Duration
	}{
		{"7", 7 * time.Second, 7 * time.Second},
		{"0", time.Second, time.Second}, // never shorter than the policy's delay
		{"999999999999999999999999", 24 * time.Hour, 24 * time.Hour},
		{"90000", 24 * time.Hour, 24 * time.Hour},
		{date(7 * time.Second), 6 * time.Second, 8 * time.Second},
		{date(-time.Hour), time.Second, time.Second},
		{date(48 * time.Hour), 24 * time.Hour, 24 * time.Hour},
	} {
		header = c.header
		before := time.Now()
		_, err := execute(t, url, newTask())
		got, ok := retry.AfterDelay(err)
		if !ok || got < c.low || got > c.high {
			t.Errorf("%s: got %v %t, want %v to %v", c.header, got, ok, c.low, c.high)
		}
		if at, perr := http.ParseTime(c.header); perr == nil && c.high < time.Hour && before.Add(got).Before(at.Add(-50*time.Millisecond)) && got > time.Second {
			t.Errorf("%s: %v brings us back before the asked time", c.header, got)
		}
	}
	for _, header = range []string{"", "soon", "-5", "1.5"} {
		_, err := execute(t, url, newTask())
		if d, ok := retry.AfterDelay(err); ok {
			t.Errorf("%q: got %v, want the policy's delay", header, d)
		}
	}
}

func TestDateIsComparedWithTheSendersClock(t *testing.T) {
	now := time.Unix(1700000000, 0)
	theirs := now.Add(-10 * time.Minute)
	got, ok := retryAfter(theirs.Add(30*time.Second).UTC().Format(http.TimeFormat), theirs.UTC().Format(http.TimeFormat), now)
	if !ok || got != 30*time.Second {
		t.Errorf("got %v %t, want 30s", got, ok)
	}
}

// C-125.
func TestRedirectIsNotFollowed(t *testing.T) {
	var hits atomic.Int32
	inside := serve(t, func(http.ResponseWriter, *http.Request) { hits.Add(1) })
	for _, code := range []int{301, 302, 303, 307, 308} {
		for _, location := range []string{inside + "/hit?token=s3cret", "http://169.254.169.254/latest/meta-data/s3cret"} {
			url := serve(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Location", location)
				w.WriteHeader(code)
				_, _ = io.WriteString(w, "internal page s3cret")
			})
			_, err := execute(t, url, newTask())
			if !retry.IsPermanent(err) || strings.Contains(err.Error(), "s3cret") || !strings.Contains(err.Error(), "redirect") {
				t.Errorf("%d: got %v", code, err)
			}
			if !strings.Contains(err.Error(), strings.Split(location, "/")[2]) {
				t.Errorf("%d: %v does not name the host", code, err)
			}
		}
	}
	if n := hits.Load(); n != 0 {
		t.Errorf("%d calls inside", n)
	}
}

// C-126.
func TestSilentEndpointEndsWithTheAttempt(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // the kernel completes connections, and nobody ever answers
	c := commandFor(t, config.BizType{Target: config.URL("http://" + l.Addr().String() + "/?token=s3cret")})
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	var bad atomic.Int32
	for range 100 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
			defer cancel()
			_, err := c.Execute(ctx, newTask())
			if !errors.Is(err, context.DeadlineExceeded) || retry.IsPermanent(err) || strings.Contains(err.Error(), "s3cret") {
				bad.Add(1)
			}
		})
	}
	wg.Wait()
	if n := bad.Load(); n > 0 {
		t.Errorf("%d of 100 ended otherwise", n)
	}
	// A connection whose request has gone before it was open is kept for the next one: two goroutines each.
	allowed := before + 2*4 + 2
	deadline := time.Now().Add(15 * time.Second)
	for runtime.NumGoroutine() > allowed && time.Now().Before(deadline) {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > allowed {
		t.Errorf("%d goroutines, %d before", n, before)
	}
}

// C-127.
func TestEndlessBodyIsReadUpToACap(t *testing.T) {
	for _, code := range []int{200, 500} {
		var sent atomic.Int64
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(code)
			chunk := bytes.Repeat([]byte("x"), 32<<10)
			for sent.Load() < 2<<30 {
				n, err := w.Write(chunk)
				sent.Add(int64(n))
				if err != nil {
					return
				}
			}
		})
		_, err := execute(t, url, newTask())
		if (err == nil) != (code == 200) {
			t.Errorf("%d: %v", code, err)
		}
		if n := sent.Load(); n > 64<<20 {
			t.Errorf("%d: %d bytes were taken", code, n)
		}
	}
}

// A target that is no HTTP service after all, such as a WebSocket: net/http hands out the bare connection, and a read
// of it would not end with the attempt.
func TestSwitchedProtocolIsNotReadFrom(t *testing.T) {
	closed := make(chan struct{})
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer close(closed)
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		_, _ = conn.Read(make([]byte, 1)) // silent until the other side hangs up
	})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	ended := make(chan error, 1)
	c := commandFor(t, config.BizType{Target: config.URL(url)})
	go func() {
		_, err := c.Execute(ctx, newTask())
		ended <- err
	}()
	select {
	case err := <-ended:
		if !retry.IsPermanent(err) || class(err) != "http_101" {
			t.Errorf("got %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the call outlives its context")
	}
	<-closed // and the connection is not kept
}

// net/http repeats a POST that carries the canonical Idempotency-Key when a kept connection breaks. The attempt log
// must know of each call.
func TestBrokenConnectionIsOneCall(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var requests atomic.Int32
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				br := bufio.NewReader(conn)
				for {
					req, err := http.ReadRequest(br)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					if requests.Add(1) > 1 {
						return // after the whole request, without an answer
					}
					_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				}
			}()
		}
	}()
	c := commandFor(t, config.BizType{Target: config.URL("http://" + l.Addr().String())})
	if _, err := c.Execute(t.Context(), newTask()); err != nil {
		t.Fatal(err)
	}
	_, err = c.Execute(t.Context(), newTask())
	if err == nil || retry.IsPermanent(err) || class(err) != "http_no_answer" {
		t.Errorf("got %v", err)
	}
	if n := requests.Load(); n != 2 {
		t.Errorf("%d requests for 2 attempts", n)
	}
}

func TestRefusedConnectionIsRetriedAndNamesNoToken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	_, err = execute(t, "http://u:s3cret@"+addr+"/x?token=s3cret", newTask())
	if err == nil || retry.IsPermanent(err) || strings.Contains(err.Error(), "s3cret") || !strings.Contains(err.Error(), "refused") {
		t.Errorf("got %v", err)
	}
}

func TestCompensateIsASecondTarget(t *testing.T) {
	var got *http.Request
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/flaky" {
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(503)
		}
	})
	c := commandFor(t, config.BizType{Target: "noop:", Compensate: config.URL(url + "/undo")})
	tsk := newTask()
	tsk.Phase = command.PhaseCompensate
	if err := c.Compensate(t.Context(), tsk, errors.New("bank\nsaid \xff no"+strings.Repeat("!", 2000))); err != nil {
		t.Fatal(err)
	}
	if got.URL.Path != "/undo" || got.Header.Get("Task-Phase") != "compensate" {
		t.Errorf("%s, phase %q", got.URL, got.Header.Get("Task-Phase"))
	}
	if e := got.Header.Get("Task-Error"); !strings.HasPrefix(e, "bank said \uFFFD no!!!") || len(e) > maxCause+20 {
		t.Errorf("Task-Error %q", e)
	}
	if c := commandFor(t, config.BizType{Target: "noop:"}); c.Compensate != nil {
		t.Error("a type without COMPENSATE compensates")
	}
	c = commandFor(t, config.BizType{Target: "noop:", Compensate: config.URL(url + "/flaky")})
	err := c.Compensate(t.Context(), tsk, errors.New("x"))
	if d, _ := retry.AfterDelay(err); d != 7*time.Second {
		t.Errorf("got %v, %v", d, err)
	}
}

func TestLogTargetShowsNoPayload(t *testing.T) {
	var out bytes.Buffer
	m := NewMaker(nil, 1, zerolog.New(&out))
	c, err := m.Command(config.BizType{Name: "A", Target: "log:"})
	if err != nil {
		t.Fatal(err)
	}
	if result, err := c.Execute(t.Context(), newTask()); result != nil || err != nil {
		t.Errorf("got %v, %v", result, err)
	}
	if s := out.String(); strings.Contains(s, "amount") || !strings.Contains(s, `"task_id":12`) || !strings.Contains(s, `"bytes":36`) {
		t.Errorf("got %s", s)
	}
}
