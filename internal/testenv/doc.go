// Package testenv gives tests real servers: a Postgres cluster with a migrated database per test, an embedded
// nats-server with JetStream or the real binary, the project's own binaries, and a scripted HTTP target.
//
// Nothing needs to be set up by hand, and nothing is skipped: what is missing on the machine fails the test and
// says what to install. Everything listens on 127.0.0.1 at ports of its own, and ends with the test binary.
//
//	func TestMain(m *testing.M) { testenv.Main(m) }
//
//	func TestX(t *testing.T) {
//		e := testenv.New(t)
//		...
//	}
package testenv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"
)

// Main runs the tests, stops what they share, and then calls last, which may print. Call it from TestMain.
func Main(m *testing.M, last ...func()) {
	code := m.Run()
	shared.stop()
	for _, f := range last {
		f()
	}
	os.Exit(code)
}

// shared holds what is started at most once for each test binary.
var shared atEnd

// atEnd runs its functions when the test binary ends, last one first.
type atEnd struct {
	mu  sync.Mutex
	fns []func()
}

func (a *atEnd) add(fn func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fns = append(a.fns, fn)
}

func (a *atEnd) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := len(a.fns) - 1; i >= 0; i-- {
		a.fns[i]()
	}
	a.fns = nil
}

// runDir is a directory for this run of the test binary.
var runDir = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "taskrelay-test-")
	if err == nil {
		shared.add(func() { _ = os.RemoveAll(dir) })
	}
	return dir, err
})

// cacheDir keeps tools that are built from other modules between runs.
func cacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		base = os.TempDir()
	}
	dir := filepath.Join(base, "taskrelay-test")
	return dir, os.MkdirAll(dir, 0o755)
}

// Root is the directory of go.mod.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// Eventually waits until check returns nil, and fails the test with its last error when that takes longer than timeout.
func Eventually(t testing.TB, timeout time.Duration, check func() error) {
	t.Helper()
	if err := eventually(t, timeout, check); err != nil {
		t.Fatalf("after %v: %v", timeout, err)
	}
}

func eventually(t testing.TB, timeout time.Duration, check func() error) error {
	pause := time.NewTicker(10 * time.Millisecond)
	defer pause.Stop()
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-pause.C:
		case <-deadline.C:
			return err
		case <-t.Context().Done():
			return errors.Join(err, t.Context().Err())
		}
	}
}

// Never checks for the whole duration that check returns nil, and fails the test as soon as it does not.
// It is for what must not happen, such as a call before its time.
func Never(t testing.TB, d time.Duration, check func() error) {
	t.Helper()
	end := time.NewTimer(d)
	defer end.Stop()
	pause := time.NewTicker(20 * time.Millisecond)
	defer pause.Stop()
	for {
		if err := check(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-pause.C:
		case <-end.C:
			return
		}
	}
}

func must[T any](t testing.TB, what string) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(fmt.Errorf("%s: %w", what, err))
		}
		return v
	}
}
