package retry_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

func TestMarkedErrorsStayThemselves(t *testing.T) {
	cause := &fs.PathError{Op: "open", Path: "ledger", Err: io.ErrUnexpectedEOF}
	for name, err := range map[string]error{
		"permanent":         retry.Permanent(cause),
		"after":             retry.After(time.Second, cause),
		"permanent, deeper": fmt.Errorf("book payment: %w", retry.Permanent(cause)),
		"joined":            errors.Join(io.EOF, retry.After(time.Second, cause)),
	} {
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: errors.Is does not see the cause", name)
		}
		var pe *fs.PathError
		if !errors.As(err, &pe) || pe != cause {
			t.Errorf("%s: errors.As does not see the cause", name)
		}
	}
	if got, want := retry.Permanent(cause).Error(), cause.Error(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if errors.Unwrap(retry.Permanent(cause)) != error(cause) || errors.Unwrap(retry.After(0, cause)) != error(cause) {
		t.Error("errors.Unwrap does not give the cause")
	}
}

func TestIsPermanent(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{io.EOF, false},
		{retry.After(time.Second, io.EOF), false},
		{retry.Permanent(io.EOF), true},
		{fmt.Errorf("charge card: %w", retry.Permanent(io.EOF)), true},
		{retry.After(time.Second, retry.Permanent(io.EOF)), true},
		{errors.Join(io.EOF, retry.Permanent(io.EOF)), true},
	} {
		if got := retry.IsPermanent(c.err); got != c.want {
			t.Errorf("%v: got %v, want %v", c.err, got, c.want)
		}
	}
}

func TestAfterDelay(t *testing.T) {
	for _, c := range []struct {
		err   error
		want  time.Duration
		found bool
	}{
		{nil, 0, false},
		{io.EOF, 0, false},
		{retry.After(7*time.Second, io.EOF), 7 * time.Second, true},
		{retry.After(-time.Second, io.EOF), 0, true},
		{fmt.Errorf("call bank: %w", retry.After(time.Minute, io.EOF)), time.Minute, true},
		{retry.After(time.Minute, retry.After(time.Second, io.EOF)), time.Minute, true},
	} {
		got, found := retry.AfterDelay(c.err)
		if got != c.want || found != c.found {
			t.Errorf("%v: got %v %v, want %v %v", c.err, got, found, c.want, c.found)
		}
	}
}

func TestNoErrorStaysNoError(t *testing.T) {
	if err := retry.Permanent(nil); err != nil {
		t.Errorf("Permanent(nil) = %v", err)
	}
	if err := retry.After(time.Second, nil); err != nil {
		t.Errorf("After(d, nil) = %v", err)
	}
}
