package pgtemp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Standby makes a streaming standby of s in a directory of its own and waits until it answers. Its user and password
// are those of s. Stop it like any other.
func (s *Server) Standby(ctx context.Context, opts Options) (*Server, error) {
	dir, err := os.MkdirTemp("", "taskrelay-pg-")
	if err != nil {
		return nil, err
	}
	standby := &Server{Dir: dir, SocketDir: dir, bin: s.bin, Port: opts.Port, env: opts.Env, cred: s.cred, ownsDir: true,
		password: s.password, args: arguments(opts.Settings)}
	if err := standby.copy(ctx, s); err != nil {
		standby.remove()
		return nil, err
	}
	if err := standby.start(ctx, opts.Port == 0); err != nil {
		standby.remove()
		return nil, err
	}
	return standby, nil
}

// copy takes a base backup of the primary, with all that a standby needs to follow it.
func (s *Server) copy(ctx context.Context, primary *Server) error {
	pwfile := filepath.Join(s.Dir, "password")
	if err := os.WriteFile(pwfile, []byte(s.password), 0o600); err != nil {
		return err
	}
	for _, path := range []string{s.Dir, pwfile} {
		if err := s.own(path); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "pg_basebackup"), "-d", primary.DatabaseURL("postgres"), "-D", s.data(),
		"-X", "stream", "-R", "-c", "fast", "--no-sync")
	cmd.Dir = s.Dir
	cmd.Env = environment()
	cmd.SysProcAttr = sysProcAttr(s.cred)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("pg_basebackup into %s: %w: %s", s.data(), err, tail(out.String()))
	}
	return nil
}

// Promote makes a standby the primary and waits until it is.
func (s *Server) Promote(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var done bool
	if err := conn.QueryRow(ctx, "SELECT pg_promote(true, 60)").Scan(&done); err != nil {
		return fmt.Errorf("promote: %w", err)
	}
	if !done {
		return errors.New("promote: still in recovery after 60 s")
	}
	return nil
}

// Move stops the cluster and starts it at another port, as when an address is handed from one server to the next.
func (s *Server) Move(ctx context.Context, port int) error {
	if err := s.shutdown(); err != nil {
		return err
	}
	s.Port = port
	for {
		err := s.start(ctx, false)
		// Children of a server that was killed at that port hold it for a moment.
		if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "could not bind") {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}
