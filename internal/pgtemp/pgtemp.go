// Package pgtemp runs a throw-away Postgres cluster from the server binaries on this machine.
//
// The cluster listens on 127.0.0.1 at a port of its own and on a unix socket in its own directory, asks for a
// random password, and ends with the process that started it (on Linux even when that one is killed).
// Run as root it becomes user postgres, or nobody, because Postgres refuses to run as root.
package pgtemp

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// Options of a throw-away cluster. The zero value works.
type Options struct {
	// Optional: the directory of initdb and postgres. By default what Find returns.
	Bin string
	// Optional: the TCP port on 127.0.0.1. By default a free one.
	Port int
	// Optional: settings as in postgresql.conf, such as "max_connections": "300". They win over the defaults here.
	Settings map[string]string
	// Optional: further variables of the server's environment, such as "LD_PRELOAD=…". By default none.
	Env []string
}

// Server is a running throw-away cluster.
type Server struct {
	// URL connects as superuser postgres to database postgres over TCP.
	URL string
	// Dir holds the data directory, the socket directory and postgres.log.
	Dir string
	// SocketDir is the directory of the unix socket.
	SocketDir string
	// Port on 127.0.0.1.
	Port int

	bin      string
	args     []string
	env      []string
	cred     *syscall.Credential
	ownsDir  bool
	password string

	mu   sync.Mutex
	proc *process
}

// process is one life of the postmaster. done is closed when it has been waited for.
type process struct {
	pid  int
	done chan struct{}
	err  error
}

// Start makes a new cluster in dir and waits until it answers.
// With an empty dir it makes one in the temporary directory, which Stop removes.
// A dir that is given is kept; when the caller is root, user postgres must be able to reach it.
// If dir already holds a cluster made by Start, that one is started again.
func Start(ctx context.Context, dir string, opts Options) (*Server, error) {
	s := &Server{Dir: dir, bin: opts.Bin, Port: opts.Port, env: opts.Env}
	var err error
	if s.bin == "" {
		if s.bin, err = Find(); err != nil {
			return nil, err
		}
	}
	if s.cred, err = credential(); err != nil {
		return nil, err
	}
	if s.Dir == "" {
		if s.Dir, err = os.MkdirTemp("", "taskrelay-pg-"); err != nil {
			return nil, err
		}
		s.ownsDir = true
	}
	if s.Dir, err = filepath.Abs(s.Dir); err != nil {
		return nil, err
	}
	if err := s.init(ctx); err != nil {
		s.remove()
		return nil, err
	}
	s.args = arguments(opts.Settings)
	if err := s.start(ctx, opts.Port == 0); err != nil {
		s.remove()
		return nil, err
	}
	return s, nil
}

// Pid is the process id of the postmaster, or 0 when it is not running.
func (s *Server) Pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return 0
	}
	select {
	case <-s.proc.done:
		return 0
	default:
		return s.proc.pid
	}
}

// Log returns the path of the server's log.
func (s *Server) Log() string { return filepath.Join(s.Dir, "postgres.log") }

// Stop ends the cluster by a fast shutdown and removes the directory if Start made it.
func (s *Server) Stop() error {
	err := s.shutdown()
	s.remove()
	return err
}

// Shutdown ends the postmaster by a fast shutdown and keeps the data: Restart brings it back.
func (s *Server) Shutdown() error { return s.shutdown() }

// Kill9 kills the postmaster as a crash would. Its children notice and exit. Restart brings the cluster back
// through crash recovery, which empties unlogged tables.
func (s *Server) Kill9() error {
	s.mu.Lock()
	p := s.proc
	s.mu.Unlock()
	if p == nil {
		return errors.New("postgres is not running")
	}
	if err := syscall.Kill(p.pid, syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

// Restart starts the cluster again, at the same port and with the same data; one that still runs is shut down first.
func (s *Server) Restart(ctx context.Context) error {
	if s.Pid() != 0 {
		if err := s.shutdown(); err != nil {
			return err
		}
	}
	return s.start(ctx, false)
}

// DatabaseURL is URL for another database of the cluster.
func (s *Server) DatabaseURL(name string) string {
	return s.url(name, "postgres", s.password)
}

func (s *Server) url(database, user, password string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(user, password),
		Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port)), Path: "/" + database, RawQuery: "sslmode=disable",
	}
	return u.String()
}

func (s *Server) init(ctx context.Context) error {
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return err
	}
	s.SocketDir = s.Dir
	if len(s.Dir) > 80 { // a socket's path has room for 107 bytes, 103 on macOS
		dir, err := os.MkdirTemp("/tmp", "tr-pg-")
		if err != nil {
			return err
		}
		s.SocketDir = dir
		if err := s.own(dir); err != nil {
			return err
		}
	}
	pwfile := filepath.Join(s.Dir, "password")
	if b, err := os.ReadFile(pwfile); err == nil {
		s.password = string(b)
	} else if errors.Is(err, fs.ErrNotExist) {
		s.password = rand.Text()
		if err := os.WriteFile(pwfile, []byte(s.password), 0o600); err != nil {
			return err
		}
	} else {
		return err
	}
	for _, path := range []string{s.Dir, pwfile} {
		if err := s.own(path); err != nil {
			return err
		}
	}
	if _, err := os.Stat(filepath.Join(s.data(), "PG_VERSION")); err == nil {
		return nil
	}
	// md5 over loopback: SCRAM would cost 5 ms of CPU for each connection of a test.
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "initdb"), "-D", s.data(), "-U", "postgres", "--auth=md5", "--pwfile="+pwfile,
		"--no-locale", "-E", "UTF8", "--no-sync")
	cmd.Dir = s.Dir
	cmd.Env = environment()
	cmd.SysProcAttr = sysProcAttr(s.cred)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("initdb in %s: %w: %s", s.data(), err, tail(out.String()))
	}
	return nil
}

func (s *Server) data() string { return filepath.Join(s.Dir, "data") }

func (s *Server) own(path string) error {
	if s.cred == nil {
		return nil
	}
	return os.Chown(path, int(s.cred.Uid), int(s.cred.Gid))
}

// start tries other ports when it may choose: between the moment a free one was found and the server's bind
// another process can take it. After a kill it also tries again, because Postgres refuses to start while
// children of the old postmaster are still attached to its shared memory.
func (s *Server) start(ctx context.Context, anyPort bool) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	for {
		if anyPort {
			port, err := freePort()
			if err != nil {
				return err
			}
			s.Port = port
		}
		err := s.try(ctx)
		if err == nil {
			s.URL = s.DatabaseURL("postgres")
			return nil
		}
		again := strings.Contains(err.Error(), "shared memory block") ||
			strings.Contains(err.Error(), "postmaster.pid") ||
			(anyPort && strings.Contains(err.Error(), "could not bind"))
		if !again || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (s *Server) try(ctx context.Context) error {
	log, err := os.OpenFile(s.Log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	began, err := log.Seek(0, 2)
	if err != nil {
		return err
	}
	args := append([]string{"-D", s.data(), "-p", strconv.Itoa(s.Port), "-k", s.SocketDir}, s.args...)
	cmd := exec.Command(filepath.Join(s.bin, "postgres"), args...)
	cmd.Dir = s.Dir
	cmd.Env = append(environment(), s.env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = sysProcAttr(s.cred)
	p := &process{done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The death signal comes when the thread that forked ends, so the thread waits as long as the child lives.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start postgres: %w", err)
	}
	p.pid = cmd.Process.Pid
	s.mu.Lock()
	s.proc = p
	s.mu.Unlock()

	var last error
	for {
		if last = ping(ctx, s.DatabaseURL("postgres")); last == nil {
			return nil
		}
		select {
		case <-p.done:
			b, _ := os.ReadFile(s.Log())
			return fmt.Errorf("postgres ended while starting (%v): %s", p.err, tail(string(b[min(began, int64(len(b))):])))
		case <-ctx.Done():
			_ = s.shutdown()
			return fmt.Errorf("postgres does not answer: %w", last)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// shutdown asks politely first: fast, then immediate, then kill.
func (s *Server) shutdown() error {
	s.mu.Lock()
	p := s.proc
	s.mu.Unlock()
	if p == nil {
		return nil
	}
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL} {
		_ = syscall.Kill(p.pid, sig)
		select {
		case <-p.done:
			return nil
		case <-time.After(10 * time.Second):
		}
	}
	return fmt.Errorf("postgres (pid %d) does not end", p.pid)
}

func (s *Server) remove() {
	if s.SocketDir != "" && s.SocketDir != s.Dir {
		_ = os.RemoveAll(s.SocketDir)
	}
	if s.ownsDir {
		_ = os.RemoveAll(s.Dir)
	}
}

func ping(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// arguments turns fsync off: the cluster is thrown away, and only a crash of the whole machine could tell.
func arguments(settings map[string]string) []string {
	all := map[string]string{
		"listen_addresses":   "127.0.0.1",
		"fsync":              "off",
		"max_connections":    "300",
		"shared_buffers":     "128MB",
		"log_min_messages":   "warning",
		"log_line_prefix":    "%m [%p] %a ",
		"max_wal_size":       "2GB",
		"checkpoint_timeout": "30min",
	}
	for k, v := range settings {
		all[k] = v
	}
	keys := make([]string, 0, len(all))
	for k := range all {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	var args []string
	for _, k := range keys {
		args = append(args, "-c", k+"="+all[k])
	}
	return args
}

// environment leaves out PG* variables of the caller, which would steer the server's programs.
func environment() []string {
	env := []string{"LC_ALL=C", "TZ=UTC"}
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "PATH=") || strings.HasPrefix(kv, "LD_") || strings.HasPrefix(kv, "TMPDIR=") {
			env = append(env, kv)
		}
	}
	return env
}

// credential returns nil unless the process is root.
func credential() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return nil, err
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("postgres refuses to run as root, and neither user postgres nor user nobody exists")
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func tail(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > 2000 {
		s = "… " + s[len(s)-2000:]
	}
	return s
}
