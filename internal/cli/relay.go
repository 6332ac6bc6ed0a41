package cli

import (
	"cmp"
	"fmt"
	"os"
	"strconv"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/connect"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func (a *app) relayCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "relay",
		Short:   "Publish from outside, for cron or a scheduling platform",
		Example: "  taskrelay relay run-once --biz-type ORDER_PAYMENT",
	}
	group(c)
	var bizTypes []string
	once := &cobra.Command{
		Use:   "run-once",
		Short: "Publish all that is due, print counts, and end",
		Long: `run-once does what a relay does until there is nothing due any more: it publishes new tasks, the work list, and dead
letters. It may run beside relays and beside itself.`,
		Example: `  taskrelay relay run-once
  taskrelay relay run-once --biz-type ORDER_PAYMENT --biz-type REFUND_CARD -o json`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			ctx, cancel := a.limit(c, 0)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			nc, err := connectNats(s.config)
			if err != nil {
				return err
			}
			defer nc.Close()
			if !c.Flags().Changed("biz-type") {
				bizTypes = s.config.RelayBizTypes
			}
			log, err := a.logger(s.config, "warn")
			if err != nil {
				return err
			}
			r, err := outbox.NewRelay(s.pool, nc, outbox.RelayConfig{
				Schema: s.schema, Namespace: s.config.Namespace, APIPrefix: s.config.NatsAPIPrefix, BizTypes: bizTypes, Batch: s.config.RelayBatch,
				Replicas: s.config.StreamReplicas, MaxPerSubject: s.config.StreamMaxPerSubject,
				Version: a.version, Logger: log,
			})
			if err != nil {
				return err
			}
			counts, err := r.RunOnce(ctx)
			if err != nil {
				return err
			}
			if counts.LanesWaiting > 0 {
				fmt.Fprintf(a.err, "%d lanes cannot be published to now (paused, full or not allowed)\n", counts.LanesWaiting)
			}
			if counts.LanesElsewhere > 0 {
				fmt.Fprintf(a.err, "%d lanes were left to another relay that holds them\n", counts.LanesElsewhere)
			}
			if p.format == "json" {
				return p.json(counts)
			}
			return printAll(p, []outbox.Counts{counts}, func(c outbox.Counts) string { return itoa(c.Published) }, []column[outbox.Counts]{
				{title: "PUBLISHED", cell: func(c outbox.Counts) string { return itoa(c.Published) }},
				{title: "REPUBLISHED", cell: func(c outbox.Counts) string { return itoa(c.Republished) }},
				{title: "DUPLICATES", cell: func(c outbox.Counts) string { return itoa(c.Duplicates) }},
				{title: "REFUSED", cell: func(c outbox.Counts) string { return itoa(c.Refused) }},
				{title: "DEAD LETTERS", cell: func(c outbox.Counts) string { return itoa(c.DeadLetters) }},
				{title: "LANES", cell: func(c outbox.Counts) string { return itoa(c.Lanes) }},
			})
		},
	}
	once.Flags().StringArrayVar(&bizTypes, "biz-type", nil, "only this type; may be repeated (default all) [TASKRELAY_RELAY_BIZ_TYPES]")
	c.AddCommand(once)
	return c
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// logger writes to stderr. Without TASKRELAY_LOG_LEVEL its level is what suits the command.
func (a *app) logger(cfg config.CLI, byDefault string) (zerolog.Logger, error) {
	level := byDefault
	if _, ok := os.LookupEnv(config.Prefix + "LOG_LEVEL"); ok {
		level = cfg.LogLevel
	}
	return connect.Logger(a.err, level, cmp.Or(cfg.LogFormat, "console"))
}
