// Package text makes texts of any origin fit for a column and a header.
package text

import (
	"strings"
	"unicode/utf8"
)

// Storable makes of any string one that Postgres takes as text, of at most limit bytes: valid UTF-8, no NUL, cut on
// a rune and marked.
func Storable(s string, limit int) string {
	const mark = "… [cut]"
	cut := len(s) > limit
	if cut {
		s = s[:limit-len(mark)]
		for i := 0; i < utf8.UTFMax && len(s) > 0; i++ { // a rune that was cut through
			if r, n := utf8.DecodeLastRuneInString(s); r != utf8.RuneError || n > 1 {
				break
			}
			s = s[:len(s)-1]
		}
	}
	if strings.IndexByte(s, 0) >= 0 {
		s = strings.ReplaceAll(s, "\x00", "")
	}
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "?")
	}
	if cut {
		s += mark
	}
	return s
}
