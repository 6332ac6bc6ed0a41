package cli

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
)

func (a *app) configCommand() *cobra.Command {
	var set bool
	var readBy string
	c := &cobra.Command{
		Use:   "config",
		Short: "Show the configuration that this environment gives, and where each value comes from",
		Long: `config prints every variable that relay, worker and taskrelay read, with its value here and its source: environment,
flag, default, or unset. Secrets, and the user and query part of addresses, are not shown. It needs no server. What a
binary would refuse is printed at the end, with exit code 2; "taskrelay check" tries the servers as well.`,
		Example: `  taskrelay config --set
  taskrelay config --for worker -o json
  set -a; . ./taskrelay.env; set +a; taskrelay config`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			if readBy != "" && !slices.Contains(binaries, readBy) {
				return usage("--for %q: expected one of %s", readBy, strings.Join(binaries, ", "))
			}
			flags := a.applyFlags(c)
			var list []config.Setting
			for _, s := range config.Effective() {
				if name := strings.TrimPrefix(s.Name, config.Prefix); flags[name] != "" {
					s.Source = "flag --" + flags[name]
				}
				if (readBy == "" || slices.Contains(s.ReadBy, readBy)) && (!set || s.Source != "default" && s.Source != "unset") {
					list = append(list, s)
				}
			}
			err = printAll(p, list, func(s config.Setting) string { return s.Name }, []column[config.Setting]{
				{title: "VARIABLE", cell: func(s config.Setting) string { return s.Name }},
				{title: "VALUE", cell: func(s config.Setting) string { return s.Value }, cut: 60},
				{title: "SOURCE", cell: func(s config.Setting) string { return s.Source }},
				{title: "READ BY", cell: func(s config.Setting) string { return strings.Join(s.ReadBy, ", ") }},
			})
			if err != nil {
				return err
			}
			return errors.Join(configErrors(readBy)...)
		},
	}
	c.Flags().BoolVar(&set, "set", false, "only what is set, and what is required and is not")
	c.Flags().StringVar(&readBy, "for", "", "only what this binary reads: "+strings.Join(binaries, ", "))
	c.RegisterFlagCompletionFunc("for", cobra.FixedCompletions(binaries, cobra.ShellCompDirectiveNoFileComp))
	return c
}

var binaries = []string{"relay", "worker", "taskrelay"}

// configErrors is what the named binary would refuse. By default only what every one of them refuses: an environment
// made for operators has no NATS_URL and no biz types, and is in order.
func configErrors(binary string) []error {
	if binary == "" {
		binary = "taskrelay"
	}
	var errs []error
	for _, err := range config.LoadAll(binary) {
		errs = append(errs, err)
	}
	return errs
}
