package tests

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

var planRows = flag.Int("plan-rows", 30_000, "rows in the table of TestPlansDoNotDependOnStatistics (make plans: 1,000,000)")

// planIndexes are the ways into table task that each statement may take. A row is found by its id in the primary key
// alone: in another index that holds the id too, all of it would be read.
var planIndexes = map[string][]string{
	"claim":             {"task_pkey"},
	"take over":         {"task_pkey"},
	"settle succeeded":  {"task_pkey"},
	"settle":            {"task_pkey"},
	"read lanes":        {"task_lane", "task_scheduled"},
	"take work list":    {"task_republish", "task_pkey"},
	"confirm work list": {"task_pkey"},
	"rescan":            {"task_lane", "task_scheduled", "task_pkey"},
}

// The plans of relay and worker, as Postgres ran them (auto_explain): made while the table was empty and kept while it
// grew, with the statistics of an empty table, after ANALYZE, and beside an open transaction of the lane.
// Each statement goes by its index, and one that finds rows by id touches no more than a few batches of them.
func TestPlansDoNotDependOnStatistics(t *testing.T) {
	s := testenv.OwnPostgres(t)
	e := testenv.NewEnv(t, testenv.DBOn(t, s), testenv.NATS(t))
	e.Exec(t, "ALTER TABLE taskrelay.task SET (autovacuum_enabled = off)")
	e.Exec(t, "VACUUM ANALYZE taskrelay.task")
	for _, set := range []string{"session_preload_libraries = 'auto_explain'", "auto_explain.log_min_duration = 0",
		"auto_explain.log_format = 'json'", "auto_explain.log_analyze = on", "auto_explain.log_timing = off"} {
		e.Exec(t, fmt.Sprintf("ALTER DATABASE %s SET %s", e.Name, set))
	}

	var failing atomic.Bool
	var reg command.Registry
	err := command.Register(&reg, "ORDER_PAYMENT", command.Command[struct{}]{
		Execute: func(_ context.Context, task *command.Task[struct{}]) (any, error) {
			if failing.Load() && task.Attempt == 1 {
				return nil, errors.New("first attempt fails")
			}
			return nil, nil
		},
		Retry: retry.Fixed{Base: 31 * time.Second}, // longer than a nak may be: by the work list
	})
	if err != nil {
		t.Fatal(err)
	}
	e.RunRelay(quick)
	e.RunWorker(&reg)
	work := func(n int) {
		t.Helper()
		e.Exec(t, `INSERT INTO taskrelay.task (biz_type, run_at) SELECT 'ORDER_PAYMENT', CASE WHEN g % 4 = 0 THEN now() + interval '300 ms' END
			FROM generate_series(1, $1::int) AS g`, n)
		e.WaitCount(t, 2*soon, 0, `SELECT count(*) FROM taskrelay.task WHERE finished_at IS NULL AND republish_at IS NULL AND run_at < now() + interval '1 hour'`)
	}
	work(50) // every connection keeps a plan made on an empty table from here on

	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, status, finished_at) SELECT 'ORDER_PAYMENT', 'succeeded', now() FROM generate_series(1, $1::int)`, *planRows/2)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, run_at) SELECT 'ORDER_PAYMENT', now() + interval '1 day' FROM generate_series(1, $1::int)`, *planRows/2)
	work(500)
	failing.Store(true)
	work(50)
	failing.Store(false)
	e.Exec(t, `UPDATE taskrelay.task SET next_attempt_at = now(), republish_at = now() WHERE status = 'retrying'`)
	e.WaitCount(t, 2*soon, 0, `SELECT count(*) FROM taskrelay.task WHERE status = 'retrying'`)

	e.Exec(t, "ANALYZE taskrelay.task")
	work(500)

	open, err := e.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := open.Exec(t.Context(), `INSERT INTO taskrelay.task (biz_type) VALUES ('ORDER_PAYMENT')`); err != nil {
		t.Fatal(err)
	}
	work(500)
	if err := open.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	work(50)

	// A stream made anew: the lane is scanned from its start.
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	work(50)

	seen := map[string]int{}
	testenv.Eventually(t, soon, func() error {
		clear(seen)
		for _, p := range plansLogged(t, s.Log()) {
			seen[p.name]++
		}
		for name := range planIndexes {
			if name != "take over" && name != "settle" && seen[name] == 0 { // they run when the claim or the settle leaves something
				return fmt.Errorf("no plan of %q is logged yet: %v", name, seen)
			}
		}
		return nil
	})
	wrong := map[string]bool{}
	for _, p := range plansLogged(t, s.Log()) {
		allowed, ok := planIndexes[p.name]
		if !ok {
			continue
		}
		p.root.walk(func(n planNode) {
			if n.Relation != "task" || n.Type == "Tid Scan" || n.Type == "ModifyTable" || n.Type == "LockRows" {
				return
			}
			rows := (n.Rows + n.Removed) * n.Loops
			if p.name == "read lanes" || p.name == "rescan" {
				rows = 0 // they walk past rows of the future, each once
			}
			if !slices.Contains([]string{"Index Scan", "Index Only Scan"}, n.Type) || !slices.Contains(allowed, n.Index) || rows > 5000 {
				wrong[fmt.Sprintf("%s: %s by %q over %.0f rows", p.name, n.Type, n.Index, rows)] = true
			}
		})
	}
	for w := range wrong {
		t.Error(w)
	}
	t.Logf("plans: %v", seen)
}

type planNode struct {
	Type     string     `json:"Node Type"`
	Relation string     `json:"Relation Name"`
	Index    string     `json:"Index Name"`
	Rows     float64    `json:"Actual Rows"`
	Loops    float64    `json:"Actual Loops"`
	Removed  float64    `json:"Rows Removed by Filter"`
	Plans    []planNode `json:"Plans"`
}

func (n planNode) walk(f func(planNode)) {
	f(n)
	for _, c := range n.Plans {
		c.walk(f)
	}
}

type loggedPlan struct {
	name string
	root planNode
}

// plansLogged reads the plans of our statements from the log of a server.
func plansLogged(t *testing.T, file string) (plans []loggedPlan) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := bufio.NewReader(f)
	for {
		line, err := r.ReadString('\n')
		if errors.Is(err, io.EOF) {
			return plans
		}
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(line, "plan:") {
			continue
		}
		var text strings.Builder
		for err == nil && (text.Len() == 0 || strings.TrimRight(line, "\n") != "\t}") {
			line, err = r.ReadString('\n')
			text.WriteString(line)
		}
		var p struct {
			Query string   `json:"Query Text"`
			Plan  planNode `json:"Plan"`
		}
		if json.Unmarshal([]byte(text.String()), &p) != nil {
			continue // cut off: the server is writing it
		}
		first, _, _ := strings.Cut(p.Query, "\n")
		if name, ok := strings.CutPrefix(first, "-- taskrelay: "); ok {
			plans = append(plans, loggedPlan{name, p.Plan})
		}
	}
}
