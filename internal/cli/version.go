package cli

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/schema"
)

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version, and the schema version it needs",
		Example: "  taskrelay version -o json",
		Args:    args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			v := struct {
				Version string `json:"version"`
				Schema  int64  `json:"schema"`
				Go      string `json:"go"`
			}{a.version, schema.Version, runtime.Version()}
			if p.format == "json" || p.format == "jsonl" {
				return p.json(v)
			}
			_, err = fmt.Fprintf(a.out, "taskrelay %s, schema version %d, %s\n", v.Version, v.Schema, v.Go)
			return err
		},
	}
}
