package connect

import (
	"io"
	"os"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"
)

// timeFormat is RFC 3339 with milliseconds; times are UTC.
const timeFormat = "2006-01-02T15:04:05.000Z07:00"

// Logger writes to w. level is one of config's; format is console, json or "": console on a terminal, else json.
// It writes at once: a non-blocking writer loses the last lines, which are the ones that say why.
func Logger(w io.Writer, level, format string) (zerolog.Logger, error) {
	l, err := zerolog.ParseLevel(level)
	if err != nil {
		return zerolog.Nop(), err
	}
	if format == "console" || format == "" && isTerminal(w) {
		w = zerolog.ConsoleWriter{Out: w, TimeFormat: "15:04:05.000", TimeLocation: time.UTC, NoColor: !isTerminal(w)}
	}
	return zerolog.New(w).Level(l).Hook(timestamp{}), nil
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

// timestamp does what zerolog's own does, without its settings that are global to the process.
type timestamp struct{}

func (timestamp) Run(e *zerolog.Event, _ zerolog.Level, _ string) {
	e.Str(zerolog.TimestampFieldName, time.Now().UTC().Format(timeFormat))
}
