// Package command runs the tasks of the types a program has registered a command for.
//
// Properties:
//   - Delivery is at least once. A task runs again when its worker died, was paused or lost its database for longer
//     than the lease; Task.Key is the same each time, so hand it downstream as the idempotency key.
//   - A task is claimed in its row before its handler is called, and every write-back is fenced by the random token
//     of that claim: a worker that comes back late overwrites nothing and acknowledges nothing.
//   - Two calls of one task never overlap unless a lease ended, or a handler ignored its timeout for one more lease.
//   - Slots belong to a type: a slow, failing or panicking type takes nothing from its neighbours.
//   - Tasks of one type run in no particular order.
//   - Whatever ends an attempt (success, error, panic, timeout, a lost worker) is a row of task_attempt.
//
// Use: fill a Registry with Register, then run one Worker per process.
//
//	var reg command.Registry
//	err := command.Register(&reg, "ORDER_PAYMENT", command.Command[Payment]{Execute: pay})
//	w, err := command.NewWorker(pool, nc, &reg, command.WorkerConfig{})
//	err = w.Run(ctx) // until ctx is cancelled
package command
