package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// Defaults of a Command.
const (
	DefaultMaxAttempts = 10
	DefaultTimeout     = 60 * time.Second
)

// Registry holds the commands of a program: the list of all that its worker may run. The zero value is empty and
// ready. Fill it before NewWorker; it is not for use by several goroutines.
type Registry struct {
	bindings map[string]*binding
}

// BizTypes returns the registered types, sorted.
func (r *Registry) BizTypes() []string { return slices.Sorted(maps.Keys(r.bindings)) }

// binding is a Command without its type parameter, with its defaults filled in.
type binding struct {
	bizType     string
	execute     func(ctx context.Context, a *attempt) (json.RawMessage, error)
	compensate  func(ctx context.Context, a *attempt, cause error) error // nil: this command has none
	retry       retry.Policy
	typePolicy  atomic.Pointer[retry.Policy] // of biz_type; wins
	maxAttempts int
	timeout     time.Duration
	concurrency int // 0: the worker's
	rate        float64
	priority    string
	notifier    string
	title       string
	runbookURL  string
}

// Register adds the command of a type. It is an error to register a type twice, to give it a name that is no biz
// type, to leave Execute out, or to give a setting that is out of range.
func Register[P any](r *Registry, bizType string, c Command[P]) error {
	b := &binding{
		bizType:     bizType,
		retry:       c.Retry,
		maxAttempts: cmp.Or(c.MaxAttempts, DefaultMaxAttempts),
		timeout:     cmp.Or(c.Timeout, DefaultTimeout),
		concurrency: c.Concurrency,
		rate:        c.Rate,
		priority:    c.Priority,
		notifier:    c.Notifier,
		title:       c.Title,
		runbookURL:  c.RunbookURL,
	}
	if b.retry == nil {
		b.retry = defaultPolicy
	}
	if err := b.validate(c.Execute != nil); err != nil {
		return fmt.Errorf("register %q: %w", bizType, err)
	}
	if _, ok := r.bindings[bizType]; ok {
		return fmt.Errorf("register %q: this biz type has a command already", bizType)
	}
	b.execute = func(ctx context.Context, a *attempt) (json.RawMessage, error) {
		t, err := newTask[P](a)
		if err != nil {
			return nil, err
		}
		result, err := c.Execute(ctx, t)
		if err != nil {
			return nil, err
		}
		return encodeResult(result)
	}
	if c.Compensate != nil {
		b.compensate = func(ctx context.Context, a *attempt, cause error) error {
			t, err := newTask[P](a)
			if err != nil {
				return err
			}
			return c.Compensate(ctx, t, cause)
		}
	}
	if r.bindings == nil {
		r.bindings = make(map[string]*binding)
	}
	r.bindings[bizType] = b
	return nil
}

// defaultPolicy is what a Command without Retry gets.
var defaultPolicy retry.Policy = retry.Exponential{Base: 5 * time.Second, Max: time.Hour, Jitter: 0.2}

func (b *binding) validate(hasExecute bool) error {
	if outbox.ValidateBizType(b.bizType) != nil {
		return errors.New("no biz type: it must match ^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")
	}
	switch {
	case !hasExecute:
		return errors.New("Execute is required")
	case b.maxAttempts < 1 || b.maxAttempts > 1000:
		return fmt.Errorf("MaxAttempts is %d, must be 1 to 1000", b.maxAttempts)
	case b.timeout < 0:
		return fmt.Errorf("Timeout is %v, must be positive", b.timeout)
	case b.concurrency < 0 || b.concurrency > maxConcurrency:
		return fmt.Errorf("Concurrency is %d, must be 1 to %d", b.concurrency, maxConcurrency)
	case b.rate < 0 || math.IsNaN(b.rate) || math.IsInf(b.rate, 0):
		return fmt.Errorf("Rate is %v, must be a positive number of starts per second", b.rate)
	case b.priority != "" && b.priority != outbox.PriorityHigh && b.priority != outbox.PriorityLow:
		return fmt.Errorf("Priority is %q, must be %q or %q", b.priority, outbox.PriorityHigh, outbox.PriorityLow)
	}
	return nil
}

// newTask decodes the payload of an attempt. An error is of class decode: trying again does not help.
func newTask[P any](a *attempt) (*Task[P], error) {
	t := &Task[P]{
		ID: a.id, BizType: a.lane.bizType, BizID: a.bizID, Priority: a.lane.priority, Phase: a.phase,
		Attempt: a.number, MaxAttempts: a.limit, Generation: a.generation,
		CreatedAt: time.UnixMicro(a.createdMicros), Header: rowHeaders(a.msg.Header), Raw: a.msg.Data,
		attempt: a,
	}
	switch p := any(&t.Payload).(type) {
	case *json.RawMessage:
		*p = a.msg.Data
	case *[]byte:
		*p = a.msg.Data
	default:
		if err := json.Unmarshal(a.msg.Data, &t.Payload); err != nil {
			return nil, &classError{class: classDecode, err: fmt.Errorf("decode payload: %w", err)}
		}
	}
	return t, nil
}

// maxResult is what Postgres certainly takes, in a batch and with its neighbours in memory.
const maxResult = 64 << 20

// encodeResult makes the JSON to store. Bytes are JSON as they are; Postgres checks them when they are stored.
func encodeResult(result any) (b json.RawMessage, err error) {
	switch r := result.(type) {
	case nil:
		return nil, nil
	case json.RawMessage:
		b = r
	case []byte:
		b = r
	default:
		if b, err = json.Marshal(result); err != nil {
			return nil, &classError{class: classResult, err: fmt.Errorf("encode result: %w", err)}
		}
	}
	if len(b) > maxResult {
		return nil, &classError{class: classResult, err: fmt.Errorf("result is %d bytes, at most %d can be stored: store it elsewhere and return a reference",
			len(b), maxResult)}
	}
	return b, nil
}
