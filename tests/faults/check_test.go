package faults

import (
	"testing"
	"time"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(ms int) time.Time { return epoch.Add(time.Duration(ms) * time.Millisecond) }

// sound is a history with nothing wrong: task 1 fails once and succeeds, task 2 loses an attempt with its worker, dies and
// is undone, task 3 was rolled back.
func sound() evidence {
	one := script{N: 1, bizType: plain, Fails: 1}
	two := script{N: 2, bizType: undoable, Permanent: true}
	three := script{N: 3, bizType: plain, Rollback: true}
	e := evidence{installation: "i", paused: func(worker string, _, _ time.Time) bool { return worker == "paused" }}
	e.entries = map[int64]*entry{
		1: {script: one, body: one.payload(), fate: committed},
		2: {script: two, body: two.payload(), fate: committed},
		3: {script: three, body: three.payload(), fate: rolledBack},
	}
	e.rows = []row{
		{id: 11, n: 1, bizType: plain, status: "succeeded", phase: "execute", compensation: "none", result: `{"n": 1}`},
		{id: 12, n: 2, bizType: undoable, status: "dead", phase: "compensate", compensation: "done", deadReason: "permanent", lettered: true},
	}
	e.attempts = []attempt{
		{id: 11, token: 101, number: 1, outcome: "failed", started: at(0)},
		{id: 11, token: 102, number: 2, outcome: "succeeded", started: at(200)},
		{id: 12, token: 201, number: 1, outcome: "lost", worker: "killed", started: at(0)},
		{id: 12, token: 202, number: 2, outcome: "failed", started: at(3000)},
		{id: 12, token: 203, number: 1, compensate: true, outcome: "succeeded", started: at(3100)},
	}
	e.moves = []move{
		{at: at(1), id: 11, was: "pending", became: "running", token: 101},
		{at: at(10), id: 11, was: "running", became: "retrying", wasToken: 101, attempt: 1},
		{at: at(201), id: 11, was: "retrying", became: "running", token: 102, attempt: 1},
		{at: at(210), id: 11, was: "running", became: "succeeded", wasToken: 102, attempt: 2},
		{at: at(1), id: 12, was: "pending", became: "running", token: 201},
		{at: at(3001), id: 12, was: "running", became: "running", wasToken: 201, token: 202, attempt: 1},
		{at: at(3010), id: 12, was: "running", became: "pending", wasToken: 202, attempt: 2},
		{at: at(3101), id: 12, was: "pending", became: "running", token: 203, compensate: true},
		{at: at(3110), id: 12, was: "running", became: "dead", wasToken: 203, attempt: 1, compensate: true},
	}
	e.calls = []call{
		{n: 1, id: 11, attempt: 1, key: "i-11", begin: at(2), end: at(9), status: 500},
		{n: 1, id: 11, attempt: 2, key: "i-11", begin: at(202), end: at(209), status: 200},
		{n: 2, id: 12, attempt: 1, key: "i-12", begin: at(2), end: at(3005), status: 422},
		{n: 2, id: 12, attempt: 2, key: "i-12", begin: at(3002), end: at(3009), status: 422},
		{n: 2, id: 12, attempt: 1, compensate: true, key: "i-12-compensate", begin: at(3102), end: at(3109), status: 200},
	}
	e.letters = map[int64]string{12: two.payload()}
	return e
}

func TestCheckerAcceptsASoundHistory(t *testing.T) {
	v := check(sound())
	if v.violations() != 0 || v.tasks != 2 || v.overlaps != 1 {
		t.Errorf("got %v, want 2 tasks, 1 overlap and nothing else: %q", v, v.text)
	}
}

// Every rule of the checker, broken once: a checker that cannot fail proves nothing.
func TestCheckerSeesEachViolation(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(*evidence)
		count func(*verdict) int
	}{
		"committed row is missing": {func(e *evidence) {
			e.rows, e.attempts, e.moves, e.calls = e.rows[1:], e.attempts[2:], e.moves[4:], e.calls[2:]
		}, func(v *verdict) int { return v.lost }},
		"unfinished, and nothing will come": {func(e *evidence) { e.rows[0].status = "retrying" }, func(v *verdict) int { return v.lost }},
		"unfinished, on the work list": {func(e *evidence) {
			e.rows[0].status, e.rows[0].listed = "retrying", true
		}, func(v *verdict) int { return v.stuck }},
		"rolled back and called": {func(e *evidence) {
			e.calls = append(e.calls, call{n: 3, id: 13, rollback: true, attempt: 1, begin: at(5), end: at(6)})
		}, func(v *verdict) int { return v.afterRollback }},
		"call of no task": {func(e *evidence) {
			e.calls = append(e.calls, call{id: 14, attempt: 1, begin: at(5), end: at(6)})
		}, func(v *verdict) int { return v.afterRollback }},
		"rolled back and in the table": {func(e *evidence) {
			e.rows = append(e.rows, row{id: 13, n: 3, bizType: plain, status: "succeeded"})
		}, func(v *verdict) int { return v.afterRollback }},
		"final row changed": {func(e *evidence) {
			e.moves = append(e.moves, move{at: at(4000), id: 11, was: "succeeded", became: "retrying"})
		}, func(v *verdict) int { return v.stale }},
		"settled by the lost attempt": {func(e *evidence) {
			e.moves[6].wasToken = 201
		}, func(v *verdict) int { return v.stale }},
		"settled under another's token": {func(e *evidence) {
			e.attempts[2].outcome = "failed" // the attempt that had lost the row says that it settled it
		}, func(v *verdict) int { return v.stale }},
		"two at once under a living lease": {func(e *evidence) {
			e.calls[1].begin = at(5)
			e.attempts[1].started = at(4)
		}, func(v *verdict) int { return v.double }},
		"call after the end": {func(e *evidence) {
			e.calls[1].begin, e.calls[1].end = at(300), at(301)
		}, func(v *verdict) int { return v.afterFinal }},
		"lost call after the end, by a worker that was never paused": {func(e *evidence) {
			e.calls[2].begin, e.calls[2].end = at(3200), at(3201)
		}, func(v *verdict) int { return v.afterFinal }},
		"scripted to succeed, dead": {func(e *evidence) {
			e.rows[0].status, e.letters[11] = "dead", e.entries[1].body
			e.rows[0].lettered = true
		}, func(v *verdict) int { return v.wrongEnd }},
		"another's result": {func(e *evidence) { e.rows[0].result = `{"n": 2}` }, func(v *verdict) int { return v.wrongEnd }},
		"not undone":       {func(e *evidence) { e.rows[1].compensation = "failed" }, func(v *verdict) int { return v.wrongEnd }},
		"another reason":   {func(e *evidence) { e.rows[1].deadReason = "max_attempts" }, func(v *verdict) int { return v.wrongEnd }},
		"call without an attempt": {func(e *evidence) {
			e.calls = append(e.calls, call{n: 1, id: 11, attempt: 3, key: "i-11", begin: at(205), end: at(206), status: 200})
		}, func(v *verdict) int { return v.unlogged }},
		"attempt without a call": {func(e *evidence) { e.calls = e.calls[1:] }, func(v *verdict) int { return v.unlogged }},
		"one attempt, two calls": {func(e *evidence) {
			e.calls = append(e.calls, call{n: 1, id: 11, attempt: 1, key: "i-11", begin: at(9), end: at(10), status: 500})
		}, func(v *verdict) int { return v.unlogged }},
		"another key":              {func(e *evidence) { e.calls[4].key = "i-12" }, func(v *verdict) int { return v.unlogged }},
		"logged as what it wasn't": {func(e *evidence) { e.calls[1].status = 500 }, func(v *verdict) int { return v.unlogged }},
		"claimed again, not logged as lost": {func(e *evidence) {
			e.moves[5].wasToken = 999
		}, func(v *verdict) int { return v.unlogged }},
		"letter is missing":  {func(e *evidence) { delete(e.letters, 12) }, func(v *verdict) int { return v.letters }},
		"letter too many":    {func(e *evidence) { e.letters[11] = e.entries[1].body }, func(v *verdict) int { return v.letters }},
		"letter not marked":  {func(e *evidence) { e.rows[1].lettered = false }, func(v *verdict) int { return v.letters }},
		"letter is not that": {func(e *evidence) { e.letters[12] += " " }, func(v *verdict) int { return v.letters }},
	} {
		t.Run(name, func(t *testing.T) {
			e := sound()
			c.spoil(&e)
			v := check(e)
			if c.count(v) == 0 || v.violations() == 0 {
				t.Errorf("not seen: %v %q", v, v.text)
			}
		})
	}
}

// What may differ: the process slept between its last look at the lease and the call; lost attempts took the place of
// the one that would have succeeded.
func TestCheckerAcceptsWhatNobodyCanHelp(t *testing.T) {
	e := sound()
	e.attempts[2].worker = "paused"
	e.calls[2].begin, e.calls[2].end = at(3200), at(3201)
	if v := check(e); v.violations() != 0 || v.late != 1 {
		t.Errorf("late call of a paused process: %v %q", v, v.text)
	}

	e = sound()
	e.entries[2].script = script{N: 2, bizType: undoable, maxAttempts: 1, Fails: 1}
	e.rows[1].compensation, e.rows[1].deadReason = "failed", "compensation_failed"
	e.attempts[4].outcome = "lost"
	e.moves[8] = move{at: at(5000), id: 12, was: "running", became: "running", wasToken: 203, token: 204, attempt: 1, compensate: true}
	e.moves = append(e.moves, move{at: at(5001), id: 12, was: "running", became: "dead", wasToken: 204, attempt: 2, compensate: true})
	if v := check(e); v.violations() != 0 {
		t.Errorf("attempts lost until they were used up: %v %q", v, v.text)
	}
}
