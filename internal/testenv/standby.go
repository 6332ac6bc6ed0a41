package testenv

import (
	"testing"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
)

// PostgresWith is OwnPostgres with further settings of the server and variables of its environment.
func PostgresWith(t testing.TB, more map[string]string, env ...string) *pgtemp.Server {
	t.Helper()
	all := make(map[string]string)
	for _, from := range []map[string]string{settings, more} {
		for k, v := range from {
			all[k] = v
		}
	}
	s := must[*pgtemp.Server](t, "start Postgres")(pgtemp.Start(t.Context(), "", pgtemp.Options{Settings: all, Env: env}))
	t.Cleanup(func() { _ = s.Stop() })
	return s
}

// Standby makes a streaming standby of a cluster of the test's own.
func Standby(t testing.TB, primary *pgtemp.Server) *pgtemp.Server {
	t.Helper()
	s := must[*pgtemp.Server](t, "make a standby")(primary.Standby(t.Context(), pgtemp.Options{Settings: settings}))
	t.Cleanup(func() { _ = s.Stop() })
	return s
}
