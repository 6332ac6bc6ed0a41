package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

const deadIDsSQL = `-- taskrelay cli: ids of dead tasks
SELECT d.id FROM {{schema}}.dead AS d` + deadWhereSQL + `
  AND d.id > $8::bigint
ORDER BY d.id`

// exportPage tasks are read at once: each may have half a megabyte of payload.
const exportPage = 50

func (a *app) deadExportCommand() *cobra.Command {
	var f deadFilter
	var file string
	var after, limit int64
	var resume bool
	c := &cobra.Command{
		Use:   "export",
		Short: "Write dead tasks with their payloads as JSON lines",
		Long: `export writes one JSON line per dead task, in the order of their ids: the row with payload, headers and result. The
payload is the same JSON value, numbers as they were written, but not the same bytes: those are in "show --payload".

With --file an export that was cut off goes on with --resume, behind the last whole line. On stdout it goes on with
--after and the last id. It needs the role taskrelay_operator.`,
		Example: `  taskrelay dead export --type ORDER_PAYMENT --file dead.jsonl
  taskrelay dead export --type ORDER_PAYMENT --file dead.jsonl --resume
  taskrelay dead export --newer-than 1d | jq -r .biz_id`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			if a.format != "table" && a.format != "jsonl" {
				return usage("--output %q: export writes jsonl only", a.format)
			}
			if limit < 0 {
				return usage("--limit %d: expected 1 or more, or 0 for all", limit)
			}
			if resume && file == "" {
				return usage("--resume needs --file: without one, go on with --after and the last id")
			}
			out, last, done, err := a.exportFile(file, resume)
			if err != nil {
				return err
			}
			if c.Flags().Changed("after") {
				last = after
			}
			ctx, cancel := a.limit(c, 0) // as long as it takes
			defer cancel()
			s, err := a.connect(ctx, c)
			if err != nil {
				return errors.Join(err, done())
			}
			defer s.close()
			n, last, err := a.export(ctx, s, f, out, last, limit)
			if err := errors.Join(err, done()); err != nil {
				if last > 0 {
					again := fmt.Sprintf("--after %d", last)
					if file != "" {
						again = "--resume"
					}
					fmt.Fprintf(a.err, "%s exported, the last one is %d: go on with %s\n", count(n, "task"), last, again)
				}
				return err
			}
			fmt.Fprintf(a.err, "%s exported\n", count(n, "dead task"))
			if limit > 0 && n == limit {
				fmt.Fprintf(a.err, "stopped at --limit: go on with --after %d\n", last)
			}
			return nil
		},
	}
	f.flags(c.Flags())
	c.Flags().StringVar(&file, "file", "", "where to, by default stdout; a file that exists is not overwritten")
	c.Flags().BoolVar(&resume, "resume", false, "go on behind the last whole line of --file")
	c.Flags().Int64Var(&after, "after", 0, "only ids above this one")
	c.Flags().Int64Var(&limit, "limit", 0, "how many at most, 0 for all")
	return c
}

// export writes tasks behind the id after and returns how many, and the last one.
func (a *app) export(ctx context.Context, s *session, f deadFilter, out io.Writer, after, limit int64) (n, last int64, err error) {
	var ids []int64
	err = s.read(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, s.schema.Render(deadIDsSQL), append(f.args(), after)...)
		if err != nil {
			return err
		}
		ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		return err
	})
	if err != nil {
		return 0, after, err
	}
	total := int64(len(ids))
	if limit > 0 && limit < total {
		total = limit
	}
	bar := a.progress(total, "exporting")
	defer bar.finish()
	for start := 0; start < len(ids) && (limit == 0 || n < limit); start += exportPage {
		page := ids[start:min(start+exportPage, len(ids))]
		tasks, err := s.schema.GetAll(ctx, s.pool, page)
		if err != nil {
			return n, after, err
		}
		for _, t := range tasks {
			if t.Status != "dead" { // brought back since
				continue
			}
			line, err := json.Marshal(t)
			if err != nil {
				return n, after, err
			}
			if _, err := out.Write(append(line, '\n')); err != nil {
				return n, after, fmt.Errorf("write the export: %w", err)
			}
			if n, after = n+1, t.ID; n == limit {
				break
			}
		}
		bar.add(len(page))
	}
	return n, after, nil
}

// exportFile opens where an export goes to. With resume it finds the last whole line, and cuts off what is behind.
func (a *app) exportFile(name string, resume bool) (out io.Writer, last int64, done func() error, err error) {
	if name == "" {
		w := bufio.NewWriter(a.out)
		return w, 0, w.Flush, nil
	}
	flags := os.O_RDWR | os.O_CREATE | os.O_EXCL
	if resume {
		flags = os.O_RDWR | os.O_CREATE
	}
	f, err := os.OpenFile(name, flags, 0o600) // payloads may hold secrets
	if errors.Is(err, os.ErrExist) {
		return nil, 0, nil, usage("%s exists: go on behind its last line with --resume, or name another file", name)
	}
	if err != nil {
		return nil, 0, nil, &exitError{exitUsage, err}
	}
	if resume {
		if last, err = lastExported(f); err != nil {
			return nil, 0, nil, errors.Join(usage("%s: %w", name, err), f.Close())
		}
	}
	w := bufio.NewWriter(f)
	return w, last, func() error { return errors.Join(w.Flush(), f.Sync(), f.Close()) }, nil
}

// lastExported returns the id of the last whole line of f, and leaves f at its end without anything behind.
func lastExported(f *os.File) (last int64, err error) {
	lines := bufio.NewReader(f)
	var end int64
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return 0, err
		}
		if !bytes.HasSuffix(line, []byte("\n")) {
			break
		}
		var task struct {
			ID int64 `json:"id,string"`
		}
		if err := json.Unmarshal(line, &task); err != nil || task.ID <= last {
			return 0, fmt.Errorf("line %d is not of an export: name another file", n)
		}
		last = task.ID
		end += int64(len(line))
	}
	if err := f.Truncate(end); err != nil {
		return 0, err
	}
	_, err = f.Seek(end, io.SeekStart)
	return last, err
}

// shellWord quotes a word for a POSIX shell.
func shellWord(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
