package pgtemp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"
)

// EnvBin names the environment variable that says where the Postgres server binaries are.
const EnvBin = "TASKRELAY_TEST_POSTGRES_BIN"

// MinVersion is the oldest Postgres major version that taskrelay runs on.
const MinVersion = 15

// ErrNotFound says what to install.
var ErrNotFound = errors.New(`no PostgreSQL 15 or newer found (looked in ` + EnvBin + `, /usr/lib/postgresql/*/bin, PATH and pg_config): ` +
	`install it, on Debian or Ubuntu by "apt-get install postgresql", on Fedora by "dnf install postgresql-server", ` +
	`on macOS by "brew install postgresql@17", or set ` + EnvBin + ` to the directory of initdb and postgres`)

// Find returns the directory of the newest Postgres server binaries on this machine.
// When EnvBin is set only that directory is looked at. The error is ErrNotFound or says what is wrong with EnvBin.
func Find() (bin string, err error) {
	if dir := os.Getenv(EnvBin); dir != "" {
		if v, ok := version(dir); !ok || v < MinVersion {
			return "", fmt.Errorf("%s=%s holds no PostgreSQL %d or newer (initdb and postgres)", EnvBin, dir, MinVersion)
		}
		return dir, nil
	}
	var dirs []string
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",
		"/usr/pgsql-*/bin",
		"/usr/local/pgsql/bin",
		"/opt/homebrew/opt/postgresql@*/bin",
		"/usr/local/opt/postgresql@*/bin",
	} {
		found, _ := filepath.Glob(pattern)
		dirs = append(dirs, found...)
	}
	if p, err := exec.LookPath("postgres"); err == nil {
		if p, err = filepath.EvalSymlinks(p); err == nil {
			dirs = append(dirs, filepath.Dir(p))
		}
	}
	if out, err := run("pg_config", "--bindir"); err == nil {
		dirs = append(dirs, out)
	}
	best := 0
	sort.Strings(dirs)
	for _, dir := range dirs {
		if v, ok := version(dir); ok && v >= MinVersion && v > best {
			bin, best = dir, v
		}
	}
	if bin == "" {
		return "", ErrNotFound
	}
	return bin, nil
}

// version asks the server binary itself: a directory may hold only the client programs.
func version(dir string) (major int, ok bool) {
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return 0, false
	}
	out, err := run(filepath.Join(dir, "postgres"), "--version") // postgres (PostgreSQL) 15.18 (Debian ...)
	if err != nil {
		return 0, false
	}
	_, rest, _ := strings.Cut(out, "(PostgreSQL) ")
	digits := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if digits < 0 {
		digits = len(rest)
	}
	major, err = strconv.Atoi(rest[:digits])
	return major, err == nil
}

func run(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).Output()
	return strings.TrimSpace(string(out)), err
}
