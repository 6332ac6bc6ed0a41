// Package cli is the command line of taskrelay.
//
// Properties: data goes to stdout and everything else to stderr; JSON carries ids as strings and times as RFC 3339 in
// UTC; every change goes through the SQL functions of the schema, which guard it by the task's state and write who did
// it to the audit table; how a command ended is its exit code.
package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/spf13/cobra"
)

// app is what the commands share: the streams and the global flags.
type app struct {
	in       io.Reader
	out, err io.Writer
	version  string

	flags   map[string]*string // that stand for an environment variable, by its name
	format  string
	timeout time.Duration
	yes     bool
}

// Main runs the command line args and returns the exit code. version is of this build.
func Main(ctx context.Context, version string, args []string, in io.Reader, out, err io.Writer) int {
	a := &app{in: in, out: out, err: err, version: version, flags: map[string]*string{}}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(err)
	failure := root.ExecuteContext(ctx)
	code := exitCode(failure)
	if ctx.Err() != nil && failure != nil {
		code = exitInterrupt
	}
	if e, silent := failure.(*exitError); failure != nil && !(silent && e.err == nil) && code != exitInterrupt {
		fmt.Fprintln(err, "taskrelay:", explain(failure))
	}
	return code
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "taskrelay",
		Short: "Tasks in Postgres, delivered by NATS JetStream",
		Long: `taskrelay operates an installation: a table of tasks in Postgres, a relay that publishes them to NATS
JetStream, and workers that run them.

To see it at work on this machine, with nothing to set up:  taskrelay dev --demo

` + exitHelp,
		Example: `  export TASKRELAY_DATABASE_URL=postgres://app@127.0.0.1:5432/app
  taskrelay migrate up
  taskrelay enqueue ORDER_PAYMENT --biz-id O-1 --payload '{"amount": 12}'
  taskrelay show ORDER_PAYMENT/O-1
  taskrelay dead list`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	group(root)
	root.Version = a.version
	root.SetVersionTemplate("taskrelay {{.Version}}\n")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usage("%w (%s --help)", err, c.CommandPath())
	})
	f := root.PersistentFlags()
	for _, v := range []struct{ flag, variable, text string }{
		{"database-url", "DATABASE_URL", "Postgres, such as postgres://user@127.0.0.1:5432/db"},
		{"nats-url", "NATS_URL", "NATS, such as nats://127.0.0.1:4222"},
		{"schema", "SCHEMA", `Postgres schema of the installation (default "taskrelay")`},
		{"namespace", "NAMESPACE", "prefix of streams and subjects (default none)"},
	} {
		a.flags[v.variable] = f.String(v.flag, "", v.text+" [TASKRELAY_"+v.variable+"]")
	}
	f.StringVarP(&a.format, "output", "o", "table", "format: "+strings.Join(formats, ", "))
	f.DurationVar(&a.timeout, "timeout", 30*time.Second, "give up after this long; 0 waits for ever")
	f.BoolVarP(&a.yes, "yes", "y", false, "do not ask")
	root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))

	root.AddCommand(
		a.migrateCommand(), a.enqueueCommand(), a.listCommand(), a.showCommand(),
		a.statsCommand(), a.configCommand(), a.checkCommand(),
		a.requeueCommand(), a.resetCommand(), a.rerunCommand(), a.runCommand(), a.delayCommand(), a.priorityCommand(), a.cancelCommand(), a.deleteCommand(),
		a.bulkCommand(),
		a.deadCommand(), a.typesCommand(), a.pauseCommand(), a.resumeCommand(), a.purgeCommand(), a.relayCommand(), a.devCommand(), a.doctorCommand(), a.repositionCommand(), a.healthcheckCommand(), a.generateCommand(), a.versionCommand(),
	)
	return root
}

// group makes a command that only holds others: alone it prints its help, and an unknown name is wrong usage.
func group(c *cobra.Command) {
	c.Args = cobra.ArbitraryArgs
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		hint := ""
		if c.SuggestionsMinimumDistance == 0 {
			c.SuggestionsMinimumDistance = 2
		}
		if s := c.SuggestionsFor(args[0]); len(s) > 0 {
			hint = fmt.Sprintf(", did you mean %q?", s[0])
		}
		return usage("unknown command %q for %q%s (%s --help)", args[0], c.CommandPath(), hint, c.CommandPath())
	}
}

// args makes a wrong number of arguments a usage error that shows the right form.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, got []string) error {
		if err := check(c, got); err != nil {
			return usage("%w: expected %s", err, c.UseLine())
		}
		return nil
	}
}

// printer for stdout, or a usage error for an unknown format.
func (a *app) printer() (*printer, error) {
	if !slices.Contains(formats, a.format) {
		return nil, usage("--output %q: expected one of %s", a.format, strings.Join(formats, ", "))
	}
	return &printer{out: a.out, format: a.format, terminal: isTerminal(a.out)}, nil
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

// limit applies --timeout. Commands that may take long pass their own default, 0 for none.
func (a *app) limit(c *cobra.Command, byDefault time.Duration) (context.Context, context.CancelFunc) {
	d := byDefault
	if c.Flags().Changed("timeout") {
		d = a.timeout
	}
	if d <= 0 {
		return context.WithCancel(c.Context())
	}
	return context.WithTimeoutCause(c.Context(), d, fmt.Errorf("no answer within %v (--timeout)", d))
}

// confirm asks before a change to several tasks. Without a terminal, or with output for programs, it does not wait
// for an answer that cannot come.
func (a *app) confirm(question string) error {
	if a.yes {
		return nil
	}
	if !isTerminal(a.in) || a.format != "table" {
		return usage("%s: add --yes to confirm", question)
	}
	fmt.Fprintf(a.err, "%s? [y/N] ", question)
	var answer string
	fmt.Fscanln(a.in, &answer)
	if s := strings.ToLower(answer); s != "y" && s != "yes" {
		return usage("nothing changed")
	}
	return nil
}
