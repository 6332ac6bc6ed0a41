package testenv

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Process is a running binary. It is killed at the end of the test, and its log is shown when the test failed.
type Process struct {
	Name string

	cmd  *exec.Cmd
	done chan struct{}
	err  error
	logs lockedBuffer
}

// Pid is the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Logs returns everything the process has written so far, both outputs.
func (p *Process) Logs() string { return p.logs.String() }

// Kill9 kills the process and waits for its end.
func (p *Process) Kill9(t testing.TB) {
	t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGKILL)
	p.Wait(t, 10*time.Second)
}

// Signal sends a signal.
func (p *Process) Signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatalf("signal %s: %v", p.Name, err)
	}
}

// Stop sends SIGTERM, waits for the end and returns the exit code.
func (p *Process) Stop(t testing.TB, timeout time.Duration) int {
	t.Helper()
	p.Signal(t, syscall.SIGTERM)
	return p.Wait(t, timeout)
}

// Pause stops the process without its knowledge, as a long garbage collection or a frozen machine would.
func (p *Process) Pause(t testing.TB) { t.Helper(); p.Signal(t, syscall.SIGSTOP) }

// Continue ends Pause.
func (p *Process) Continue(t testing.TB) { t.Helper(); p.Signal(t, syscall.SIGCONT) }

// Wait waits for the end and returns the exit code, -1 for a signal.
func (p *Process) Wait(t testing.TB, timeout time.Duration) int {
	t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(timeout):
		t.Fatalf("%s (pid %d) has not ended after %v", p.Name, p.Pid(), timeout)
		return 0
	}
}

// LogLines returns the JSON lines of the log that have the given message.
func (p *Process) LogLines(message string) []map[string]any {
	var found []map[string]any
	for line := range strings.Lines(p.Logs()) {
		var m map[string]any
		if json.Unmarshal([]byte(line), &m) == nil && m["message"] == message {
			found = append(found, m)
		}
	}
	return found
}

// WaitLog waits until the log holds a text.
func (p *Process) WaitLog(t testing.TB, timeout time.Duration, text string) {
	t.Helper()
	Eventually(t, timeout, func() error {
		if strings.Contains(p.Logs(), text) {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s has ended without logging %q", p.Name, text)
		default:
			return fmt.Errorf("%s has not logged %q", p.Name, text)
		}
	})
}

// startProcess runs a binary with exactly the given variables and what a program needs to run at all.
func startProcess(t testing.TB, name, bin string, args []string, env []string) *Process {
	t.Helper()
	p := &Process{Name: name, done: make(chan struct{})}
	p.cmd = exec.Command(bin, args...)
	p.cmd.Dir = tempDir(t)
	p.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.cmd.Dir, "TMPDIR=" + os.TempDir(), "GORACE=halt_on_error=0 exitcode=66"}, env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.logs, &p.logs
	p.cmd.SysProcAttr = childSysProcAttr()
	started := make(chan error)
	go func() {
		// The death signal comes when the thread that forked ends, so the thread waits as long as the child lives.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	t.Cleanup(func() {
		select {
		case <-p.done:
		default:
			_ = p.cmd.Process.Signal(syscall.SIGKILL)
			<-p.done
		}
		logs := p.Logs()
		if strings.Contains(logs, "WARNING: DATA RACE") {
			t.Errorf("data race in %s", name)
		}
		if t.Failed() {
			const most = 20_000
			if len(logs) > most {
				logs = logs[:most/2] + "\n…\n" + logs[len(logs)-most/2:]
			}
			t.Logf("--- log of %s (pid %d, %v)\n%s", name, p.Pid(), p.cmd.ProcessState, logs)
		}
	})
	return p
}

var binaries sync.Map // name → func() (string, error)

// Binary builds ./cmd/<name> once per run, with the race detector if the test has it.
func Binary(t testing.TB, name string) string {
	t.Helper()
	once, _ := binaries.LoadOrStore(name, sync.OnceValues(func() (string, error) {
		dir, err := runDir()
		if err != nil {
			return "", err
		}
		return build(filepath.Join(dir, name), func(out string) *exec.Cmd {
			args := []string{"build", "-o", out}
			if Race {
				args = append(args, "-race")
			}
			return exec.Command("go", append(args, "./cmd/"+name)...)
		})
	}))
	return must[string](t, "build cmd/"+name)(once.(func() (string, error))())
}

// Start runs one of the project's binaries with the given variables ("NAME=value") and no others.
func Start(t testing.TB, name string, args []string, env ...string) *Process {
	t.Helper()
	return startProcess(t, name, Binary(t, name), args, env)
}

// Run runs one of the project's binaries to its end and returns its output, both streams, and the exit code.
func Run(t testing.TB, name string, args []string, env ...string) (output string, code int) {
	t.Helper()
	p := Start(t, name, args, env...)
	code = p.Wait(t, 60*time.Second)
	return p.Logs(), code
}

// lockedBuffer is written by the process's output and read by the test.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
