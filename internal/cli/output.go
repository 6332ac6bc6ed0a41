package cli

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"github.com/jedib0t/go-pretty/v6/table"
)

// formats of -o.
var formats = []string{"table", "json", "jsonl", "csv", "id"}

// printer writes data to stdout in the format that was asked for.
type printer struct {
	out      io.Writer
	format   string
	terminal bool // out is one: draw borders, cut long texts
}

// column is one column of a table. cell may return any text: what would break the lines is escaped.
type column[T any] struct {
	title string
	cell  func(T) string
	cut   int // Optional: the most characters that a terminal shows
}

// printAll writes items: on a terminal as a table, piped as plain columns, or as JSON, CSV, or one id a line.
func printAll[T any](p *printer, items []T, id func(T) string, columns []column[T]) error {
	switch p.format {
	case "json":
		if items == nil {
			items = []T{}
		}
		return p.json(items)
	case "jsonl":
		enc := json.NewEncoder(p.out)
		enc.SetEscapeHTML(false)
		for _, item := range items {
			if err := enc.Encode(item); err != nil {
				return err
			}
		}
		return nil
	case "id":
		for _, item := range items {
			if _, err := fmt.Fprintln(p.out, id(item)); err != nil {
				return err
			}
		}
		return nil
	case "csv":
		w := csv.NewWriter(p.out)
		rows := [][]string{titles(columns)}
		for _, item := range items {
			rows = append(rows, cells(item, columns))
		}
		return w.WriteAll(rows)
	}
	if !p.terminal {
		return plainColumns(p.out, items, columns)
	}
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	header := table.Row{}
	for _, title := range titles(columns) {
		header = append(header, title)
	}
	t.AppendHeader(header)
	for _, item := range items {
		row := table.Row{}
		for i, cell := range cells(item, columns) {
			row = append(row, shorten(oneLine(cell), columns[i].cut))
		}
		t.AppendRow(row)
	}
	_, err := fmt.Fprintln(p.out, t.Render())
	return err
}

// plainColumns is for pipes: a header, then tab-separated values, nothing cut.
func plainColumns[T any](w io.Writer, items []T, columns []column[T]) error {
	rows := [][]string{titles(columns)}
	for _, item := range items {
		rows = append(rows, cells(item, columns))
	}
	for _, row := range rows {
		for i := range row {
			row[i] = oneLine(row[i])
		}
		if _, err := fmt.Fprintln(w, strings.Join(row, "\t")); err != nil {
			return err
		}
	}
	return nil
}

func titles[T any](columns []column[T]) []string {
	var s []string
	for _, c := range columns {
		s = append(s, c.title)
	}
	return s
}

func cells[T any](item T, columns []column[T]) []string {
	var s []string
	for _, c := range columns {
		s = append(s, c.cell(item))
	}
	return s
}

func (p *printer) json(v any) error {
	enc := json.NewEncoder(p.out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// structured says that the format is for programs.
func (p *printer) structured() bool { return p.format != "table" }

// oneLine keeps a text from another system from moving the cursor or starting a new line.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || (r >= '\u202a' && r <= '\u202e') || (r >= '\u2066' && r <= '\u2069'):
			return '\ufffd'
		}
		return r
	}, s)
}

func shorten(s string, n int) string {
	r := []rune(s)
	if n <= 0 || len(r) <= n {
		return s
	}
	return string(r[:n-1]) + "…"
}

// stamp writes a time as RFC 3339 in UTC, to the millisecond; nil is "".
func stamp(t *time.Time) string {
	if t == nil || t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02T15:04:05.000Z")
}

// ago writes a duration the way people read it.
func ago(d time.Duration) string {
	switch {
	case d < 0:
		return "in " + ago(-d)
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return d.Round(time.Minute).String()
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
