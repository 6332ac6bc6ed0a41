package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

func (a *app) enqueueCommand() *cobra.Command {
	var (
		payload, bizID, at string
		in                 time.Duration
		high, low          bool
		maxAttempts        int
		headers            []string
		from               string
		skip               int64
		stop               bool
	)
	c := &cobra.Command{
		Use:   "enqueue TYPE | enqueue [TYPE] --from FILE",
		Short: "Write a task, or many from a file",
		Long: `enqueue writes a task in a transaction of its own. With --biz-id a task is made once: when there is one already, its
id is printed, nothing changes, and the exit code is 0. When the connection is lost at the commit, nobody knows whether the
task is there: the exit code is 1, and what is printed says how to find out.

With --from it writes one task per line of JSON, a thousand in a transaction: {"biz_type": "ORDER_PAYMENT", "biz_id": "O-1",
"payload": {…}}, and if wanted priority (high or low), run_at (RFC 3339) or delay (5m), max_attempts and headers. Other
names are refused. TYPE is for lines without biz_type. A bad line is named with its number and passed over (exit code 5),
or ends it with --stop-on-error. When it was cut off, send the file again: tasks that are there are counted as duplicates.
Lines without biz_id would be made twice: go on with --skip, the number is printed.`,
		Example: `  taskrelay enqueue ORDER_PAYMENT --biz-id O-1 --payload '{"amount": 12345678901234567890.10}'
  taskrelay enqueue REFUND_CARD --payload @refund.json --high --in 5m
  generate | taskrelay enqueue REPORT --payload - --at 2026-12-01T09:00:00Z --header tenant=acme
  taskrelay enqueue --from tasks.jsonl
  psql -Atc 'SELECT json_build_object(...) FROM orders' | taskrelay enqueue ORDER_PAYMENT --from - -o jsonl > done.jsonl`,
		Args: args(cobra.RangeArgs(0, 1)),
		RunE: func(c *cobra.Command, argv []string) error {
			p, err := a.printer()
			if err != nil {
				return err
			}
			if from != "" {
				return a.enqueueMany(c, p, argv, from, skip, stop)
			}
			if len(argv) == 0 || skip != 0 || stop {
				return usage("expected the biz type of one task, or --from FILE for many (%s --help)", c.CommandPath())
			}
			if c.Flags().Changed("in") && c.Flags().Changed("at") {
				return usage("--in and --at: give one of them")
			}
			if high && low {
				return usage("--high and --low: give one of them")
			}
			body, err := a.payload(payload)
			if err != nil {
				return err
			}
			var opts []outbox.Option
			if c.Flags().Changed("biz-id") {
				opts = append(opts, outbox.BizID(bizID))
			}
			if high {
				opts = append(opts, outbox.High())
			}
			if low {
				opts = append(opts, outbox.Low())
			}
			if c.Flags().Changed("in") {
				opts = append(opts, outbox.In(in))
			}
			if c.Flags().Changed("at") {
				t, err := time.Parse(time.RFC3339, at)
				if err != nil {
					return usage("--at %q: expected a time such as 2026-12-01T09:00:00Z or 2026-12-01T17:00:00+08:00", at)
				}
				opts = append(opts, outbox.At(t))
			}
			if c.Flags().Changed("max-attempts") {
				opts = append(opts, outbox.MaxAttempts(maxAttempts))
			}
			for _, h := range headers {
				k, v, ok := strings.Cut(h, "=")
				if !ok {
					return usage("--header %q: expected name=value", h)
				}
				opts = append(opts, outbox.Header(k, v))
			}

			ctx, cancel := a.limit(c, a.timeout)
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return err
			}
			defer s.close()
			ref, err := s.enqueueOne(ctx, argv[0], bizID, body, opts)
			if unknown, ok := errors.AsType[*unknownOutcomeError](err); ok && c.Context().Err() != nil {
				fmt.Fprintln(a.err, "taskrelay:", unknown) // of an interrupt nothing else is said
			}
			if err != nil {
				return err
			}
			if !ref.New {
				fmt.Fprintf(a.err, "task %d has this biz id already: nothing changed\n", ref.ID)
			}
			if p.format == "json" {
				return p.json(ref)
			}
			return printAll(p, []outbox.Ref{ref}, refID, []column[outbox.Ref]{
				{title: "ID", cell: refID},
				{title: "NEW", cell: func(r outbox.Ref) string { return strconv.FormatBool(r.New) }},
			})
		},
	}
	f := c.Flags()
	f.StringVar(&payload, "payload", "{}", "JSON, @file, or - for stdin; sent byte for byte")
	f.StringVar(&bizID, "biz-id", "", "idempotency key, unique within the type")
	f.BoolVar(&high, "high", false, "put it into the high lane")
	f.BoolVar(&low, "low", false, "put it into the low lane, whatever the type's default is")
	f.DurationVar(&in, "in", 0, "due after this long, such as 5m")
	f.StringVar(&at, "at", "", "due at this time (RFC 3339)")
	f.IntVar(&maxAttempts, "max-attempts", 0, "attempts, the first included (default the type's)")
	f.StringArrayVar(&headers, "header", nil, "name=value, may be repeated")
	f.StringVar(&from, "from", "", "file with one task per line as JSON, or - for stdin")
	f.Int64Var(&skip, "skip", 0, "with --from: pass over this many lines")
	f.BoolVar(&stop, "stop-on-error", false, "with --from: end at the first bad line; what is before it stays")
	return c
}

// enqueueMany is enqueue --from: each line says what the other flags say of one task.
func (a *app) enqueueMany(c *cobra.Command, p *printer, argv []string, from string, skip int64, stop bool) error {
	for _, name := range []string{"payload", "biz-id", "high", "low", "in", "at", "max-attempts", "header"} {
		if c.Flags().Changed(name) {
			return usage("--%s is for one task: with --from each line says it", name)
		}
	}
	if skip < 0 {
		return usage("--skip %d: expected 0 or more", skip)
	}
	bizType := ""
	if len(argv) == 1 {
		bizType = argv[0]
	}
	ctx, cancel := a.limit(c, 0) // as long as it takes
	defer cancel()
	s, err := a.connect(ctx, c)
	if err != nil {
		return err
	}
	defer s.close()
	return a.enqueueFrom(ctx, s, p, from, bizType, skip, stop)
}

func refID(r outbox.Ref) string { return strconv.FormatInt(r.ID, 10) }

// payload reads what --payload means. The bytes go through as they are; only a last line feed, which editors and
// echo add, is dropped.
func (a *app) payload(arg string) (json.RawMessage, error) {
	body := []byte(arg)
	var err error
	switch {
	case arg == "-":
		body, err = io.ReadAll(io.LimitReader(a.in, 4<<20))
	case strings.HasPrefix(arg, "@"):
		body, err = os.ReadFile(arg[1:])
	}
	if err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("read the payload: %w", err)}
	}
	body = []byte(strings.TrimSuffix(string(body), "\n"))
	if json.Valid(body) {
		return body, nil
	}
	// json.Unmarshal knows where.
	var v any
	err = json.Unmarshal(body, &v)
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		return nil, usage("the payload is no JSON: %v at byte %d", e, e.Offset)
	}
	return nil, usage("the payload is no JSON: %v", err)
}
