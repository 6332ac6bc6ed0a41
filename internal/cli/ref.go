package cli

import (
	"bufio"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// ref is how a person names a task: its id, or TYPE/BIZ_ID.
type ref struct {
	id             int64
	bizType, bizID string
}

func parseRef(s string) (ref, error) {
	if bizType, bizID, ok := strings.Cut(s, "/"); ok {
		if bizType == "" || bizID == "" {
			return ref{}, usage("%q: expected TYPE/BIZ_ID, such as ORDER_PAYMENT/O-1", s)
		}
		return ref{bizType: bizType, bizID: bizID}, nil
	}
	id, err := strconv.ParseInt(s, 10, 64)
	if err != nil || id <= 0 {
		return ref{}, usage("%q: expected a task's id, or TYPE/BIZ_ID", s)
	}
	return ref{id: id}, nil
}

// refs parses arguments. A single "-" stands for what stdin has, one a line.
func (a *app) refs(argv []string) ([]ref, error) {
	if len(argv) == 1 && argv[0] == "-" {
		argv = nil
		lines := bufio.NewScanner(a.in)
		for lines.Scan() {
			if s := strings.TrimSpace(lines.Text()); s != "" {
				argv = append(argv, s)
			}
		}
		if err := lines.Err(); err != nil {
			return nil, fmt.Errorf("read ids from stdin: %w", err)
		}
		if len(argv) == 0 {
			return nil, usage("no ids on stdin")
		}
	}
	refs := make([]ref, 0, len(argv))
	for _, s := range argv {
		r, err := parseRef(s)
		if err != nil {
			return nil, err
		}
		refs = append(refs, r)
	}
	return refs, nil
}

// ids looks up the tasks that are named by their business id.
func (s *session) ids(ctx context.Context, refs []ref) ([]int64, error) {
	ids := make([]int64, 0, len(refs))
	for _, r := range refs {
		if r.id != 0 {
			ids = append(ids, r.id)
			continue
		}
		found, err := s.schema.List(ctx, s.pool, outbox.Filter{BizType: r.bizType, BizID: r.bizID, Limit: 1})
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("%w: %s/%s", outbox.ErrNotFound, r.bizType, r.bizID)
		}
		ids = append(ids, found[0].ID)
	}
	return ids, nil
}
