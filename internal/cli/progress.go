package cli

import (
	"time"

	"github.com/schollz/progressbar/v3"
)

// progress is a bar on stderr, for people only: where stderr is no terminal, nothing is written.
type progress struct{ bar *progressbar.ProgressBar }

// progress counts to total; less than 1: it is not known.
func (a *app) progress(total int64, what string) progress {
	if !isTerminal(a.err) {
		return progress{}
	}
	if total < 1 {
		total = -1
	}
	return progress{progressbar.NewOptions64(total,
		progressbar.OptionSetWriter(a.err),
		progressbar.OptionSetDescription(what),
		progressbar.OptionShowCount(),
		progressbar.OptionShowIts(),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)}
}

func (p progress) add(n int) {
	if p.bar != nil {
		_ = p.bar.Add(n) // stderr is gone: the work goes on
	}
}

// finish takes the bar off the screen, so that what follows begins on a clean line.
func (p progress) finish() {
	if p.bar != nil {
		_ = p.bar.Finish()
		_ = p.bar.Clear()
	}
}
