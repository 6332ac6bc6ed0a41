package schema

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Migration is one step of the schema.
type Migration struct {
	Version   int64
	Name      string    // the file it came from; empty for one that this build does not know
	AppliedAt time.Time // zero when it is not applied
}

// Applied says whether the database has this step.
func (m Migration) Applied() bool { return !m.AppliedAt.IsZero() }

// Status returns every migration that this build knows or the database has, by version. It changes nothing, and
// a schema that does not exist is one where nothing is applied.
func Status(ctx context.Context, pool *pgxpool.Pool, opts Options) ([]Migration, error) {
	name, err := opts.name()
	if err != nil {
		return nil, err
	}
	rendered, err := render(name)
	if err != nil {
		return nil, err
	}
	times, err := applied(ctx, pool, name)
	if err != nil && !errors.Is(err, errNoSchema) {
		return nil, err
	}
	var out []Migration
	for _, m := range rendered {
		out = append(out, Migration{Version: m.version, Name: m.file, AppliedAt: times[m.version]})
	}
	for v := int64(Version + 1); len(times) > 0 && v <= newest(times); v++ {
		if at, ok := times[v]; ok {
			out = append(out, Migration{Version: v, AppliedAt: at})
		}
	}
	return out, nil
}

// Validate says whether this build can run on the schema: nil when it is at [Version] or newer, else an error that
// names the command which mends it. It is one cheap query and works through any pooler.
func Validate(ctx context.Context, pool *pgxpool.Pool, opts Options) error {
	name, err := opts.name()
	if err != nil {
		return err
	}
	times, err := applied(ctx, pool, name)
	if errors.Is(err, errNoSchema) {
		return fmt.Errorf(`schema %q has no taskrelay tables: run "taskrelay migrate up"`, name)
	}
	if err != nil {
		return err
	}
	if v := newest(times); v < Version {
		return fmt.Errorf(`schema %q is at version %d, this binary needs %d: run "taskrelay migrate up"`, name, v, Version)
	}
	return nil
}

var errNoSchema = errors.New("schema does not exist")

// applied returns the time of each applied version, version 0 included.
func applied(ctx context.Context, pool *pgxpool.Pool, name string) (map[int64]time.Time, error) {
	rows, err := pool.Query(ctx, `-- taskrelay: schema version
SELECT version_id, max(tstamp AT TIME ZONE 'UTC') FROM `+name+"."+versionTable+` WHERE is_applied GROUP BY version_id`)
	if err != nil {
		return nil, explain(err, name)
	}
	times := map[int64]time.Time{}
	var v int64
	var at time.Time
	_, err = pgx.ForEachRow(rows, []any{&v, &at}, func() error {
		times[v] = at
		return nil
	})
	if err != nil {
		return nil, explain(err, name)
	}
	return times, nil
}

func explain(err error, name string) error {
	var pe *pgconn.PgError
	if !errors.As(err, &pe) {
		return fmt.Errorf("read the version of schema %q: %w", name, err)
	}
	switch pe.Code {
	case "42P01", "3F000": // undefined table, invalid schema name
		return errNoSchema
	case "42501": // insufficient privilege
		return fmt.Errorf("read the version of schema %q: %w: this user is in none of the roles %s", name, err, roleList(name))
	}
	return fmt.Errorf("read the version of schema %q: %w", name, err)
}

func newest(times map[int64]time.Time) (v int64) {
	for k := range times {
		v = max(v, k)
	}
	return v
}
