package testenv

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// NATSServer is a nats-server with JetStream.
type NATSServer struct {
	URL  string
	Conn *nats.Conn
	JS   jetstream.JetStream
}

// NATS starts an embedded nats-server for one test, with an empty store. The functions may change its options.
func NATS(t testing.TB, change ...func(*server.Options)) *NATSServer {
	t.Helper()
	opts := &server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: tempDir(t),
		NoSigs: true, NoLog: true, DontListen: false,
	}
	for _, c := range change {
		c(opts)
	}
	s := must[*server.Server](t, "make nats-server")(server.NewServer(opts))
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("the embedded nats-server does not get ready")
	}
	n := &NATSServer{URL: s.ClientURL()}
	n.connect(t)
	return n
}

// connect opens the test's own connection. It keeps trying, because some tests stop the server.
func (n *NATSServer) connect(t testing.TB) {
	t.Helper()
	n.Conn = must[*nats.Conn](t, "connect to NATS")(nats.Connect(n.URL, nats.Name("test"), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond), nats.ReconnectJitter(0, 0), nats.ReconnectBufSize(-1),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})))
	t.Cleanup(n.Conn.Close)
	n.JS = must[jetstream.JetStream](t, "JetStream")(jetstream.New(n.Conn))
}

// WaitStream waits until a stream exists.
func (n *NATSServer) WaitStream(t testing.TB, name string) jetstream.Stream {
	t.Helper()
	var s jetstream.Stream
	Eventually(t, 30*time.Second, func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if s, err = n.JS.Stream(ctx, name); err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
		return nil
	})
	return s
}

// Messages returns how many messages a stream holds, 0 when it does not exist.
func (n *NATSServer) Messages(t testing.TB, stream string) uint64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	s, err := n.JS.Stream(ctx, stream)
	if err != nil {
		return 0
	}
	return s.CachedInfo().State.Msgs
}

// Last reads the last message on a subject of a stream, or fails.
func (n *NATSServer) Last(ctx context.Context, stream, subject string) (*jetstream.RawStreamMsg, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	s, err := n.JS.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	return s.GetLastMsgForSubject(ctx, subject)
}

// NATSProcess is the real nats-server binary, for tests that kill it.
type NATSProcess struct {
	NATSServer
	Port int

	bin, store string
	proc       *Process
}

// StartNATSProcess builds the nats-server of go.mod and starts it with an empty store, in the directory given or in one
// of its own.
func StartNATSProcess(t testing.TB, store ...string) *NATSProcess {
	t.Helper()
	n := &NATSProcess{bin: natsServerBinary(t)}
	if len(store) > 0 {
		n.store = store[0]
	} else {
		n.store = tempDir(t)
	}
	n.Port = freePort(t)
	n.URL = "nats://127.0.0.1:" + strconv.Itoa(n.Port)
	n.Start(t)
	n.connect(t)
	return n
}

// Store is the directory of JetStream's files.
func (n *NATSProcess) Store() string { return n.store }

// Start starts a server that was stopped or killed, at the same port with the same store.
func (n *NATSProcess) Start(t testing.TB) {
	t.Helper()
	n.proc = startProcess(t, "nats-server", n.bin, []string{"-a", "127.0.0.1", "-p", strconv.Itoa(n.Port), "-js", "-sd", n.store}, nil)
	Eventually(t, 30*time.Second, func() error {
		select {
		case <-n.proc.done:
			return fmt.Errorf("nats-server ended: %s", n.proc.Logs())
		default:
		}
		nc, err := nats.Connect(n.URL, nats.Timeout(time.Second))
		if err != nil {
			return err
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			return err
		}
		_, err = js.AccountInfo(t.Context())
		return err
	})
}

// Pid is the process id of the server that runs, or ran last.
func (n *NATSProcess) Pid() int { return n.proc.Pid() }

// Logs returns what that server has written so far.
func (n *NATSProcess) Logs() string { return n.proc.Logs() }

// Kill9 kills the server.
func (n *NATSProcess) Kill9(t testing.TB) { n.proc.Kill9(t) }

// Stop ends the server in order.
func (n *NATSProcess) Stop(t testing.TB) { n.proc.Stop(t, 20*time.Second) }

var buildNATSServer = sync.OnceValues(func() (string, error) {
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	return build(filepath.Join(dir, "nats-server-"+server.VERSION), func(out string) *exec.Cmd {
		return exec.Command("go", "build", "-o", out, "github.com/nats-io/nats-server/v2")
	})
})

func natsServerBinary(t testing.TB) string {
	t.Helper()
	return must[string](t, "build nats-server")(buildNATSServer())
}

// natscliVersion is not in go.mod: the CLI is built on older versions of the same modules.
const natscliVersion = "v0.5.0"

var buildNATSCLI = sync.OnceValues(func() (string, error) {
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	return build(filepath.Join(dir, "nats-"+natscliVersion), func(out string) *exec.Cmd {
		cmd := exec.Command("go", "install", "github.com/nats-io/natscli/nats@"+natscliVersion)
		// go install names the file itself: give it a directory of its own.
		cmd.Env = append(os.Environ(), "GOBIN="+out+".d", "GOFLAGS=")
		return cmd
	})
})

// NATSCLIPath is the nats CLI.
func NATSCLIPath(t testing.TB) string {
	t.Helper()
	return must[string](t, "build the nats CLI")(buildNATSCLI())
}

// NATSCLI returns a function that runs the nats CLI against a server and returns what it printed.
func NATSCLI(t testing.TB, url string) func(args ...string) string {
	t.Helper()
	bin := must[string](t, "build the nats CLI")(buildNATSCLI())
	return func(args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, bin, append([]string{"--server", url}, args...)...)
		cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+t.TempDir()) // no context of the person who runs the tests
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("nats %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
}

// build makes target unless it is there. It builds beside it and renames, because several test binaries may
// run at once.
func build(target string, command func(out string) *exec.Cmd) (string, error) {
	if _, err := os.Stat(target); err == nil {
		return target, nil
	}
	out := target + ".tmp" + strconv.Itoa(os.Getpid())
	defer os.RemoveAll(out + ".d")
	cmd := command(out)
	cmd.Dir = Root()
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd.Args, err, b)
	}
	if _, err := os.Stat(out); err != nil { // go install put it into the directory
		found, _ := filepath.Glob(filepath.Join(out+".d", "*"))
		if len(found) != 1 {
			return "", fmt.Errorf("%v made no binary", cmd.Args)
		}
		out = found[0]
	}
	return target, os.Rename(out, target)
}

func freePort(t testing.TB) int {
	t.Helper()
	l := must[net.Listener](t, "find a free port")(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// tempDir is like t.TempDir, but does not fail the test when a server still writes while it is removed.
func tempDir(t testing.TB) string {
	t.Helper()
	run := must[string](t, "temporary directory")(runDir())
	dir := must[string](t, "temporary directory")(os.MkdirTemp(run, ""))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
