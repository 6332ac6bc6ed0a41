// Package faults breaks everything taskrelay runs on while it works, and then proves from the outside that nothing was
// lost: real processes, a real Postgres, a real nats-server, an HTTP target that records every call.
//
//	go test ./tests/faults                    the short form, which CI runs
//	make chaos DURATION=60s SEED=7            any length; the last line printed sums up
//
// What happens in a run:
//
//   - Producers commit tasks whose end is known beforehand (script.go), and roll others back (producer.go).
//   - Meanwhile faults come in an order that the seed decides (faults.go): processes are killed, paused and replaced,
//     servers are killed, links cut, slowed and half opened (proxy.go), streams and consumers taken away.
//   - A trigger keeps what happens to each row (watch.go), the target keeps each call (target.go).
//   - Then the faults stop, everything gets time to finish (run.go), and the checker (check.go) compares scripts, calls,
//     moves of the rows, attempt log and dead letters. Each of its rules has a test in which it is broken.
//
// A seed fixes which faults come in which order and which tasks are made, not the interleaving: that is the machine's.
package faults
