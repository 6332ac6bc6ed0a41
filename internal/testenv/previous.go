package testenv

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// unpackPrevious unpacks the source that scripts/keep-previous has kept, and says where binaries built of it are kept.
var unpackPrevious = sync.OnceValues(func() (where [2]string, err error) {
	archive, err := os.ReadFile(filepath.Join(Root(), "tests", "testdata", "previous.tar.gz"))
	if err != nil {
		return where, err
	}
	cache, err := cacheDir()
	if err != nil {
		return where, err
	}
	run, err := runDir()
	if err != nil {
		return where, err
	}
	src := filepath.Join(run, "previous")
	if err := os.Mkdir(src, 0o755); err != nil {
		return where, err
	}
	cmd := exec.Command("tar", "-xzf", "-", "-C", src)
	cmd.Stdin = bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil {
		return where, fmt.Errorf("unpack tests/testdata/previous.tar.gz: %w: %s", err, out)
	}
	bin := filepath.Join(cache, fmt.Sprintf("previous-%x", sha256.Sum256(archive))[:25])
	return [2]string{src, bin}, os.MkdirAll(bin, 0o755)
})

// Previous starts a binary of the version before this one: see scripts/keep-previous.
func (e *Env) Previous(name string, kv ...string) *Process {
	e.t.Helper()
	bin := must[string](e.t, "build the previous "+name)(previous(name))
	return startProcess(e.t, "previous "+name, bin, nil, e.Vars(kv...))
}

func previous(name string) (string, error) {
	where, err := unpackPrevious()
	if err != nil {
		return "", err
	}
	return build(filepath.Join(where[1], name), func(out string) *exec.Cmd {
		return exec.Command("go", "build", "-C", where[0], "-trimpath", "-o", out, "./cmd/"+name)
	})
}
