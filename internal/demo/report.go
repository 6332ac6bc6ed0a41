package demo

import (
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/jedib0t/go-pretty/v6/table"
)

// Print writes the result for a person: the table, what was checked, the retries, and the dead letters.
func (r Result) Print(w io.Writer) {
	fmt.Fprintf(w, "\n%s\n\n", r.Table)
	for _, c := range r.Checks {
		mark := "ok  "
		if !c.OK {
			mark = "FAIL"
		}
		fmt.Fprintf(w, "  %s  %s\n", mark, c.Text)
	}
	fmt.Fprintf(w, "        failed attempts came back %d times by nak (short delay), %d times through the table (long delay)\n", r.Retries.ByNak, r.Retries.ByTable)
	if len(r.Letters) == 0 {
		return
	}
	fmt.Fprintf(w, "\nDead letters, read from the stream:\n")
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.AppendHeader(table.Row{"subject", "biz id", "reason", "attempts", "compensation", "error"})
	for _, l := range r.Letters {
		t.AppendRow(table.Row{l.Subject, l.BizID, l.Reason, l.Attempts, l.Compensation, shorten(l.Error, 70)})
	}
	fmt.Fprintln(w, t.Render())
}

// shorten cuts on a character.
func shorten(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}
