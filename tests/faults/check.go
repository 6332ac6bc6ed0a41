package faults

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
)

// evidence is all that a run leaves behind.
type evidence struct {
	entries      map[int64]*entry // by number
	rows         []row
	attempts     []attempt
	moves        []move
	calls        []call
	letters      map[int64]string // id → body, of every message on the dead stream
	messages     map[int64]bool   // ids that have a message on the task stream
	installation string
	// paused reports whether the process of a worker was stopped by the suite at some time between two instants.
	paused func(worker string, from, to time.Time) bool
}

// A verdict counts what must not be, and the overlaps, which may.
type verdict struct {
	tasks int // committed

	lost          int // committed and not there, or unfinished without a lease, a message or a work-list entry
	afterRollback int // calls of a task that is not there
	stale         int // writes by a worker whose claim did not hold any more, or to a row that was final
	stuck         int // not finished in time
	overlaps      int // two calls of one task at once, the first of them under a lease that had ended

	double     int // two calls of one task at once under a living lease
	afterFinal int // calls that began after the task was final
	late       int // of a process that was paused between its last look at the lease and the call: nobody can help that
	wrongEnd   int // finished otherwise than scripted
	unlogged   int // calls and attempts that do not pair
	letters    int // dead letters that are missing, too many or not the payload

	said map[string]int
	text []string
}

const saidEach = 10 // of each kind; the rest is counted

func (v *verdict) say(kind *int, name, format string, args ...any) {
	*kind++
	if v.said[name]++; v.said[name] <= saidEach {
		v.text = append(v.text, name+": "+fmt.Sprintf(format, args...))
	}
}

// violations is 0 when all that is promised held.
func (v *verdict) violations() int {
	return v.lost + v.afterRollback + v.stale + v.stuck + v.double + v.afterFinal + v.wrongEnd + v.unlogged + v.letters
}

func (v *verdict) String() string {
	return fmt.Sprintf("tasks=%d lost=%d after_rollback=%d stale=%d stuck=%d overlaps=%d double=%d after_final=%d late=%d wrong_end=%d unlogged=%d letters=%d",
		v.tasks, v.lost, v.afterRollback, v.stale, v.stuck, v.overlaps, v.double, v.afterFinal, v.late, v.wrongEnd, v.unlogged, v.letters)
}

// A file is everything about one task.
type file struct {
	row      row
	entry    *entry
	attempts []attempt
	moves    []move
	calls    []call
	final    time.Time // when it became final
}

func final(status string) bool {
	return status == "succeeded" || status == "dead" || status == "cancelled"
}

// settled reports whether an outcome was written with the row, and not about an attempt that had lost it.
func settled(outcome string) bool { return outcome != "lost" && outcome != "stale" }

func check(e evidence) *verdict {
	v := &verdict{said: make(map[string]int)}
	files, byID := make(map[int64]*file), make(map[int64]*file)
	for _, r := range e.rows {
		f := &file{row: r, entry: e.entries[r.n]}
		if f.entry == nil || f.entry.fate == rolledBack {
			v.say(&v.afterRollback, "after_rollback", "row %d (task %d) is there although its transaction was rolled back", r.id, r.n)
			continue
		}
		files[r.n], byID[r.id] = f, f
	}
	v.tasks = len(files)
	for n, x := range e.entries {
		if x.fate == committed && files[n] == nil {
			v.say(&v.lost, "lost", "task %d was committed and is not in the table", n)
		}
	}
	for _, a := range e.attempts {
		if f := byID[a.id]; f != nil {
			f.attempts = append(f.attempts, a)
		} else {
			v.say(&v.unlogged, "unlogged", "attempt of row %d, which is not there", a.id)
		}
	}
	for _, m := range e.moves {
		f := byID[m.id]
		if f == nil {
			v.say(&v.lost, "lost", "row %d has moved and is not there", m.id)
			continue
		}
		f.moves = append(f.moves, m)
		if final(m.became) && f.final.IsZero() {
			f.final = m.at
		}
	}
	for _, c := range e.calls {
		f := files[c.n]
		if f == nil || c.rollback {
			v.say(&v.afterRollback, "after_rollback", "task %d (id %d) was called at %s and is not in the table", c.n, c.id, clock(c.begin))
			continue
		}
		f.calls = append(f.calls, c)
	}
	for _, f := range files {
		slices.SortFunc(f.calls, func(a, b call) int { return a.begin.Compare(b.begin) })
		slices.SortFunc(f.attempts, func(a, b attempt) int { return a.started.Compare(b.started) })
		v.end(f, &e)
		v.fence(f)
		v.pair(f, &e)
	}
	v.deadLetters(files, byID, e.letters)
	slices.Sort(v.text)
	return v
}

// end compares how a task ended with its script.
func (v *verdict) end(f *file, e *evidence) {
	r := &f.row
	if !final(r.status) {
		v.say(&v.stuck, "stuck", "task %d (id %d) is %s, phase %s, attempt %d, generation %d: lease %t, on work list %t, message %t; last error %s",
			r.n, r.id, r.status, r.phase, r.attempt, r.generation, r.leased, r.listed, e.messages[r.id], r.lastError)
		if !r.leased && !r.listed && !e.messages[r.id] {
			v.say(&v.lost, "lost", "task %d (id %d) is %s with neither lease nor work-list entry nor message", r.n, r.id, r.status)
		}
		return
	}
	if why := f.otherEnd(); why != "" {
		v.say(&v.wrongEnd, "wrong_end", "task %d (id %d, %s) %s: is %s, reason %q, compensation %s, result %s; script %+v; attempts %s",
			r.n, r.id, r.bizType, why, r.status, r.deadReason, r.compensation, r.result, f.entry.script, f.log())
	}
}

// otherEnd says what is not as scripted. Where a task has few attempts, those that were lost with their workers may have
// taken the place of one that would have succeeded: then, and only then, the end may differ.
func (f *file) otherEnd() string {
	r, s := &f.row, &f.entry.script
	if r.bizType != s.bizType {
		return "has another type"
	}
	lost := func(compensate bool) (n int) {
		for _, a := range f.attempts {
			if a.compensate == compensate && !settled(a.outcome) {
				n++
			}
		}
		return n
	}
	if !s.fatal() {
		if r.status != "succeeded" || r.compensation != "none" {
			return "should have succeeded"
		}
		if got := strings.ReplaceAll(r.result, " ", ""); got != fmt.Sprintf(`{"n":%d}`, s.N) {
			return "has another's result"
		}
		return ""
	}
	reason := "max_attempts"
	if s.Permanent && s.Fails < s.limit() {
		reason = "permanent"
	}
	switch {
	case r.status != "dead":
		return "should be dead"
	case s.bizType == plain && r.compensation != "none":
		return "should not be compensated"
	case s.bizType == plain:
		if r.deadReason != reason && (r.deadReason != "lost" || lost(false) == 0) {
			return "should be dead for reason " + reason
		}
		return ""
	case s.undone() && r.compensation == "failed" && s.maxAttempts > 0 && lost(true) > 0:
		return ""
	case s.undone() && r.compensation != "done":
		return "should have been undone"
	case s.undone():
		if r.deadReason != reason && (r.deadReason != "lost" || lost(false) == 0) {
			return "should be dead for reason " + reason
		}
		return ""
	case r.compensation != "failed" || r.deadReason != "compensation_failed":
		return "should not have been undone"
	}
	return ""
}

// fence looks at each change of the row: only the attempt that holds its token may settle it, and a final row stays.
func (v *verdict) fence(f *file) {
	outcome := make(map[int64]string)
	for _, a := range f.attempts {
		outcome[a.token] = a.outcome
	}
	left := make(map[int64]int)
	for _, m := range f.moves {
		switch {
		case final(m.was):
			v.say(&v.stale, "stale", "task %d (id %d) was %s and became %s at %s", f.row.n, m.id, m.was, m.became, clock(m.at))
		case m.was == "running" && m.became != "running":
			left[m.wasToken]++
			o, logged := outcome[m.wasToken]
			usedUp := !logged && m.attempt > f.entry.limit()
			if !usedUp && (!logged || !settled(o)) {
				v.say(&v.stale, "stale", "task %d (id %d) went from running (attempt %d) to %s at %s under a token whose attempt is logged as %q",
					f.row.n, m.id, m.attempt, m.became, clock(m.at), o)
			}
		case m.was == "running" && m.token != m.wasToken:
			if o, logged := outcome[m.wasToken]; !logged || settled(o) {
				v.say(&v.unlogged, "unlogged", "task %d (id %d) was claimed again at %s, attempt %d is logged as %q, not lost",
					f.row.n, m.id, clock(m.at), m.attempt, o)
			}
		}
	}
	for _, a := range f.attempts {
		if want := map[bool]int{true: 1}[settled(a.outcome)]; left[a.token] != want {
			v.say(&v.stale, "stale", "task %d (id %d): attempt %d (%s) settled the row %d times, want %d",
				f.row.n, a.id, a.number, a.outcome, left[a.token], want)
		}
	}
}

// pair compares the calls with the attempt log, and with each other.
func (v *verdict) pair(f *file, e *evidence) {
	of := make([]*attempt, len(f.calls)) // the attempt of each call
	count := make(map[int64]int)         // token → calls
	for i := range f.calls {
		c := &f.calls[i]
		a := f.attemptOf(c)
		of[i] = a
		if a == nil {
			v.say(&v.unlogged, "unlogged", "task %d (id %d) was called at %s as %s attempt %d, which is not in the log: %s",
				f.row.n, f.row.id, clock(c.begin), phase(c.compensate), c.attempt, f.log())
			continue
		}
		if count[a.token]++; count[a.token] > 1 {
			v.say(&v.unlogged, "unlogged", "task %d (id %d): %s attempt %d was called %d times", f.row.n, f.row.id, phase(c.compensate), c.attempt, count[a.token])
		}
		if c.id != f.row.id || c.key != key(e.installation, c) {
			v.say(&v.unlogged, "unlogged", "task %d (id %d) was called as id %d with key %s", f.row.n, f.row.id, c.id, c.key)
		}
		if a.outcome == "succeeded" && c.status != http.StatusOK || a.outcome == "failed" && c.status == http.StatusOK {
			v.say(&v.unlogged, "unlogged", "task %d (id %d): attempt %d was answered %d and is logged as %s", f.row.n, f.row.id, c.attempt, c.status, a.outcome)
		}
		if !f.final.IsZero() && c.begin.After(f.final) {
			if !settled(a.outcome) && e.paused(a.worker, a.started, c.begin) {
				v.late++
				continue
			}
			v.say(&v.afterFinal, "after_final", "task %d (id %d) was %s at %s and called at %s: attempt %d by %s, %s",
				f.row.n, f.row.id, f.row.status, clock(f.final), clock(c.begin), c.attempt, a.worker, a.outcome)
		}
	}
	for _, a := range f.attempts {
		// A lost attempt may not have come to its call, a released one was given back, one that timed out may have slept.
		if called := a.outcome == "succeeded" || a.outcome == "failed" && a.class != "http_no_answer"; called && count[a.token] == 0 {
			v.say(&v.unlogged, "unlogged", "task %d (id %d): %s attempt %d is logged as %s and was not called",
				f.row.n, f.row.id, phase(a.compensate), a.number, a.outcome)
		}
	}
	for i := range f.calls {
		for j := i + 1; j < len(f.calls); j++ {
			first, second := &f.calls[i], &f.calls[j] // in the order they began
			if !first.end.IsZero() && !second.begin.Before(first.end) {
				continue
			}
			if of[i] != nil && !settled(of[i].outcome) {
				v.overlaps++
				continue
			}
			v.say(&v.double, "double", "task %d (id %d): call of attempt %d at %s began while attempt %d ran from %s to %s, and that one had not lost its lease: %s",
				f.row.n, f.row.id, second.attempt, clock(second.begin), first.attempt, clock(first.begin), clock(first.end), f.log())
		}
	}
}

// attemptOf finds the attempt that made a call. A number comes again only after an attempt that was not counted, so it
// is the last one of that number that had begun.
func (f *file) attemptOf(c *call) (found *attempt) {
	for i := range f.attempts {
		a := &f.attempts[i]
		if a.compensate == c.compensate && a.number == c.attempt && (found == nil || !a.started.After(c.begin)) {
			found = a
		}
	}
	return found
}

func (f *file) log() string {
	var all []string
	for _, a := range f.attempts {
		all = append(all, fmt.Sprintf("%s %d %s", phase(a.compensate), a.number, a.outcome))
	}
	return "[" + strings.Join(all, ", ") + "]"
}

func (v *verdict) deadLetters(files, byID map[int64]*file, letters map[int64]string) {
	for _, f := range files {
		body, there := letters[f.row.id]
		switch {
		case f.row.status != "dead":
		case !there || !f.row.lettered:
			v.say(&v.letters, "letters", "task %d (id %d) is dead, its letter is there: %t, and confirmed: %t", f.row.n, f.row.id, there, f.row.lettered)
		case body != f.entry.body:
			v.say(&v.letters, "letters", "letter of task %d (id %d) is %s, its payload %s", f.row.n, f.row.id, body, f.entry.body)
		}
	}
	for id := range letters {
		if f := byID[id]; f == nil || f.row.status != "dead" {
			v.say(&v.letters, "letters", "letter of id %d, which is not dead", id)
		}
	}
}

// key is what a call must carry: the same for every attempt of a phase.
func key(installation string, c *call) string {
	k := fmt.Sprintf("%s-%d", installation, c.id)
	if c.compensate {
		k += "-compensate"
	}
	return k
}

func phase(compensate bool) string {
	if compensate {
		return "compensate"
	}
	return "execute"
}

func clock(t time.Time) string { return t.UTC().Format("15:04:05.000000") }
