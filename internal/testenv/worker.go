package testenv

import (
	"time"

	"github.com/taskrelay/taskrelay/pkg/command"
)

// RunWorker runs a worker in this process until the test ends or Stop is called.
func (e *Env) RunWorker(reg *command.Registry, change ...func(*command.WorkerConfig)) *Running {
	e.t.Helper()
	r := &Running{t: e.t, name: "worker", done: make(chan struct{})}
	cfg := command.WorkerConfig{Lease: 3 * time.Second, Grace: 5 * time.Second, Logger: r.logger()}
	for _, c := range change {
		c(&cfg)
	}
	worker, err := command.NewWorker(e.OpenPool("worker"), e.Connect("worker"), reg, cfg)
	if err != nil {
		e.t.Fatal(err)
	}
	r.start(e.t, worker.Run)
	return r
}
