package connect

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"
)

func TestLogIsJSONUnlessATerminal(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	log, err := Logger(f, "info", "")
	if err != nil {
		t.Fatal(err)
	}
	log.Debug().Msg("not shown")
	log.Info().Str("k", "v").Msg("shown")
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	var line struct{ Level, Time, Message, K string }
	if err := json.Unmarshal(b, &line); err != nil || line.Level != "info" || line.Message != "shown" || line.K != "v" {
		t.Fatalf("%v: %s", err, b)
	}
	at, err := time.Parse("2006-01-02T15:04:05.000Z", line.Time)
	if err != nil || time.Since(at).Abs() > time.Minute {
		t.Errorf("time %q: want UTC in RFC 3339 with milliseconds", line.Time)
	}
}

func TestConsoleOnDemand(t *testing.T) {
	var out bytes.Buffer
	log, err := Logger(&out, "debug", "console")
	if err != nil {
		t.Fatal(err)
	}
	log.Debug().Str("biz_type", "A").Msg("hello")
	if s := out.String(); strings.HasPrefix(s, "{") || !strings.Contains(s, "hello") || !strings.Contains(s, "biz_type=A") || strings.Contains(s, "\x1b") {
		t.Errorf("got %q", s)
	}
}

func TestWaitingDoesNotMendAWrongPassword(t *testing.T) {
	for code, want := range map[string]bool{"28P01": false, "28000": false, "3D000": false, "57P03": true, "53300": true} {
		if got := waitingHelps(&pgconn.PgError{Code: code}); got != want {
			t.Errorf("%s: got %t", code, got)
		}
	}
	if !waitingHelps(errors.New("connection refused")) {
		t.Error("a refused connection is not waited for")
	}
}

func TestPasswordIsInNoErrorAndNoLog(t *testing.T) {
	for _, url := range []string{
		"postgres://app:hunter2@127.0.0.1:1/shop", "host=127.0.0.1 port=1 user=app password=hunter2 dbname=shop",
		"postgres://app:hunter2@127.0.0.1:x/shop", "postgres://app:hunter2@127.0.0.1:1,127.0.0.1:2/shop?sslmode=prefer",
	} {
		var log bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, err := Postgres(ctx, url, "test", zerolog.New(&log))
		cancel()
		if err == nil || strings.Contains(err.Error()+log.String(), "hunter2") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v\n%s", err, log.String())
		}
	}
}
