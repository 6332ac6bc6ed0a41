package testenv

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
)

// Clock moves the clock of a Postgres of its own, seen by all its processes at once. Only the time of day moves: what
// measures intervals does not, as on a machine whose clock is set.
type Clock struct{ file string }

// PostgresWithClock starts a cluster whose clock the test can set.
func PostgresWithClock(t testing.TB) (*pgtemp.Server, *Clock) {
	t.Helper()
	lib := must[string](t, "find libfaketime")(faketime())
	dir := must[string](t, "temporary directory")(os.MkdirTemp("", "clock-")) // user postgres must get in
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	c := &Clock{file: filepath.Join(dir, "offset")}
	c.Set(t, 0)
	return PostgresWith(t, nil, "LD_PRELOAD="+lib, "FAKETIME_TIMESTAMP_FILE="+c.file, "FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1"), c
}

// Set puts the clock ahead of the machine's by d, or behind it.
func (c *Clock) Set(t testing.TB, d time.Duration) {
	t.Helper()
	// By renaming: a reader must not see half of it.
	if err := os.WriteFile(c.file+".new", fmt.Appendf(nil, "%+d\n", int64(d/time.Second)), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(c.file+".new", c.file); err != nil {
		t.Fatal(err)
	}
}

func faketime() (lib string, err error) {
	for _, root := range []string{"/usr/lib", "/usr/lib64", "/usr/local/lib"} {
		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Name() == "libfaketime.so.1" {
				lib = path
				return fs.SkipAll
			}
			return nil
		})
		if lib != "" {
			return lib, nil
		}
	}
	return "", errors.New("libfaketime.so.1 is not on this machine: run scripts/ensure-faketime")
}

// EnvClock is the variable of a binary of StartShifted that says how its clock is wrong: seconds, or "jumps", which is
// an hour ahead in one second and an hour behind in the next.
const EnvClock = "TEST_CLOCK"

// clockSource moves the wall clock of a time.Time and leaves its monotonic reading as it is, which is what happens when
// somebody sets the clock of a machine. The layout is that of package time.
const clockSource = `package wrongclock

import (
	"os"
	"strconv"
	"time"
	"unsafe"
)

func Now() time.Time {
	t := time.Now()
	shift, _ := strconv.ParseInt(os.Getenv("` + EnvClock + `"), 10, 64)
	if os.Getenv("` + EnvClock + `") == "jumps" {
		shift = 3600 - 7200*(t.Unix()%2)
	}
	(*struct {
		wall uint64
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&t)).wall += uint64(shift << 30)
	return t
}
`

var callsNow = regexp.MustCompile(`\btime\.Now\(\)`)

// wrongClock writes an overlay for go build in which all of our code asks a clock that is wrong. An overlay of package
// time itself would reach the libraries too, and compile everything anew, for minutes.
var wrongClock = sync.OnceValues(func() (overlay string, err error) {
	run, err := runDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(run, "wrongclock")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	replace := map[string]string{}
	add := func(path, text string) error {
		to := filepath.Join(dir, fmt.Sprintf("%d.go", len(replace)))
		replace[path] = to
		return os.WriteFile(to, []byte(text), 0o644)
	}
	if err := add(filepath.Join(Root(), "internal", "wrongclock", "wrongclock.go"), clockSource); err != nil {
		return "", err
	}
	for _, top := range []string{"cmd", "internal", "pkg"} {
		err := filepath.WalkDir(filepath.Join(Root(), top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "testenv") {
				return err
			}
			b, err := os.ReadFile(path)
			if err != nil || !callsNow.Match(b) {
				return err
			}
			text := callsNow.ReplaceAllString(string(b), "wrongclock.Now()")
			// The line of the package clause is the first that begins with the word.
			at := regexp.MustCompile(`(?m)^package \w+$`).FindStringIndex(text)
			if at == nil {
				return fmt.Errorf("%s has no package clause", path)
			}
			// Where nothing else of package time is used, its import would be one too many.
			return add(path, text[:at[1]]+"\n\nimport \"github.com/taskrelay/taskrelay/internal/wrongclock\"\n"+text[at[1]:]+"\n\nvar _ = time.Second\n")
		})
		if err != nil {
			return "", err
		}
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, b, 0o644)
})

// StartShifted starts a binary whose clock is wrong: see EnvClock.
func (e *Env) StartShifted(name, clock string, kv ...string) *Process {
	e.t.Helper()
	bin := must[string](e.t, "build a "+name+" whose clock is wrong")(shifted(name))
	return startProcess(e.t, name+" with a wrong clock", bin, nil, append(e.Vars(kv...), EnvClock+"="+clock))
}

func shifted(name string) (string, error) {
	overlay, err := wrongClock()
	if err != nil {
		return "", err
	}
	return build(filepath.Join(filepath.Dir(overlay), name), func(out string) *exec.Cmd {
		return exec.Command("go", "build", "-overlay", overlay, "-o", out, "./cmd/"+name)
	})
}
