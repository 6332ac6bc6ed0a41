package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// roleVariable in the environment makes this binary a child of that role; its value in configVariable is the rest.
const (
	roleVariable   = "BENCH_ROLE"
	configVariable = "BENCH_CONFIG"
)

// childConfig is what a child needs to know.
type childConfig struct {
	Database string   `json:"database,omitempty"`
	NATS     string   `json:"nats,omitempty"`
	Store    string   `json:"store,omitempty"` // nats-server's directory
	Idle     []string `json:"idle,omitempty"`  // further types, which get no tasks
	Fail     bool     `json:"fail,omitempty"`  // each fifth task fails once
	Timed    int      `json:"timed,omitempty"` // note when tasks 0 to Timed-1 arrive
}

// request and answer are lines on a child's standard input and output.
type request struct {
	Do    string `json:"do"`
	Count int64  `json:"count,omitempty"`
	Path  string `json:"path,omitempty"`
}

type answer struct {
	Error string          `json:"error,omitempty"`
	Value json.RawMessage `json:"value,omitempty"`
}

// child is a process of this binary in another role. It ends when its standard input does, so also when we are killed.
type child struct {
	role string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	log  *tailWriter
}

// startChild returns when the child has said that it is ready, with what it said.
func startChild(ctx context.Context, role string, cfg childConfig) (*child, json.RawMessage, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(cfg)
	if err != nil {
		return nil, nil, err
	}
	c := &child{role: role, cmd: exec.Command(self), log: &tailWriter{}}
	c.cmd.Env = append(os.Environ(), roleVariable+"="+role, configVariable+"="+string(text))
	c.cmd.Stderr = c.log
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, nil, err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	c.out = bufio.NewReader(stdout)
	if err := c.cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("start %s: %w", role, err)
	}
	value, err := c.read(ctx)
	if err != nil {
		c.kill()
		return nil, nil, fmt.Errorf("start %s: %w", role, err)
	}
	return c, value, nil
}

// ask sends a request and waits for its answer, for two minutes at most: nothing here takes longer.
func (c *child) ask(ctx context.Context, r request) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	line, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	if _, err := c.in.Write(append(line, '\n')); err != nil {
		return nil, fmt.Errorf("%s: %s: %w%s", c.role, r.Do, err, c.log)
	}
	value, err := c.read(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w%s", c.role, r.Do, err, c.log)
	}
	return value, nil
}

// read waits for one answer. When ctx ends first the child is killed: its output would be out of step.
func (c *child) read(ctx context.Context) (json.RawMessage, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.cmd.Process.Kill() })
	defer stop()
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		return nil, errors.Join(ctx.Err(), fmt.Errorf("no answer: %w", err))
	}
	var a answer
	if err := json.Unmarshal(line, &a); err != nil {
		return nil, fmt.Errorf("answer %q: %w", line, err)
	}
	if a.Error != "" {
		return nil, errors.New(a.Error)
	}
	return a.Value, nil
}

// stop ends the child in order, or else by force.
func (c *child) stop() error {
	_ = c.in.Close()
	ended := make(chan error, 1)
	go func() { ended <- c.cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			return fmt.Errorf("%s: %w%s", c.role, err, c.log)
		}
		return nil
	case <-time.After(30 * time.Second):
		_ = c.cmd.Process.Kill()
		<-ended
		return fmt.Errorf("%s did not end within 30 s%s", c.role, c.log)
	}
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// tailWriter keeps the end of what a child logged, for the error that quotes it.
type tailWriter struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (w *tailWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.buf.Len() > 1<<20 {
		w.buf.Reset()
	}
	return w.buf.Write(p)
}

func (w *tailWriter) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := strings.TrimSpace(w.buf.String())
	if s == "" {
		return ""
	}
	return "\n" + s[max(0, len(s)-4000):]
}
