// Package model is a small machine that behaves like taskrelay's protocol and dies at every step.
//
// It has rows, transactions, a stream, relays and workers, and takes one step at a time, chosen by chance from all that
// could come next. A step is what is atomic in the real thing: one SQL statement, one message to or from the stream, one
// decision in memory. Between any two of them a process may crash or sleep longer than its leases, an answer may get
// lost, Postgres may crash or fail over to a standby that lags, the stream may restart, lose its end, be deleted or be
// put back to an older copy. Then all faults stop, and everything that was committed must finish.
//
// What it checks is section 7 of the design:
//
//   - a committed task is finished by a schedule without faults, from any state that faults can leave behind;
//   - no call of a task that was rolled back or is gone, none after a final state, none before its time;
//   - two calls of a task at once only where the lease of the first had ended;
//   - what comes late (a settle, the confirmation of a look) changes nothing;
//   - a message from before a decision causes no call;
//   - each call is in the attempt log, and each attempt logged was a call or is "lost";
//   - each dead task has the letter of its own death.
//
// There are two kinds of runs. In the quiet kind nothing takes messages away from the stream, and reconciling is off: a
// lease, a message or an entry of the work list must be enough. In the other kind everything happens, and reconciling
// runs.
//
// A run is a list of steps, so a run that went wrong is made shorter by leaving steps out as long as it still goes wrong.
// TestEachGuardIsMissed takes the guards of the protocol out of the machine, one after another, and fails when the
// machine does not notice.
//
// The names are those of the code: claimSQL is database.claim, and so on. Left out: several lanes (there is one), full
// and paused lanes, row locks (each statement waits or skips in the real thing, which is a step that comes later here),
// handlers that outlive their timeout, a process that freezes between the check of its lease and the call that follows
// it at once.
package model
