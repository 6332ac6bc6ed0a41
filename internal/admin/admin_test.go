package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/rs/zerolog"
)

func start(t *testing.T) (*Server, string) {
	t.Helper()
	var log bytes.Buffer
	s, err := Listen("127.0.0.1:0", zerolog.New(&log))
	if err != nil {
		t.Fatal(err)
	}
	var line struct{ Address string }
	if err := json.Unmarshal(log.Bytes(), &line); err != nil || line.Address != s.Addr() || strings.HasSuffix(s.Addr(), ":0") {
		t.Fatalf("the log %q does not name the real address %s", log.String(), s.Addr())
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return s, "http://" + s.Addr()
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestHealth(t *testing.T) {
	s, url := start(t)
	want := func(path string, code int, text string) {
		t.Helper()
		gotCode, gotText := get(t, url+path)
		if gotCode != code || gotText != text {
			t.Errorf("%s: got %d %q, want %d %q", path, gotCode, gotText, code, text)
		}
	}
	want("/livez", 200, "ok\n")
	want("/readyz", 503, "not ready: starting\n")

	fine := Check{"postgres", func(context.Context) error { return nil }}
	s.Serving(func() error { return nil }, fine, Check{"nats", func(context.Context) error { return nil }})
	want("/livez", 200, "ok\n")
	want("/readyz", 200, "ok\n")
	want("/readyz?verbose", 200, "[+] postgres ok\n[+] nats ok\nok\n")

	// One check that hangs is cut off and hides no other.
	s.Serving(func() error { return errors.New("no fetch for 31s") }, fine,
		Check{"nats", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }})
	want("/livez", 503, "not alive: no fetch for 31s\n")
	want("/readyz", 503, "not ready: nats: context deadline exceeded\n")
	want("/readyz?verbose", 503, "[+] postgres ok\n[-] nats: context deadline exceeded\nnot ready: nats: context deadline exceeded\n")

	s.Stopping()
	want("/livez", 200, "ok\n")
	want("/readyz", 503, "not ready: stopping\n")
}

func TestNothingElseIsServed(t *testing.T) {
	_, url := start(t)
	for _, path := range []string{"/", "/metrics/x", "/debug/pprof/", "/livez/x"} {
		if code, _ := get(t, url+path); code != http.StatusNotFound {
			t.Errorf("%s: got %d, want 404", path, code)
		}
	}
	resp, err := http.Post(url+"/livez", "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: got %d, want 405", resp.StatusCode)
	}
}

func TestPortInUseSaysWhatToDo(t *testing.T) {
	s, _ := start(t)
	_, err := Listen(s.Addr(), zerolog.Nop())
	if err == nil || !strings.Contains(err.Error(), "in use") || !strings.Contains(err.Error(), "TASKRELAY_ADMIN_ADDR") {
		t.Errorf("got %v", err)
	}
}

func TestAddressOfOtherMachinesIsWarnedOf(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1:0": false, "localhost:0": false, ":0": true, "0.0.0.0:0": true} {
		var log bytes.Buffer
		s, err := Listen(addr, zerolog.New(&log))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.listener.Close(); err != nil {
			t.Error(err)
		}
		if got := strings.Contains(log.String(), `"level":"warn"`) && strings.Contains(log.String(), "TASKRELAY_ADMIN_ADDR"); got != want {
			t.Errorf("%s: warned %v, want %v: %s", addr, got, want, log.String())
		}
	}
}
