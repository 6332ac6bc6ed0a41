package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// bulkTask is one line of enqueue --from.
type bulkTask struct {
	BizType     string            `json:"biz_type"`
	BizID       *string           `json:"biz_id"`
	Payload     json.RawMessage   `json:"payload"`
	Priority    string            `json:"priority"`
	RunAt       *time.Time        `json:"run_at"`
	Delay       string            `json:"delay"`
	MaxAttempts *int              `json:"max_attempts"`
	Headers     map[string]string `json:"headers"`
}

const bulkFields = "biz_type, biz_id, payload, priority, run_at, delay, max_attempts, headers"

// bulkLine is a line that parsed.
type bulkLine struct {
	number int64
	named  bool // has a biz id: enqueueing it again makes no second task
	task   outbox.NewTask
}

// bulkResult is what became of a line.
type bulkResult struct {
	Line  int64  `json:"line"`
	ID    int64  `json:"id,string,omitempty"`
	New   bool   `json:"new"`
	Error string `json:"error,omitempty"`
}

// bulkSummary is what became of all.
type bulkSummary struct {
	Lines      int64 `json:"lines"`
	New        int64 `json:"new"`
	Duplicates int64 `json:"duplicates"`
	Failed     int64 `json:"failed"`
	Done       int64 `json:"done_to_line"` // all up to this line are committed, or were refused by name
	unnamed    int64
}

const (
	// A transaction of a thousand small rows takes some 20 ms: what a killed run has to do again is little.
	bulkRows  = 1000
	bulkBytes = 4 << 20
	// A task is at most 512 KiB of payload and 48 KiB of headers; escapes may make it longer.
	bulkLineMax = 8 << 20
	// Another producer of the same biz ids in another order: the server ends one of the two.
	bulkTries = 5
)

// bulk enqueues what a file has, line by line.
type bulk struct {
	app     *app
	session *session
	p       *printer
	stop    bool // at the first bad line
	headed  bool // csv only
	sum     bulkSummary
	lines   []bulkLine
	size    int
	bar     progress
}

var errStop = errors.New("stopped at the first bad line (--stop-on-error)")

// enqueueFrom is enqueue --from. bizType is for lines that name none; the first skip lines are passed over.
func (a *app) enqueueFrom(ctx context.Context, s *session, p *printer, file, bizType string, skip int64, stop bool) error {
	in, total := a.in, int64(0)
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return &exitError{exitUsage, err}
		}
		defer f.Close()
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			total = info.Size()
		}
		in = f
	}
	b := &bulk{app: a, session: s, p: p, stop: stop, bar: a.progress(total, "enqueueing (bytes)"), sum: bulkSummary{Done: skip}}
	err := b.run(ctx, in, bizType, skip)
	b.bar.finish()
	return b.report(err)
}

func (b *bulk) run(ctx context.Context, in io.Reader, bizType string, skip int64) error {
	lines := bufio.NewReaderSize(in, 1<<20)
	for number := int64(1); ; number++ {
		line, err := readLine(lines)
		if err == io.EOF {
			return b.flush(ctx)
		}
		if err != nil && !errors.Is(err, errLong) {
			return errors.Join(fmt.Errorf("read line %d: %w", number, err), b.flush(ctx))
		}
		b.bar.add(len(line) + 1)
		text := bytes.TrimSpace(line)
		if number == 1 {
			text = bytes.TrimPrefix(text, []byte("\ufeff")) // editors on Windows begin a file with it
		}
		if number <= skip || err == nil && len(text) == 0 {
			continue
		}
		b.sum.Lines++
		var parsed bulkLine
		if err == nil {
			parsed, err = parseLine(text, bizType)
		}
		if err != nil {
			// What is before it goes first: results and errors come in the order of the lines.
			if err := b.flush(ctx); err != nil {
				return err
			}
			if err := b.refuse(number, err); err != nil {
				return err
			}
			continue
		}
		parsed.number = number
		b.lines = append(b.lines, parsed)
		b.size += len(text)
		if len(b.lines) == bulkRows || b.size >= bulkBytes {
			if err := b.flush(ctx); err != nil {
				return err
			}
		}
	}
}

var errLong = fmt.Errorf("longer than %d MiB: a payload is at most 512 KiB", bulkLineMax>>20)

// readLine returns a line without its end. One that is too long is read to its end and refused; bufio.Scanner would end
// the whole run there.
func readLine(r *bufio.Reader) (line []byte, err error) {
	long := false
	for {
		part, err := r.ReadSlice('\n')
		if long = long || len(line)+len(part) > bulkLineMax; !long {
			line = append(line, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err == io.EOF && len(line) == 0 && !long, err != nil && err != io.EOF:
			return nil, err
		case long:
			return nil, errLong
		}
		return bytes.TrimSuffix(line, []byte("\n")), nil
	}
}

func parseLine(text []byte, bizType string) (bulkLine, error) {
	if !utf8.Valid(text) {
		return bulkLine{}, errors.New("not valid UTF-8")
	}
	var t bulkTask
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields() // a misspelt biz_id would be a task without one, and twice when the file is sent again
	if err := d.Decode(&t); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && wrong.Field != "" {
			return bulkLine{}, fmt.Errorf("%s is a JSON %s: expected %s", wrong.Field, wrong.Value, wrong.Type)
		} else if ok {
			err = fmt.Errorf("a JSON %s", wrong.Value)
		}
		return bulkLine{}, fmt.Errorf("%w: expected one JSON object with some of %s", err, bulkFields)
	}
	if _, err := d.Token(); err != io.EOF {
		return bulkLine{}, errors.New("more than one JSON value: expected one object on each line")
	}
	if t.BizType == "" {
		t.BizType = bizType
	}
	if t.BizType == "" {
		return bulkLine{}, errors.New("no biz_type: name it in the line, or for all of them as TYPE")
	}
	var opts []outbox.Option
	if t.BizID != nil {
		opts = append(opts, outbox.BizID(*t.BizID))
	}
	switch t.Priority {
	case "":
	case outbox.PriorityHigh:
		opts = append(opts, outbox.High())
	case outbox.PriorityLow:
		opts = append(opts, outbox.Low())
	default:
		return bulkLine{}, fmt.Errorf("priority %.40q: expected high or low", t.Priority)
	}
	if t.RunAt != nil && t.Delay != "" {
		return bulkLine{}, errors.New("run_at and delay: give one of them")
	}
	if t.RunAt != nil {
		opts = append(opts, outbox.At(*t.RunAt))
	}
	if t.Delay != "" {
		delay, err := time.ParseDuration(t.Delay)
		if err != nil {
			return bulkLine{}, fmt.Errorf("delay %.40q: expected a duration such as 90s or 5m", t.Delay)
		}
		opts = append(opts, outbox.In(delay))
	}
	if t.MaxAttempts != nil {
		opts = append(opts, outbox.MaxAttempts(*t.MaxAttempts))
	}
	for k, v := range t.Headers {
		opts = append(opts, outbox.Header(k, v))
	}
	task := outbox.NewTask{BizType: t.BizType, Options: opts}
	if t.Payload != nil { // null is a payload too
		task.Payload = t.Payload
	}
	return bulkLine{named: t.BizID != nil, task: task}, task.Validate()
}

// flush writes the lines that are collected.
func (b *bulk) flush(ctx context.Context) error {
	lines := b.lines
	b.lines, b.size = nil, 0
	if len(lines) == 0 {
		return nil
	}
	return b.write(ctx, lines)
}

// write enqueues lines in one transaction. When one of them is refused, it halves them until it stands alone: a bad
// line costs some twenty small transactions and stops nobody.
func (b *bulk) write(ctx context.Context, lines []bulkLine) error {
	tasks := make([]outbox.NewTask, len(lines))
	for i, l := range lines {
		tasks[i] = l.task
	}
	refs, err := b.transaction(ctx, tasks)
	if err != nil {
		if refused(err) {
			if len(lines) == 1 {
				return b.refuse(lines[0].number, err)
			}
			half := len(lines) / 2
			if err := b.write(ctx, lines[:half]); err != nil {
				return err
			}
			return b.write(ctx, lines[half:])
		}
		for _, l := range lines { // it may have been the answer to the commit that did not come
			if !l.named && !notCommitted(err) {
				b.sum.unnamed++
			}
		}
		return fmt.Errorf("lines %d to %d: %w", lines[0].number, lines[len(lines)-1].number, err)
	}
	for i, r := range refs {
		if r.New {
			b.sum.New++
		} else {
			b.sum.Duplicates++
		}
		if !lines[i].named {
			b.sum.unnamed++
		}
		if err := b.print(bulkResult{Line: lines[i].number, ID: r.ID, New: r.New}); err != nil {
			return err
		}
	}
	b.sum.Done = lines[len(lines)-1].number
	return nil
}

func (b *bulk) transaction(ctx context.Context, tasks []outbox.NewTask) (refs []outbox.Ref, err error) {
	for try := 1; ; try++ {
		err = pgx.BeginTxFunc(ctx, b.session.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
			refs, err = b.session.schema.EnqueueMany(ctx, tx, tasks)
			return err
		})
		e, ok := errors.AsType[*pgconn.PgError](err)
		if !ok || e.Code != "40P01" && e.Code != "40001" || try == bulkTries {
			return refs, err
		}
	}
}

// refused says that the data is at fault: a constraint or strict types said no. What Postgres cannot do at all, such as
// an insert without the right to, would fail for every line.
func refused(err error) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (strings.HasPrefix(e.Code, "22") || strings.HasPrefix(e.Code, "23")) || errors.Is(err, outbox.ErrUnknownType)
}

// lineError leaves out which task of a batch it was: the line's number says it.
func lineError(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Message
	}
	text := err.Error()
	if i := strings.Index(text, outbox.ErrUnknownType.Error()); i > 0 && errors.Is(err, outbox.ErrUnknownType) {
		return text[i:]
	}
	return text
}

func (b *bulk) refuse(number int64, err error) error {
	b.sum.Failed++
	text := lineError(err)
	fmt.Fprintf(b.app.err, "line %d: %s\n", number, oneLine(text))
	if err := b.print(bulkResult{Line: number, Error: text}); err != nil {
		return err
	}
	if b.stop {
		return errStop
	}
	b.sum.Done = number
	return nil
}

// print writes a line's result at once, for formats that have one per line.
func (b *bulk) print(r bulkResult) error {
	switch b.p.format {
	case "jsonl":
		enc := json.NewEncoder(b.p.out)
		enc.SetEscapeHTML(false)
		return enc.Encode(r)
	case "id":
		if r.ID != 0 {
			_, err := fmt.Fprintln(b.p.out, r.ID)
			return err
		}
	case "csv":
		w := csv.NewWriter(b.p.out)
		if !b.headed {
			b.headed = true
			if err := w.Write([]string{"LINE", "ID", "NEW", "ERROR"}); err != nil {
				return err
			}
		}
		id := ""
		if r.ID != 0 {
			id = strconv.FormatInt(r.ID, 10)
		}
		if err := w.Write([]string{strconv.FormatInt(r.Line, 10), id, strconv.FormatBool(r.New), r.Error}); err != nil {
			return err
		}
		w.Flush()
		return w.Error()
	}
	return nil
}

// report prints the sum, and how to go on after an error.
func (b *bulk) report(err error) error {
	s := b.sum
	switch b.p.format {
	case "json":
		if e := b.p.json(s); e != nil {
			return e
		}
	case "table":
		if e := printAll(b.p, []bulkSummary{s}, func(bulkSummary) string { return "" }, []column[bulkSummary]{
			{title: "LINES", cell: func(s bulkSummary) string { return strconv.FormatInt(s.Lines, 10) }},
			{title: "NEW", cell: func(s bulkSummary) string { return strconv.FormatInt(s.New, 10) }},
			{title: "DUPLICATES", cell: func(s bulkSummary) string { return strconv.FormatInt(s.Duplicates, 10) }},
			{title: "FAILED", cell: func(s bulkSummary) string { return strconv.FormatInt(s.Failed, 10) }},
		}); e != nil {
			return e
		}
	default:
		fmt.Fprintf(b.app.err, "%s: %d new, %d duplicates, %d failed\n", count(s.Lines, "line"), s.New, s.Duplicates, s.Failed)
	}
	if err != nil {
		again := "sending the file again is harmless, what is in already is a duplicate"
		if s.unnamed > 0 {
			again = "lines without biz_id would be made twice by sending the file again"
		}
		fmt.Fprintf(b.app.err, "done to line %[1]d; go on with --skip %[1]d (%s)\n", s.Done, again)
		if errors.Is(err, errStop) {
			if s.New+s.Duplicates > 0 {
				return &exitError{exitPartly, err}
			}
			return &exitError{exitUsage, err}
		}
		return err
	}
	switch {
	case s.Failed > 0 && s.New+s.Duplicates > 0:
		return &exitError{code: exitPartly}
	case s.Failed > 0:
		return &exitError{code: exitUsage}
	}
	return nil
}
