package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/taskrelay/taskrelay/internal/natscli"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// enqueueOne writes one task in a transaction of its own. When the answer to its commit is lost, nobody knows whether the
// task is there; its id is known, and ids are not given twice, so that can be found out.
func (s *session) enqueueOne(ctx context.Context, bizType, bizID string, payload json.RawMessage, opts []outbox.Option) (ref outbox.Ref, err error) {
	if err := (outbox.NewTask{BizType: bizType, Payload: payload, Options: opts}).Validate(); err != nil {
		return ref, &exitError{exitUsage, err}
	}
	tx, err := s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return ref, fmt.Errorf("nothing was written: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // nothing to undo once it is committed
	ref, err = s.schema.Enqueue(ctx, tx, bizType, payload, opts...)
	switch {
	case errors.Is(err, outbox.ErrUnknownType):
		return ref, &exitError{exitRefused, err}
	case refused(err):
		return ref, &exitError{exitUsage, err}
	case err != nil:
		return ref, fmt.Errorf("nothing was written: %w", err)
	}
	err = tx.Commit(ctx)
	switch {
	case err == nil, !ref.New: // what was there before is there whatever became of this
		return ref, nil
	case notCommitted(err):
		return ref, fmt.Errorf("nothing was written: %w", err)
	}
	return ref, &unknownOutcomeError{id: ref.ID, bizType: bizType, bizID: bizID, err: err}
}

// notCommitted reports whether a failed commit has certainly come to nothing: the server has said so and lives on. What it
// says as it ends the session may come after the commit.
func notCommitted(err error) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return ok && e.SeverityUnlocalized == "ERROR" || errors.Is(err, pgx.ErrTxCommitRollback)
}

// An unknownOutcomeError is a commit whose answer did not come.
type unknownOutcomeError struct {
	id             int64
	bizType, bizID string
	err            error
}

func (e *unknownOutcomeError) Error() string {
	show, again := strconv.FormatInt(e.id, 10), "before you write it again, for there would be two"
	if e.bizID != "" {
		show, again = e.bizType+"/"+e.bizID, "or write it again: with the same --biz-id it is made once"
	}
	return fmt.Sprintf("the answer to the commit did not come (%v), task %d may be written or not: %s tells (exit code 3: it is not there), %s",
		e.err, e.id, natscli.Line([]string{"taskrelay", "show", show}), again)
}

func (e *unknownOutcomeError) Unwrap() error { return e.err }
