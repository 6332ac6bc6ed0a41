package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"runtime/pprof"
)

// A role is what a child process does. Fields may be nil.
type role struct {
	ready   any                             // told to the parent
	start   func(ctx context.Context) error // begins to consume; may be called again after stop
	stop    func() error
	counter *counter
	close   func()
}

// runRole serves the parent's requests until standard input ends.
func runRole(name string, in io.Reader, out io.Writer) error {
	var cfg childConfig
	if err := json.Unmarshal([]byte(os.Getenv(configVariable)), &cfg); err != nil {
		return err
	}
	makers := map[string]func(context.Context, childConfig) (*role, error){
		"nats-server": natsServerRole, "relay": relayRole, "worker": workerRole, "river": riverRole,
	}
	if name != "nats-server" && os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // as cmd/relay and cmd/worker do; River's client gets the same
	}
	maker, ok := makers[name]
	if !ok {
		return fmt.Errorf("unknown role")
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, err := maker(ctx, cfg)
	if err != nil {
		return err
	}
	if r.close != nil {
		defer r.close()
	}
	reply := json.NewEncoder(out)
	if err := reply.Encode(answerOf(r.ready, nil)); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var q request
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			return err
		}
		if err := reply.Encode(answerOf(r.serve(ctx, q))); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (r *role) serve(ctx context.Context, q request) (any, error) {
	switch q.Do {
	case "start":
		return nil, r.start(ctx)
	case "stop":
		return nil, r.stop()
	case "expect":
		r.counter.expect(q.Count)
		return nil, nil
	case "first":
		<-r.counter.first
		return nil, nil
	case "wait":
		<-r.counter.reached
		return nil, nil
	case "arrivals":
		return r.counter.arrivals, nil
	case "profile":
		f, err := os.Create(q.Path)
		if err != nil {
			return nil, err
		}
		return nil, pprof.StartCPUProfile(f)
	case "profiled":
		pprof.StopCPUProfile()
		return nil, nil
	}
	return nil, errors.New("unknown request")
}

func answerOf(value any, err error) answer {
	if err != nil {
		return answer{Error: err.Error()}
	}
	if value == nil {
		return answer{}
	}
	text, err := json.Marshal(value)
	if err != nil {
		return answer{Error: err.Error()}
	}
	return answer{Value: text}
}
