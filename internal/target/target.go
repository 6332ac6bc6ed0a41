// Package target makes the commands of the stock worker: what runs a task is an HTTP endpoint, a NATS service, a log
// line or nothing.
//
// Properties:
//   - A target comes from configuration only. Nothing in a row chooses it or changes where a request goes.
//   - The body is the payload byte for byte; all else is headers, the same for HTTP and NATS.
//   - One attempt is one call: no redirect, no proxy, no silent repetition by the HTTP client.
//   - What an endpoint answers is read up to a cap and cleaned before it is kept.
//   - Payloads, secrets, user information and queries of addresses are in no log line and no error.
package target

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/webhook"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// Maker makes commands that share one HTTP client and one NATS connection.
type Maker struct {
	client client
	nc     *nats.Conn
	logger zerolog.Logger
}

// NewMaker returns a Maker. concurrency is how many requests run at once, over all types: so many idle connections
// to a host are kept. nc may be nil where no type has a nats:// target.
func NewMaker(nc *nats.Conn, concurrency int, logger zerolog.Logger) *Maker {
	return &Maker{client: newClient(concurrency), nc: nc, logger: logger}
}

// Command makes the command of one biz type.
func (m *Maker) Command(t config.BizType) (command.Command[json.RawMessage], error) {
	c := command.Command[json.RawMessage]{
		Retry: t.Retry, MaxAttempts: t.MaxAttempts, Timeout: t.Timeout, Concurrency: t.Concurrency, Rate: t.Rate,
		Priority: t.Priority, Notifier: t.Notifier,
	}
	key, err := webhook.Key(string(t.Secret))
	if err != nil {
		return c, fmt.Errorf("secret of %s: %w", t.Name, err)
	}
	execute, err := m.target(t.Target, key)
	if err != nil {
		return c, fmt.Errorf("target of %s: %w", t.Name, err)
	}
	c.Execute = func(ctx context.Context, task *command.Task[json.RawMessage]) (any, error) {
		result, err := execute(ctx, newCall(task, nil))
		if err != nil {
			return nil, pace(t.Retry, task.Attempt, err)
		}
		if result == nil {
			return nil, nil
		}
		return result, nil
	}
	if t.Compensate == "" {
		return c, nil
	}
	compensate, err := m.target(t.Compensate, key)
	if err != nil {
		return c, fmt.Errorf("compensate of %s: %w", t.Name, err)
	}
	c.Compensate = func(ctx context.Context, task *command.Task[json.RawMessage], cause error) error {
		_, err := compensate(ctx, newCall(task, cause))
		return pace(t.Retry, task.Attempt, err)
	}
	return c, nil
}

// do performs a call. The result is JSON or nil.
type do func(ctx context.Context, c call) (json.RawMessage, error)

func (m *Maker) target(target config.URL, key []byte) (do, error) {
	s := string(target)
	switch scheme, rest, _ := strings.Cut(s, ":"); scheme {
	case "http", "https":
		return m.client.target(s, key)
	case "nats":
		if m.nc == nil {
			return nil, fmt.Errorf("%s needs a NATS connection", target)
		}
		return natsTarget(m.nc, strings.TrimPrefix(rest, "//"), key), nil
	case "log":
		return m.log, nil
	case "noop":
		return func(context.Context, call) (json.RawMessage, error) { return nil, nil }, nil
	}
	return nil, fmt.Errorf("unknown kind %s: expected http, https, nats, log or noop", target)
}

// log says that a task came by. Its payload may hold secrets, so only the size is shown.
func (m *Maker) log(_ context.Context, c call) (json.RawMessage, error) {
	e := m.logger.Info().Int64("task_id", c.id).Str("biz_type", c.bizType).Int("attempt", c.attempt).Str("phase", c.phase).
		Int("bytes", len(c.body))
	if c.cause != "" {
		e = e.Str("cause", c.cause)
	}
	e.Msg("task received by target log:")
	return nil, nil
}

// pace honours the pause that a target asked for. It lengthens the policy's delay and never shortens it: an endpoint
// that always says "0 seconds" must not turn the attempts into a loop.
func pace(policy retry.Policy, attempt int, err error) error {
	asked, ok := retry.AfterDelay(err)
	if !ok || retry.IsPermanent(err) {
		return err
	}
	return retry.After(max(min(asked, maxRetryAfter), policy.Delay(attempt)), err)
}
