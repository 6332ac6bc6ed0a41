package outbox

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
)

// DefaultSchema is the Postgres schema that the zero Schema stands for.
const DefaultSchema = "taskrelay"

// Schema names the Postgres schema that holds one installation's tables. The
// zero value means DefaultSchema, so that `var s outbox.Schema` works.
//
// The name becomes part of SQL text. Its rule lets through only names that
// mean the same quoted and unquoted, and leaves no room for SQL: see Validate.
type Schema string

var schemaPattern = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,40}$`)

// String returns the schema's name, DefaultSchema for the zero value.
func (s Schema) String() string { return cmp.Or(string(s), DefaultSchema) }

// Validate refuses a name that does not match ^[a-z_][a-z0-9_]{0,40}$.
// Reserved words of SQL (user, table) match; the migrations refuse those,
// because only Postgres knows its own list.
func (s Schema) Validate() error {
	if name := s.String(); !schemaPattern.MatchString(name) {
		return fmt.Errorf("schema name %q: want a small letter or _, then at most 40 of a-z, 0-9 and _ (for example %q)",
			name, DefaultSchema)
	}
	return nil
}

// Render puts the schema's name in place of every {{schema}} in a statement.
// It panics on a name that Validate refuses: such a name must never reach a
// server as part of a statement.
func (s Schema) Render(sql string) string {
	if err := s.Validate(); err != nil {
		panic("outbox: " + err.Error())
	}
	return strings.ReplaceAll(sql, "{{schema}}", s.String())
}
