package admin

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/rs/zerolog"
)

func TestMetricsAreServedOnceTheyAreThere(t *testing.T) {
	s, url := start(t)
	if code, _ := get(t, url+"/metrics"); code != http.StatusServiceUnavailable {
		t.Errorf("before: got %d, want 503", code)
	}
	s.Metrics(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("up 1\n")) }))
	if code, text := get(t, url+"/metrics"); code != http.StatusOK || text != "up 1\n" {
		t.Errorf("then: got %d %q", code, text)
	}
}

func TestEachReasonHasALineOfItsOwn(t *testing.T) {
	s, url := start(t)
	s.Serving(func() error { return nil }, Check{"worker", func(context.Context) error {
		return errors.Join(errors.New("claim: timeout"), errors.New("lane A-low: no responders"))
	}})
	_, text := get(t, url+"/readyz?verbose")
	want := "[-] worker: claim: timeout\n[-] worker: lane A-low: no responders\nnot ready: worker: claim: timeout; worker: lane A-low: no responders\n"
	if text != want {
		t.Errorf("got %q, want %q", text, want)
	}
}

func TestProfilesHaveAnAddressOfTheirOwn(t *testing.T) {
	_, url := start(t)
	if code, _ := get(t, url+"/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("the admin server answers %d for profiles, want 404", code)
	}
	p, err := ListenProfiles("127.0.0.1:0", zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	code, text := get(t, "http://"+p.Addr()+"/debug/pprof/goroutine?debug=1")
	if code != http.StatusOK || !strings.Contains(text, "goroutine profile:") {
		t.Errorf("goroutine profile: got %d %.80q", code, text)
	}
	// It may hold secrets.
	if code, _ := get(t, "http://"+p.Addr()+"/debug/pprof/cmdline"); code != http.StatusNotFound {
		t.Errorf("command line: got %d, want 404", code)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	if _, err := ListenProfiles("no address", zerolog.Nop()); err == nil || !strings.Contains(err.Error(), "TASKRELAY_PPROF_ADDR") {
		t.Errorf("got %v, want an error that names the variable", err)
	}
}
