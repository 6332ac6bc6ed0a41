package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Exit codes. They are part of the interface: scripts branch on them.
const (
	exitOK        = 0
	exitFailed    = 1
	exitUsage     = 2 // wrong command line or environment, or a confirmation is missing
	exitNotFound  = 3
	exitRefused   = 4 // by the task's state; nothing changed
	exitPartly    = 5 // some tasks changed, others did not
	exitUnhealthy = 6
	exitConnect   = 7   // Postgres or NATS cannot be reached
	exitInterrupt = 130 // Ctrl-C
)

const exitHelp = `Exit codes: 0 done, 1 error, 2 wrong usage or missing confirmation, 3 not found, 4 refused by the task's state,
5 partly done, 6 unhealthy, 7 cannot connect, 130 interrupted.`

// exitError is an error that says how the process ends. A nil err ends it silently.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func usage(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	if e, ok := errors.AsType[*exitError](err); ok {
		return e.code
	}
	if _, ok := errors.AsType[*config.Error](err); ok {
		return exitUsage
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return exitConnect
	}
	switch {
	case errors.Is(err, outbox.ErrNotFound):
		return exitNotFound
	case errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrAuthorization):
		return exitConnect
	case errors.Is(err, context.Canceled):
		return exitInterrupt
	}
	return exitFailed
}
