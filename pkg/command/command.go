package command

import (
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

// The phases of a task. Compensation is the same life once more, with attempts counted anew.
const (
	PhaseExecute    = "execute"
	PhaseCompensate = "compensate"
)

// Command is what a program does for the tasks of one type. P is the type of the payload: anything that
// encoding/json decodes into; json.RawMessage and []byte get the bytes as they were written.
type Command[P any] struct {
	// Execute does the work. Required. It may be called again with the same Task.Key after a failure or a crash.
	//
	// nil ends the task as succeeded and stores result as JSON (nil stores none; json.RawMessage and []byte are
	// taken as JSON already). An error is retried by Retry until MaxAttempts; see retry.Permanent, retry.After,
	// Snooze and Cancel for the other outcomes. A panic is a failed attempt.
	//
	// ctx ends at Timeout, at the end of the worker's grace, when an operator cancels the task (context.Cause:
	// ErrCancelled) and when the lease is lost (ErrLeaseLost). A panic in a goroutine that the handler started
	// ends the process: Go lets nobody else recover it.
	Execute func(ctx context.Context, t *Task[P]) (result any, err error)

	// Compensate undoes what Execute may have done, once Execute is over without success: attempts used up, or
	// retry.Permanent. Optional. It runs as a phase of its own with its own attempts and its own Task.Key; cause is
	// the error that ended Execute. However it ends, the task is dead afterwards.
	Compensate func(ctx context.Context, t *Task[P], cause error) error

	// Retry says how long to wait after a failed attempt. By default exponential from 5 s to 1 h, jitter 0.2.
	Retry retry.Policy

	// MaxAttempts counts the first one too. By default 10. The row's and then biz_type's max_attempts go before it.
	MaxAttempts int

	// Timeout of one attempt. By default 60 s. A handler that ignores its context keeps its slot for one more
	// lease; then the task goes on without it.
	Timeout time.Duration

	// Concurrency is how many handlers of this type run at once in this worker. By default WorkerConfig.Concurrency.
	Concurrency int

	// Rate limits the starts per second in this worker. By default 0: no limit.
	Rate float64

	// Priority is the priority that taskrelay.enqueue() gives a task of this type when none is named: "low" or
	// "high". Written to biz_type where nothing is set. Optional.
	Priority string

	// Notifier names who is told of dead tasks of this type. Written to biz_type where nothing is set. Optional.
	Notifier string

	// Title and RunbookURL help the person who looks at a dead task. Written to biz_type where nothing is set. Optional.
	Title      string
	RunbookURL string
}

// Task is one attempt at a task, as its handler sees it.
type Task[P any] struct {
	ID          int64
	BizType     string
	BizID       string // "" when the row has none
	Priority    string // "high" or "low"
	Phase       string // PhaseExecute or PhaseCompensate
	Attempt     int    // of this phase, from 1
	MaxAttempts int    // the limit that holds for this attempt
	Generation  int
	CreatedAt   time.Time

	// Header holds the row's headers, such as traceparent. nil when it has none.
	Header map[string]string

	// Payload is the decoded payload, Raw its bytes as the producer wrote them.
	Payload P
	Raw     json.RawMessage

	attempt *attempt // nil for a Task that no worker made
}

// Key is the idempotency key to hand downstream: <installation>-<id>, the same for every attempt of a phase.
// Compensation has its own, <installation>-<id>-compensate, and after a requeue past n done compensations both end
// in -r<n>: a provider must not answer a new payment with the stored answer of the one that was undone.
func (t *Task[P]) Key() string {
	if t.attempt == nil {
		return ""
	}
	return t.attempt.key
}

func taskKey(installation string, id int64, phase string, compensations int) string {
	b := make([]byte, 0, len(installation)+40)
	b = append(b, installation...)
	b = append(b, '-')
	b = strconv.AppendInt(b, id, 10)
	if phase == PhaseCompensate {
		b = append(b, "-compensate"...)
	}
	if compensations > 0 {
		b = append(b, "-r"...)
		b = strconv.AppendInt(b, int64(compensations), 10)
	}
	return string(b)
}
