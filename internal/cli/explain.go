package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

const insufficientPrivilege = "42501"

// explain is the text of an error, with what to do about it where Postgres does not say so.
func explain(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == insufficientPrivilege {
		return err.Error() + ": ask for role taskrelay_operator, or taskrelay_producer to enqueue (the first word is the schema's name)"
	}
	if timedOut(err) {
		return err.Error() + ": give it longer with --timeout, or narrow what is asked for"
	}
	return err.Error()
}

// nameFlags says how to do what was refused for want of a flag: the answers of the SQL functions name their parameters.
func (a *app) nameFlags(command *cobra.Command, changes []outbox.Change) {
	for _, parameter := range []string{"allow_compensated", "allow_succeeded", "allow_uncompensated"} {
		flag := strings.ReplaceAll(parameter, "_", "-")
		asked := slices.ContainsFunc(changes, func(c outbox.Change) bool { return strings.Contains(c.WhyNot, parameter) })
		if asked && command.Flags().Lookup(flag) != nil {
			fmt.Fprintf(a.err, "if that is meant, add --%s\n", flag)
		}
	}
}
