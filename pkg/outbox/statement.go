package outbox

// A statement is SQL with {{schema}} in it. The text for the default schema is
// rendered once: enqueueing should not cost more than its round trip.
type statement struct{ template, forDefault string }

func newStatement(sql string) statement {
	return statement{template: sql, forDefault: Schema("").Render(sql)}
}

// in returns the statement for s, which must be valid.
func (st statement) in(s Schema) string {
	if s == "" || s == DefaultSchema {
		return st.forDefault
	}
	return s.Render(st.template)
}
