package schema

import (
	"cmp"
	"embed"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"testing/fstest"

	"github.com/rs/zerolog"
)

// Version is the schema version that this build needs: the number of the newest migration.
const Version = 12

// Default is the name of the schema when Options name none.
const Default = "taskrelay"

const versionTable = "schema_version"

//go:generate go test -run TestPlainFileIsCurrent -update .

//go:embed migrations/*.sql
var migrations embed.FS

// Options say which schema is meant. The zero value is the default schema, silently.
type Options struct {
	// Optional: name of the schema. By default "taskrelay".
	Schema string
	// Optional: receives the applied migrations and what the server notices about them. By default silent.
	Logger zerolog.Logger
}

func (o Options) name() (string, error) {
	name := cmp.Or(o.Schema, Default)
	return name, validName(name)
}

// validName refuses names that need quotes: goose puts the name of its table into SQL unquoted, and people type
// it into psql. Reserved words pass here; Migrate asks the server about them.
func validName(name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("schema name %q: use 1 to 41 lower-case letters, digits and underscores, not starting with a digit", name)
	}
	if strings.HasPrefix(name, "pg_") {
		return fmt.Errorf("schema name %q: Postgres keeps names that start with pg_ for itself", name)
	}
	return nil
}

var namePattern = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,40}$`)

// migration is one embedded file, rendered for a schema.
type migration struct {
	version int64
	file    string
	sql     string
}

func render(name string) ([]migration, error) {
	files, err := fs.ReadDir(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	out := make([]migration, 0, len(files))
	for _, f := range files {
		body, err := fs.ReadFile(migrations, "migrations/"+f.Name())
		if err != nil {
			return nil, err
		}
		number, _, _ := strings.Cut(f.Name(), "_")
		version, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("migration file %s: %w", f.Name(), err)
		}
		out = append(out, migration{version, f.Name(), strings.ReplaceAll(string(body), "{{schema}}", name)})
	}
	return out, nil
}

// files is what goose reads.
func files(ms []migration) fs.FS {
	m := fstest.MapFS{}
	for _, f := range ms {
		m[f.file] = &fstest.MapFile{Data: []byte(f.sql)}
	}
	return m
}
