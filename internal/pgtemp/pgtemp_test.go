package pgtemp_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
)

func TestClusterSurvivesKillAndKeepsLoggedTables(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	s, err := pgtemp.Start(ctx, "", pgtemp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	exec(t, s, "CREATE TABLE kept (a int); CREATE UNLOGGED TABLE emptied (a int)")
	exec(t, s, "INSERT INTO kept VALUES (1); INSERT INTO emptied VALUES (1)")
	if err := s.Kill9(); err != nil {
		t.Fatal(err)
	}
	if s.Pid() != 0 {
		t.Error("a killed server still has a pid")
	}
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if got, want := count(t, s, "kept"), 1; got != want {
		t.Errorf("rows in a logged table after a crash: got %d, want %d", got, want)
	}
	if got, want := count(t, s, "emptied"), 0; got != want {
		t.Errorf("rows in an unlogged table after a crash: got %d, want %d", got, want)
	}
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
}

func TestMissingBinariesSayWhatToInstall(t *testing.T) {
	t.Setenv(pgtemp.EnvBin, t.TempDir())
	_, err := pgtemp.Start(t.Context(), "", pgtemp.Options{})
	if err == nil || errors.Is(err, pgtemp.ErrNotFound) {
		t.Fatalf("got %v, want an error that names %s", err, pgtemp.EnvBin)
	}
}

func exec(t *testing.T, s *pgtemp.Server, sql string) {
	t.Helper()
	conn := connect(t, s)
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

func count(t *testing.T, s *pgtemp.Server, table string) (n int) {
	t.Helper()
	conn := connect(t, s)
	defer conn.Close(t.Context())
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func connect(t *testing.T, s *pgtemp.Server) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}
