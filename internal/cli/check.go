package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

// checked is one thing that was looked at before a deploy.
type checked struct {
	Check  string `json:"check"`
	Status string `json:"status"` // ok, warn or fail
	Detail string `json:"detail,omitempty"`
	Fix    string `json:"fix,omitempty"` // what to do

	code int // exit code when it failed
}

// checker collects what was looked at.
type checker struct {
	lines   []checked
	targets []string // relay, worker, operator, producer, viewer
}

func (k *checker) ok(check, format string, args ...any) {
	k.lines = append(k.lines, checked{Check: check, Status: "ok", Detail: fmt.Sprintf(format, args...)})
}

func (k *checker) warn(check, fix, format string, args ...any) {
	k.lines = append(k.lines, checked{Check: check, Status: "warn", Detail: fmt.Sprintf(format, args...), Fix: fix})
}

func (k *checker) fail(code int, check, fix string, err error) {
	k.lines = append(k.lines, checked{Check: check, Status: "fail", Detail: explain(err), Fix: fix, code: code})
}

// result is the exit code: what no restart mends first, then what waiting may mend.
func (k *checker) result() error {
	code := 0
	for _, c := range []int{exitUsage, exitConnect, exitUnhealthy} {
		if code == 0 && slices.ContainsFunc(k.lines, func(l checked) bool { return l.Status == "fail" && l.code == c }) {
			code = c
		}
	}
	if code == 0 {
		return nil
	}
	return &exitError{code: code}
}

var checkTargets = []string{"relay", "worker", "operator", "producer", "viewer"}

func (a *app) checkCommand() *cobra.Command {
	k := &checker{}
	c := &cobra.Command{
		Use:   "check",
		Short: "Try a configuration before it is deployed: variables, servers, schema, rights, streams",
		Long: `check reads this environment as the named processes would, connects to Postgres and NATS as they would, and looks at the
version of the schema, the rights of the database user, the size of messages that NATS takes, and the settings of the streams.
It changes nothing, and needs no running relay or worker; "taskrelay doctor" looks at what runs.

Exit codes: 0 nothing failed (there may be warnings), 2 a variable is wrong, 7 a server cannot be reached, 6 anything else.`,
		Example: `  taskrelay check
  taskrelay check --for worker -o json
  set -a; . ./taskrelay.env; set +a; taskrelay check --for relay,worker || exit 1`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			for _, t := range k.targets {
				if !slices.Contains(checkTargets, t) {
					return usage("--for %q: expected any of %s", t, strings.Join(checkTargets, ", "))
				}
			}
			a.applyFlags(c)
			if len(k.targets) == 0 {
				k.targets = []string{"relay"}
				if _, set := os.LookupEnv(config.Prefix + "BIZ_TYPES"); set {
					k.targets = append(k.targets, "worker")
				}
			}
			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			k.run(ctx)
			err = printAll(p, k.lines, func(l checked) string { return l.Check }, []column[checked]{
				{title: "STATUS", cell: func(l checked) string { return l.Status }},
				{title: "CHECK", cell: func(l checked) string { return l.Check }},
				{title: "DETAIL", cell: func(l checked) string { return l.Detail }, cut: 100},
				{title: "DO", cell: func(l checked) string { return l.Fix }},
			})
			if err != nil {
				return err
			}
			return k.result()
		},
	}
	c.Flags().StringSliceVar(&k.targets, "for", nil, "what the environment is for, any of "+strings.Join(checkTargets, ", ")+" (default relay, and worker when TASKRELAY_BIZ_TYPES is set)")
	c.RegisterFlagCompletionFunc("for", cobra.FixedCompletions(checkTargets, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func (k *checker) run(ctx context.Context) {
	var binaries []string
	for _, t := range k.targets {
		if t != "relay" && t != "worker" {
			t = "taskrelay"
		}
		binaries = append(binaries, t)
	}
	wrong := config.LoadAll(binaries...)
	for _, binary := range slices.Compact(binaries) {
		if err := wrong[binary]; err != nil {
			k.fail(exitUsage, "configuration of "+binary, "see docs/configuration.md, or taskrelay config", err)
			continue
		}
		k.ok("configuration of "+binary, "valid")
	}
	cfg, err := config.LoadCLI()
	if err != nil {
		if len(wrong) == 0 {
			k.fail(exitUsage, "configuration", "see docs/configuration.md, or taskrelay config", err)
		}
		return // which servers are meant is not known
	}
	installation := k.postgres(ctx, cfg)
	if cfg.NatsURL != "" || slices.Contains(k.targets, "relay") || slices.Contains(k.targets, "worker") {
		k.nats(ctx, cfg, installation)
	}
}

// postgres returns the id of the installation, "" when it could not be read.
func (k *checker) postgres(ctx context.Context, cfg config.CLI) (installation string) {
	url, err := cfg.Database()
	if err != nil {
		return "" // the configuration's line says so
	}
	pool, err := openPool(ctx, url)
	if err != nil {
		code := exitCode(err)
		if code != exitConnect && code != exitUsage {
			code = exitUnhealthy
		}
		k.fail(code, "postgres", "", err)
		return ""
	}
	defer pool.Close()
	var version int
	var text, user string
	err = pool.QueryRow(ctx, `SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_user::text`).Scan(&version, &text, &user)
	switch {
	case err != nil:
		k.fail(exitUnhealthy, "postgres", "", err)
		return ""
	case version < 150000:
		k.fail(exitUnhealthy, "postgres", "upgrade the server", fmt.Errorf("version %s: 15 or newer is needed", text))
	default:
		k.ok("postgres", "%s, version %s, as %s", cfg.DatabaseURL.Redacted(), text, user)
	}
	var standby bool
	if err := pool.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&standby); err == nil && standby {
		k.fail(exitUnhealthy, "postgres is primary", "name the primary in TASKRELAY_DATABASE_URL, or add target_session_attrs=read-write", errors.New("this server is a standby"))
	}
	opts := schema.Options{Schema: cfg.Schema}
	if err := schema.Validate(ctx, pool, opts); err != nil {
		k.fail(exitUnhealthy, "schema", "taskrelay migrate up", err)
		return ""
	}
	k.ok("schema", "%s is at version %d or newer", cfg.Schema, schema.Version)
	missing, err := schema.MissingRoles(ctx, pool, opts)
	switch {
	case err != nil:
		k.fail(exitUnhealthy, "roles", "", err)
	case len(missing) > 0:
		k.warn("roles", "let somebody who may create roles run the output of taskrelay migrate roles", "not there: %s", strings.Join(missing, ", "))
	}
	for _, t := range k.targets {
		if !slices.Contains(missing, cfg.Schema+"_"+t) {
			k.rights(ctx, pool, cfg.Schema, t, user)
		}
	}
	// Not everybody may read it: then owners are not compared.
	_ = pool.QueryRow(ctx, outbox.Schema(cfg.Schema).Render(`SELECT id::text FROM {{schema}}.installation`)).Scan(&installation)
	return installation
}

// What the shipped role has and the user has not. The role itself is the list: it cannot drift from the migrations.
const rightsSQL = `-- taskrelay cli: rights that a user lacks
WITH need AS (
    SELECT 1 AS kind, c.oid AS object, 0::smallint AS col, c.relname::text AS name, a.privilege_type AS privilege
    FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
    WHERE c.relnamespace = to_regnamespace($1::text) AND c.relkind IN ('r', 'v', 'p') AND a.grantee = to_regrole($2::text)
    UNION ALL
    SELECT 2, c.oid, t.attnum, c.relname || '.' || t.attname, a.privilege_type
    FROM pg_class AS c JOIN pg_attribute AS t ON t.attrelid = c.oid AND NOT t.attisdropped CROSS JOIN LATERAL aclexplode(t.attacl) AS a
    WHERE c.relnamespace = to_regnamespace($1::text) AND a.grantee = to_regrole($2::text)
    UNION ALL
    SELECT 3, p.oid, 0, p.proname || '()', a.privilege_type
    FROM pg_proc AS p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
    WHERE p.pronamespace = to_regnamespace($1::text) AND a.grantee = to_regrole($2::text)
    UNION ALL
    SELECT 4, n.oid, 0, 'schema ' || n.nspname, a.privilege_type
    FROM pg_namespace AS n CROSS JOIN LATERAL aclexplode(n.nspacl) AS a
    WHERE n.oid = to_regnamespace($1::text) AND a.grantee = to_regrole($2::text)
)
SELECT DISTINCT n.privilege || ' on ' || n.name
FROM need AS n
WHERE NOT CASE n.kind
    WHEN 1 THEN has_table_privilege(n.object, n.privilege)
    WHEN 2 THEN has_column_privilege(n.object, n.col::smallint, n.privilege)
    WHEN 3 THEN has_function_privilege(n.object, n.privilege)
    ELSE has_schema_privilege(n.object, n.privilege) END
ORDER BY 1`

func (k *checker) rights(ctx context.Context, pool *pgxpool.Pool, schemaName, target, user string) {
	role := schemaName + "_" + target
	check := "rights of " + map[bool]string{true: "an ", false: "a "}[target == "operator"] + target
	var lacks []string
	rows, err := pool.Query(ctx, rightsSQL, schemaName, role)
	if err == nil {
		lacks, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	switch {
	case err != nil:
		k.fail(exitUnhealthy, check, "", err)
	case len(lacks) > 0:
		shown := lacks[:min(3, len(lacks))]
		more := ""
		if n := len(lacks) - len(shown); n > 0 {
			more = fmt.Sprintf(" and %d more", n)
		}
		k.fail(exitUnhealthy, check, fmt.Sprintf("GRANT %s TO %s", role, pgx.Identifier{user}.Sanitize()),
			fmt.Errorf("user %s lacks %s%s", user, strings.Join(shown, ", "), more))
	default:
		k.ok(check, "user %s has all that %s has", user, role)
	}
}

// A message is a payload of up to 512 KiB, headers, and what the server puts around them.
const natsPayload = outbox.MaxPayload + outbox.MaxHeaders + 16<<10

func (k *checker) nats(ctx context.Context, cfg config.CLI, installation string) {
	nc, err := connectNats(cfg)
	if err != nil {
		if cfg.NatsURL == "" {
			return // the configuration's line says so
		}
		k.fail(exitConnect, "nats", "", err)
		return
	}
	defer nc.Close()
	k.ok("nats", "%s, version %s", cfg.NatsURL.Redacted(), nc.ConnectedServerVersion())
	if n := nc.MaxPayload(); n < natsPayload {
		k.warn("nats message size", fmt.Sprintf("set max_payload of the server to %d or more (its default is 1 MiB)", natsPayload),
			"the server takes %d bytes: a task with the largest payload (512 KiB) and headers would be dead as oversize", n)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	relay := outbox.RelayConfig{Schema: outbox.Schema(cfg.Schema), Namespace: cfg.Namespace, Replicas: cfg.StreamReplicas, MaxPerSubject: cfg.StreamMaxPerSubject, APIPrefix: cfg.NatsAPIPrefix}
	streams, err := outbox.CheckStreams(ctx, nc, relay, installation)
	if err != nil {
		k.fail(exitUnhealthy, "jetstream", "is JetStream on (nats-server -js), and may this user ask for stream info ($JS.API.STREAM.INFO.*)?", err)
		return
	}
	for _, s := range streams {
		check := "stream " + s.Stream
		switch {
		case s.Missing:
			k.ok(check, "not there: the relay makes it")
		case s.Foreign != "":
			k.fail(exitUnhealthy, check, "use another NATS, or set TASKRELAY_NAMESPACE", fmt.Errorf("it belongs to installation %s, this database is %s", s.Foreign, installation))
		case len(s.Unsafe) > 0:
			k.fail(exitUnhealthy, check, natsLine(natsServer(cfg, "").Command(names(cfg), "stream", "edit", s.Stream)), fmt.Errorf("it would lose tasks: %s", strings.Join(s.Unsafe, ", ")))
		case len(s.Differs) > 0:
			k.warn(check, "nothing, if it is meant: the relay leaves it", "%s", strings.Join(s.Differs, "; "))
		default:
			k.ok(check, "as the relay makes it")
		}
	}
}
