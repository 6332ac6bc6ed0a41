package cli

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestHealthcheckExitCodeTellsWhatTheProcessAnswers(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/livez" {
			return
		}
		http.Error(w, "postgres: does not answer", http.StatusServiceUnavailable)
	}))
	addr := strings.TrimPrefix(server.URL, "http://")
	check := func(args ...string) (int, string) {
		var out, errs bytes.Buffer
		code := Main(t.Context(), "", append([]string{"healthcheck"}, args...), strings.NewReader(""), &out, &errs)
		return code, out.String() + errs.String()
	}

	if code, text := check("--live", "--addr", addr); code != exitOK {
		t.Errorf("alive: got exit code %d (%s), want %d", code, text, exitOK)
	}
	t.Setenv("TASKRELAY_ADMIN_ADDR", addr)
	if code, text := check(); code != exitUnhealthy || !strings.Contains(text, "postgres: does not answer") {
		t.Errorf("not ready: got exit code %d and %q, want %d and the reason", code, text, exitUnhealthy)
	}
	server.Close()
	if code, _ := check(); code != exitConnect {
		t.Errorf("nobody there: got exit code %d, want %d", code, exitConnect)
	}
}
