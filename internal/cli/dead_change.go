package cli

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// deadRequeueCommand is requeue, where the person who looks at dead tasks finds it.
func (a *app) deadRequeueCommand() *cobra.Command {
	c := a.requeueCommand()
	c.Short = "Start dead tasks anew"
	c.Example = `  taskrelay dead requeue 4711 --reason 'bank is back'
  taskrelay dead requeue --group 4c1d20aa7e --reason 'bank is back'
  taskrelay dead requeue --type REFUND_CARD --error-class timeout --dry-run`
	return c
}

func (a *app) deadDiscardCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "discard ID... | FILTER --reason TEXT",
		Short: "Give dead tasks up for good",
		Long: `discard makes dead tasks cancelled and takes their letters away: somebody has looked, and nothing is to be done. Row,
errors and attempts stay; requeue still brings such a task back.

` + bulkHelp,
		Example: `  taskrelay dead discard 4711 --reason 'paid by hand'
  taskrelay dead discard --type REFUND_CARD --older-than 30d --reason 'settled with the bank'`,
	}
	reasonFlag(c, &reason, "")
	return a.changes(c, &reason, func() (operation, error) {
		return operation{action: "discard", what: "discard", do: func(ctx context.Context, s *session, tx pgx.Tx, ids []int64) ([]outbox.Change, error) {
			return s.schema.Discard(ctx, tx, ids, reason)
		}}, nil
	})
}
