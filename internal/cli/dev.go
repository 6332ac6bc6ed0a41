package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/demo"
	"github.com/taskrelay/taskrelay/internal/dev"
	"github.com/taskrelay/taskrelay/internal/natscli"
	"github.com/taskrelay/taskrelay/internal/pgtemp"
	"github.com/taskrelay/taskrelay/internal/target"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

// devFlags are the flags of "taskrelay dev".
type devFlags struct {
	demo, exit             bool
	dataDir                string
	natsPort, postgresPort int
	events                 int
	seed                   uint64
}

func (a *app) devCommand() *cobra.Command {
	var f devFlags
	c := &cobra.Command{
		Use:   "dev",
		Short: "Run everything in one process, to try it out",
		Long: `dev starts an embedded nats-server with JetStream, a throw-away Postgres from the binaries on this machine, and a
relay, all on 127.0.0.1. It is not for production. Ctrl-C stops it and deletes what it stored, unless --data-dir
keeps it.

--demo adds a small business with a worker: orders paid, refunds through three channels of which one is flaky,
accounts opened at a bank that is down for a while, and a few tasks that must fail. It shows them at work for half a
minute, checks that every task, call and cent is accounted for, and shows the dead letters and how to look at them.
With --exit-when-done it ends then: exit code 0 if all of that held, 6 if not.`,
		Example: `  taskrelay dev --demo
  taskrelay dev --demo --exit-when-done
  taskrelay dev --data-dir ./data --nats-port 4222 --postgres-port 54321`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return a.dev(c, f) },
	}
	fl := c.Flags()
	fl.BoolVar(&f.demo, "demo", false, "run the demo business")
	fl.BoolVar(&f.exit, "exit-when-done", false, "end when the demo has ended")
	fl.StringVar(&f.dataDir, "data-dir", "", "keep the data here (default: thrown away)")
	fl.IntVar(&f.natsPort, "nats-port", 0, "port of NATS (default a free one)")
	fl.IntVar(&f.postgresPort, "postgres-port", 0, "port of Postgres (default a free one)")
	fl.IntVar(&f.events, "demo-events", 300, "how many business events the demo has")
	fl.Uint64Var(&f.seed, "demo-seed", 1, "seed of what happens and what goes wrong")
	return c
}

func (a *app) dev(c *cobra.Command, f devFlags) (err error) {
	for _, name := range []string{"database-url", "nats-url"} {
		if c.Flags().Changed(name) {
			return usage("dev starts its own Postgres and NATS, --%s is not for it: on existing servers run the relay and your worker", name)
		}
	}
	if f.exit && !f.demo {
		return usage("--exit-when-done is for --demo")
	}
	if f.events < 20 {
		return usage("--demo-events %d: expected 20 or more", f.events)
	}
	cfg, err := a.config(c)
	if err != nil {
		return err
	}
	ctx, cancel := a.limit(c, 0)
	defer cancel()

	level := "info"
	if f.demo {
		level = "disabled" // its attempts fail on purpose, and the progress shows them
	}
	log, err := a.logger(cfg, level)
	if err != nil {
		return err
	}
	began := time.Now()
	env, err := dev.Start(ctx, dev.Config{
		DataDir: f.dataDir, NATSPort: f.natsPort, PostgresPort: f.postgresPort,
		Schema: outbox.Schema(cfg.Schema), Namespace: cfg.Namespace, Logger: log,
	})
	if errors.Is(err, pgtemp.ErrNotFound) {
		return &exitError{exitConnect, err}
	}
	if err != nil {
		return err
	}
	defer func() {
		// Errors of a server that is thrown away matter only when nothing else went wrong.
		if stopErr := env.Stop(); err == nil {
			err = stopErr
		}
	}()
	d := &devRun{app: a, flags: f, env: env, schema: cfg.Schema, namespace: cfg.Namespace}
	d.banner(time.Since(began))
	if f.demo {
		return d.demo(ctx)
	}
	worker, err := d.stockWorker(log)
	if err != nil {
		return err
	}
	d.hints(nil)
	if err := env.Run(ctx, worker, a.version); err != nil {
		return err
	}
	fmt.Fprintln(a.err, "stopped")
	return nil
}

// devRun is one run of dev.
type devRun struct {
	app               *app
	flags             devFlags
	env               *dev.Env
	schema, namespace string
}

func (d *devRun) printf(format string, args ...any) { fmt.Fprintf(d.app.out, format, args...) }

func (d *devRun) banner(took time.Duration) {
	kept := "thrown away at the end"
	if d.flags.dataDir != "" {
		kept = "kept in " + d.flags.dataDir
	}
	d.printf("taskrelay dev %s, not for production. Started in %.1fs, data %s.\n", d.app.version, took.Seconds(), kept)
	d.printf("  postgres  %-9s %s\n", d.env.PostgresVersion, d.env.Postgres.URL)
	d.printf("  nats      %-9s %s\n", d.env.NATS.Version(), d.env.NATS.URL())
	d.printf("  schema    %s at version %d\n", d.schema, schema.Version)
}

// stockWorker runs what TASKRELAY_BIZ_TYPES names, as cmd/worker would, or is nil when that is not set.
func (d *devRun) stockWorker(log zerolog.Logger) (*dev.Worker, error) {
	if _, ok := os.LookupEnv(config.Prefix + "BIZ_TYPES"); !ok {
		d.printf("  worker    none in here: start your own, or set TASKRELAY_BIZ_TYPES and TASKRELAY_BIZ_<TYPE>_TARGET\n")
		return nil, nil
	}
	os.Setenv(config.Prefix+"DATABASE_URL", d.env.Postgres.URL)
	os.Setenv(config.Prefix+"NATS_URL", d.env.NATS.URL())
	cfg, err := config.LoadWorker()
	if err != nil {
		return nil, err
	}
	concurrency := 0
	for _, t := range cfg.Types {
		concurrency += cmp.Or(t.Concurrency, cfg.WorkerConcurrency)
	}
	maker := target.NewMaker(d.env.NC, concurrency, log)
	registry := new(command.Registry)
	for _, t := range cfg.Types {
		c, err := maker.Command(t)
		if err != nil {
			return nil, err
		}
		if err := command.Register(registry, t.Name, c); err != nil {
			return nil, err
		}
	}
	d.printf("  worker    runs %s\n", cfg.BizTypes)
	return &dev.Worker{Registry: registry, NakMax: cfg.WorkerNakMax, Concurrency: cfg.WorkerConcurrency, Lease: cfg.WorkerLease}, nil
}

// demo runs relay, worker and business together.
func (d *devRun) demo(ctx context.Context) error {
	out := d.app.out
	business, err := demo.New(ctx, demo.Config{
		Pool: d.env.Pool, NC: d.env.NC, Schema: outbox.Schema(d.schema), Namespace: d.namespace,
		Out: out, Terminal: isTerminal(out), Events: d.flags.events, Seed: d.flags.seed,
		Duration: time.Duration(d.flags.events) * time.Second / 15,
	})
	if err != nil {
		return err
	}
	defer business.Close()

	runCtx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		ended <- d.env.Run(runCtx, &dev.Worker{Registry: business.Registry(), NakMax: business.NakMax()}, d.app.version)
		stop() // a relay or worker that gave up ends the demo too
	}()
	d.printf("\nThe demo: orders paid, refunds by card, wallet (flaky) and bank transfer (hangs), accounts at a bank that is\n" +
		"down for a while, some transactions rolled back, some tasks sent twice, a few that must fail.\n\n")
	result, err := business.Run(runCtx)
	if err != nil {
		stop()
		if runErr := <-ended; runErr != nil {
			return runErr
		}
		return err
	}
	result.Print(out)
	d.runNats(ctx, result)
	d.hints(result.Example)
	failure := error(nil)
	if len(result.Problems) > 0 {
		failure = &exitError{exitUnhealthy, fmt.Errorf("the demo found %d things that must not be, the first: %s", len(result.Problems), result.Problems[0])}
	} else {
		d.printf("\nThe main job works: every check above held.\n")
	}
	if d.flags.exit {
		stop()
		return errors.Join(failure, <-ended)
	}
	if failure != nil {
		fmt.Fprintln(d.app.err, "taskrelay:", failure)
	}
	d.printf("Relay and worker go on. Ctrl-C stops them.\n")
	if err := <-ended; err != nil {
		return err
	}
	return failure
}

// runNats shows one dead letter as the nats CLI sees it, when that is installed.
func (d *devRun) runNats(ctx context.Context, r demo.Result) {
	if r.Example == nil {
		return
	}
	path := natscli.Find()
	if path == "" {
		d.printf("\nTo look at dead letters with the nats CLI: go install github.com/nats-io/natscli/nats@v0.5.0\n")
		return
	}
	d.printf("\nDead letters inspected through the NATS CLI (%s):\n", path)
	names := outbox.Names{Namespace: d.namespace}
	commands := natscli.DeadLetters(natscli.Server{URL: d.env.NATS.URL()}, names, r.Example.Subject)
	for _, command := range [][]string{commands[0], commands[1]} {
		d.printf("$ %s\n", natscli.Line(command))
		text, err := natscli.Run(ctx, path, command)
		d.printf("%s\n", text)
		if err != nil {
			d.printf("(%v)\n", err)
		}
	}
}

// hints are lines to paste into another terminal.
func (d *devRun) hints(letter *demo.Letter) {
	names := outbox.Names{Namespace: d.namespace}
	subject, id := "", "1"
	if letter != nil {
		subject, id = letter.Subject, letter.ID
	}
	if d.flags.exit {
		return // nothing would answer
	}
	d.printf("\nIn another terminal:\n")
	d.printf("  export TASKRELAY_DATABASE_URL='%s'\n", d.env.Postgres.URL)
	d.printf("  export TASKRELAY_NATS_URL=%s\n", d.env.NATS.URL())
	if d.schema != outbox.DefaultSchema {
		d.printf("  export TASKRELAY_SCHEMA=%s\n", d.schema)
	}
	if d.namespace != "" {
		d.printf("  export TASKRELAY_NAMESPACE=%s\n", d.namespace)
	}
	if letter != nil {
		allow := ""
		if letter.Compensation == "done" {
			allow = " --allow-compensated"
		}
		d.printf("  taskrelay dead list\n  taskrelay show %s\n  taskrelay requeue %s --reason 'trying it out'%s\n", id, id, allow)
	} else {
		d.printf("  taskrelay enqueue ORDER_PAYMENT --biz-id O-1 --payload '{\"amount\": 12}'\n  taskrelay list\n")
	}
	for _, command := range natscli.DeadLetters(natscli.Server{URL: d.env.NATS.URL()}, names, subject) {
		d.printf("  %s\n", natscli.Line(command))
	}
	d.printf("  psql '%s' -c \"SELECT id, biz_type, status, delivery, last_error FROM %s.task_view ORDER BY id DESC LIMIT 20\"\n", d.env.Postgres.URL, d.schema)
}
