package schema

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Roles are the suffixes of the roles that a migration makes; their names start with the schema's.
var roleSuffixes = []string{"producer", "relay", "worker", "operator", "viewer"}

// SQL returns the whole schema as one plain file, for psql -f and for other migration tools. Its result equals
// that of [Migrate] on an empty database: a later "taskrelay migrate up" has nothing to do.
func SQL(opts Options) (string, error) {
	name, err := opts.name()
	if err != nil {
		return "", err
	}
	rendered, err := render(name)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, `-- The schema of taskrelay, version %[2]d, for an empty database: psql -v ON_ERROR_STOP=1 -f this_file
-- Made by "taskrelay migrate sql"; the same as "taskrelay migrate up". To upgrade an older schema use that.
BEGIN;
SET LOCAL TimeZone = 'UTC';

DO $$ BEGIN
    IF to_regnamespace('%[1]s') IS NULL THEN
        CREATE SCHEMA %[1]s;
    END IF;
END $$;

`, name, Version)
	fmt.Fprintf(&b, createVersionTableSQL+";\n", name+"."+versionTable)
	insert := "INSERT INTO " + name + "." + versionTable + " (version_id, is_applied) VALUES (%d, true);\n"
	fmt.Fprintf(&b, insert, 0)
	for _, m := range rendered {
		fmt.Fprintf(&b, "\n-- %s\n\n%s\n", m.file, plain(m.sql))
		fmt.Fprintf(&b, insert, m.version)
	}
	b.WriteString("\nCOMMIT;\n")
	return b.String(), nil
}

// RolesSQL returns the SQL that makes the roles and grants them their rights, for somebody who may create roles:
// a migration by a user who may not skips the roles and says so. It can be run again at any time, as the owner
// of the schema or a superuser.
func RolesSQL(opts Options) (string, error) {
	name, err := opts.name()
	if err != nil {
		return "", err
	}
	rendered, err := render(name)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, m := range rendered {
		if strings.HasSuffix(m.file, "_roles.sql") {
			b.WriteString(plain(m.sql) + "\n")
			continue
		}
		for _, block := range rolesBlock.FindAllString(m.sql, -1) {
			b.WriteString("\n-- " + m.file + "\n" + block + "\n")
		}
	}
	return b.String(), nil
}

// MissingRoles returns the names of the roles that do not exist on the server. When there are any, somebody who
// may create roles has to run [RolesSQL].
func MissingRoles(ctx context.Context, pool *pgxpool.Pool, opts Options) ([]string, error) {
	name, err := opts.name()
	if err != nil {
		return nil, err
	}
	var missing []string
	err = pool.QueryRow(ctx, `-- taskrelay: missing roles
SELECT coalesce(array_agg(r ORDER BY r), '{}') FROM unnest(string_to_array($1::text, ', ')) AS r WHERE to_regrole(r) IS NULL`,
		roleList(name)).Scan(&missing)
	return missing, err
}

// rolesBlock is how a migration after the roles file grants rights on what it adds.
var rolesBlock = regexp.MustCompile(`(?s)DO \$roles\$.*?END \$roles\$;`)

func roleList(name string) string {
	return name + "_" + strings.Join(roleSuffixes, ", "+name+"_")
}

// plain leaves out what only goose needs.
func plain(sql string) string {
	var b strings.Builder
	for line := range strings.Lines(sql) {
		if !strings.HasPrefix(line, "-- +goose") {
			// Nothing works in an empty database yet, and the file is one transaction.
			b.WriteString(strings.Replace(line, " CONCURRENTLY", "", 1))
		}
	}
	return strings.TrimSpace(b.String())
}
