package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/schema"
)

func (a *app) migrateCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "migrate",
		Short: "Create, upgrade and check the schema",
		Long: `migrate creates and upgrades taskrelay's tables. Any number of processes may do so at once. It needs a direct
connection: a pooler in transaction mode is refused. TASKRELAY_MIGRATE_DATABASE_URL, when set, is used instead of
TASKRELAY_DATABASE_URL.`,
		Example: "  taskrelay migrate up\n  taskrelay migrate status",
	}
	group(c)
	c.AddCommand(
		&cobra.Command{
			Use:   "up",
			Short: "Bring the schema to this version",
			Example: "  taskrelay migrate up --database-url postgres://owner@127.0.0.1:5432/app\n" +
				"  taskrelay migrate up --schema billing_tasks",
			Args: args(cobra.NoArgs),
			RunE: a.migrateUp,
		},
		&cobra.Command{
			Use:     "status",
			Short:   "List the migrations and when they were applied",
			Example: "  taskrelay migrate status -o json",
			Args:    args(cobra.NoArgs),
			RunE:    a.migrateStatus,
		},
		&cobra.Command{
			Use:     "validate",
			Short:   "Exit 0 when the schema is new enough for this binary, else 6",
			Example: "  taskrelay migrate validate || taskrelay migrate up",
			Args:    args(cobra.NoArgs),
			RunE:    a.migrateValidate,
		},
		&cobra.Command{
			Use:   "sql",
			Short: "Print the whole schema as plain SQL",
			Long: `sql prints the schema as one file, for psql and for other migration tools. It needs no database. The result is
the same as that of "migrate up" on an empty database.`,
			Example: "  taskrelay migrate sql | psql -v ON_ERROR_STOP=1 \"$TASKRELAY_DATABASE_URL\"",
			Args:    args(cobra.NoArgs),
			RunE:    a.printSQL(schema.SQL),
		},
		&cobra.Command{
			Use:   "roles",
			Short: "Print the roles and their rights as SQL",
			Long: `roles prints what "migrate up" leaves out where its user may not make roles. Somebody who may runs it, as the owner of
the schema or a superuser; again does no harm. It needs no database.`,
			Example: "  taskrelay migrate roles | psql -v ON_ERROR_STOP=1 postgres://postgres@127.0.0.1:5432/app",
			Args:    args(cobra.NoArgs),
			RunE:    a.printSQL(schema.RolesSQL),
		},
	)
	return c
}

// printSQL makes a command that prints what a function renders for the schema.
func (a *app) printSQL(render func(schema.Options) (string, error)) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, _ []string) error {
		cfg, err := a.config(c)
		if err != nil {
			return err
		}
		sql, err := render(schema.Options{Schema: cfg.Schema})
		if err != nil {
			return err
		}
		_, err = fmt.Fprint(a.out, sql)
		return err
	}
}

// migrator opens the database that migrations go to.
func (a *app) migrator(ctx context.Context, c *cobra.Command) (*pgxpool.Pool, schema.Options, error) {
	cfg, err := a.config(c)
	if err != nil {
		return nil, schema.Options{}, err
	}
	url := cfg.MigrateDatabase(cfg.DatabaseURL)
	// A flag given by hand is meant, whatever the environment says.
	if c.Flags().Changed("database-url") || url == "" {
		if url, err = cfg.Database(); err != nil {
			return nil, schema.Options{}, err
		}
	}
	pool, err := openPool(ctx, url)
	return pool, schema.Options{Schema: cfg.Schema}, err
}

func (a *app) migrateUp(c *cobra.Command, _ []string) error {
	ctx, cancel := a.limit(c, 0) // an index on a large table takes as long as it takes
	defer cancel()
	pool, opts, err := a.migrator(ctx, c)
	if err != nil {
		return err
	}
	defer pool.Close()
	applied, err := schema.Migrate(ctx, pool, opts)
	if err != nil {
		return err
	}
	name := opts.Schema
	if len(applied) == 0 {
		fmt.Fprintf(a.err, "schema %s is up to date (version %d)\n", name, schema.Version)
	} else {
		var versions []string
		for _, v := range applied {
			versions = append(versions, strconv.FormatInt(v, 10))
		}
		fmt.Fprintf(a.err, "schema %s: applied %s, now at version %d\n", name, strings.Join(versions, ", "), schema.Version)
	}
	missing, err := schema.MissingRoles(ctx, pool, opts)
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		sql, err := schema.RolesSQL(opts)
		if err != nil {
			return err
		}
		fmt.Fprintf(a.err, "these roles do not exist, and this user may not make them: %s. Let somebody who may run:\n", strings.Join(missing, ", "))
		fmt.Fprint(a.out, sql)
	}
	return nil
}

// migrationLine is one migration as it is printed.
type migrationLine struct {
	Version   string     `json:"version"`
	Name      string     `json:"name"`
	AppliedAt *time.Time `json:"applied_at"`
}

func (a *app) migrateStatus(c *cobra.Command, _ []string) error {
	p, err := a.printer()
	if err != nil {
		return err
	}
	ctx, cancel := a.limit(c, a.timeout)
	defer cancel()
	pool, opts, err := a.migrator(ctx, c)
	if err != nil {
		return err
	}
	defer pool.Close()
	all, err := schema.Status(ctx, pool, opts)
	if err != nil {
		return err
	}
	var lines []migrationLine
	for _, m := range all {
		line := migrationLine{Version: strconv.FormatInt(m.Version, 10), Name: m.Name}
		if m.Applied() {
			at := m.AppliedAt.UTC()
			line.AppliedAt = &at
		}
		lines = append(lines, line)
	}
	return printAll(p, lines, func(m migrationLine) string { return m.Version }, []column[migrationLine]{
		{title: "VERSION", cell: func(m migrationLine) string { return m.Version }},
		{title: "NAME", cell: func(m migrationLine) string { return m.Name }},
		{title: "APPLIED", cell: func(m migrationLine) string {
			if m.AppliedAt == nil {
				return "pending"
			}
			return stamp(m.AppliedAt)
		}},
	})
}

func (a *app) migrateValidate(c *cobra.Command, _ []string) error {
	ctx, cancel := a.limit(c, a.timeout)
	defer cancel()
	pool, opts, err := a.migrator(ctx, c)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := schema.Validate(ctx, pool, opts); err != nil {
		if ctx.Err() != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		return &exitError{exitUnhealthy, err}
	}
	fmt.Fprintf(a.err, "schema %s is at version %d or newer\n", opts.Schema, schema.Version)
	return nil
}
