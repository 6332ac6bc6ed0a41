package testenv

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
	"github.com/taskrelay/taskrelay/schema"
)

const templateName = "taskrelay_template"

var settings = map[string]string{
	"max_connections":           "300",
	"shared_buffers":            "256MB",
	"max_prepared_transactions": "20",
	"autovacuum_naptime":        "1h", // a test that needs a vacuum runs it; some hundred databases would each get a process
}

var sharedPostgres = sync.OnceValues(func() (*pgtemp.Server, error) {
	s, err := pgtemp.Start(context.Background(), "", pgtemp.Options{Settings: settings})
	if err != nil {
		return nil, err
	}
	shared.add(func() { _ = s.Stop() })
	return s, nil
})

// Postgres returns the cluster that all tests of this binary share. Do not stop it: OwnPostgres is for that.
func Postgres(t testing.TB) *pgtemp.Server {
	t.Helper()
	return must[*pgtemp.Server](t, "start Postgres")(sharedPostgres())
}

// OwnPostgres starts a cluster for one test, which may kill and restart it.
func OwnPostgres(t testing.TB) *pgtemp.Server {
	t.Helper()
	s := must[*pgtemp.Server](t, "start Postgres")(pgtemp.Start(t.Context(), "", pgtemp.Options{Settings: settings}))
	t.Cleanup(func() { _ = s.Stop() })
	return s
}

// Database is a database of one test.
type Database struct {
	URL  string
	Name string
	Pool *pgxpool.Pool
}

var template = sync.OnceValue(func() error {
	s, err := sharedPostgres()
	if err != nil {
		return err
	}
	return migrated(context.Background(), s, templateName)
})

var databases atomic.Int64

// DB makes a database with the migrated schema taskrelay in the shared cluster, as a copy of a template.
func DB(t testing.TB) *Database {
	t.Helper()
	s := Postgres(t)
	if err := template(); err != nil {
		t.Fatalf("migrate the template database: %v", err)
	}
	name := "t" + strconv.FormatInt(databases.Add(1), 10)
	return database(t, s, name, "CREATE DATABASE "+name+" TEMPLATE "+templateName)
}

// EmptyDB makes a database without the schema.
func EmptyDB(t testing.TB) *Database {
	t.Helper()
	name := "t" + strconv.FormatInt(databases.Add(1), 10)
	return database(t, Postgres(t), name, "CREATE DATABASE "+name)
}

// DBOn makes a migrated database in a cluster of the test's own.
func DBOn(t testing.TB, s *pgtemp.Server) *Database {
	t.Helper()
	const name = "taskrelay_test"
	if err := migrated(t.Context(), s, name); err != nil {
		t.Fatal(err)
	}
	return open(t, s, name)
}

func database(t testing.TB, s *pgtemp.Server, name, create string) *Database {
	t.Helper()
	if err := admin(t.Context(), s, create); err != nil {
		t.Fatalf("%s: %v", create, err)
	}
	// It stays until the cluster is thrown away with all of them: to drop one costs a checkpoint of everything that the
	// other tests have written. [0.3 s of the two cores a test]
	t.Cleanup(func() {
		for _, gid := range prepared(s, name) { // of a test that failed: they would hold back vacuum everywhere
			_ = execOn(s, name, "ROLLBACK PREPARED "+quote(gid))
		}
	})
	return open(t, s, name)
}

func open(t testing.TB, s *pgtemp.Server, name string) *Database {
	t.Helper()
	cfg := must[*pgxpool.Config](t, "parse URL")(pgxpool.ParseConfig(s.DatabaseURL(name)))
	cfg.MaxConns = 20
	cfg.ConnConfig.RuntimeParams["application_name"] = "test"
	pool := must[*pgxpool.Pool](t, "open pool")(pgxpool.NewWithConfig(context.Background(), cfg))
	t.Cleanup(pool.Close)
	return &Database{URL: s.DatabaseURL(name), Name: name, Pool: pool}
}

func migrated(ctx context.Context, s *pgtemp.Server, name string) error {
	if err := admin(ctx, s, "CREATE DATABASE "+name); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, s.DatabaseURL(name))
	if err != nil {
		return err
	}
	defer pool.Close()
	_, err = schema.Migrate(ctx, pool, schema.Options{})
	return err
}

func admin(ctx context.Context, s *pgtemp.Server, sql string) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

func execOn(s *pgtemp.Server, database, sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.DatabaseURL(database))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

func prepared(s *pgtemp.Server, database string) []string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return nil
	}
	defer conn.Close(ctx)
	rows, err := conn.Query(ctx, "SELECT gid FROM pg_prepared_xacts WHERE database = $1", database)
	if err != nil {
		return nil
	}
	gids, _ := pgx.CollectRows(rows, pgx.RowTo[string])
	return gids
}

func quote(s string) string { return "'" + s + "'" }

// Exec runs one statement, or several without arguments.
func (d *Database) Exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	if _, err := d.Pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// Scan reads one row into dest.
func (d *Database) Scan(t testing.TB, sql string, args []any, dest ...any) {
	t.Helper()
	if err := d.Pool.QueryRow(t.Context(), sql, args...).Scan(dest...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// Int reads one integer.
func (d *Database) Int(t testing.TB, sql string, args ...any) int64 {
	t.Helper()
	var n int64
	d.Scan(t, sql, args, &n)
	return n
}

// Text reads one value as text, null as the empty string. The query must yield a text column.
func (d *Database) Text(t testing.TB, sql string, args ...any) string {
	t.Helper()
	var s *string
	d.Scan(t, sql, args, &s)
	if s == nil {
		return ""
	}
	return *s
}

// Insert writes a task as any SQL client would and returns its id. Columns alternate with values.
func (d *Database) Insert(t testing.TB, bizType string, columns ...any) int64 {
	t.Helper()
	id, err := d.TryInsert(t, bizType, columns...)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TryInsert is Insert for a row that may be refused.
func (d *Database) TryInsert(t testing.TB, bizType string, columns ...any) (id int64, err error) {
	t.Helper()
	if len(columns)%2 != 0 {
		t.Fatal("Insert takes pairs of column and value")
	}
	names, places, args := "biz_type", "$1", []any{bizType}
	for i := 0; i < len(columns); i += 2 {
		args = append(args, columns[i+1])
		names += ", " + columns[i].(string)
		places += fmt.Sprintf(", $%d", len(args))
	}
	sql := "INSERT INTO taskrelay.task (" + names + ") VALUES (" + places + ") RETURNING id"
	err = d.Pool.QueryRow(t.Context(), sql, args...).Scan(&id)
	return id, err
}

// Row is what tests look at of a task.
type Row struct {
	ID                                               int64
	BizType, Priority, Status, Phase, Compensation   string
	BizID, LastError, ErrorClass, DeadReason, Result *string
	LeaseOwner, Cause                                *string
	Attempt, Generation, Compensations               int
	CreatedAt                                        time.Time
	RunAt, NextAttemptAt, RepublishAt, LeaseUntil    *time.Time
	StartedAt, FirstStartedAt, FinishedAt, DeadAt    *time.Time
	DeadLetteredAt, CancelRequestedAt                *time.Time
}

// Task reads one task.
func (d *Database) Task(t testing.TB, id int64) Row {
	t.Helper()
	r, err := d.task(t.Context(), id)
	if err != nil {
		t.Fatalf("read task %d: %v", id, err)
	}
	return r
}

func (d *Database) task(ctx context.Context, id int64) (r Row, err error) {
	err = d.Pool.QueryRow(ctx, `SELECT id, biz_type, priority, status, phase, compensation, biz_id, last_error, error_class,
		dead_reason, result::text, lease_owner, cause, attempt, generation, compensations, created_at, run_at, next_attempt_at,
		republish_at, lease_until, started_at, first_started_at, finished_at, dead_at, dead_lettered_at, cancel_requested_at
		FROM taskrelay.task WHERE id = $1`, id).Scan(&r.ID, &r.BizType, &r.Priority, &r.Status, &r.Phase, &r.Compensation,
		&r.BizID, &r.LastError, &r.ErrorClass, &r.DeadReason, &r.Result, &r.LeaseOwner, &r.Cause, &r.Attempt, &r.Generation,
		&r.Compensations, &r.CreatedAt, &r.RunAt, &r.NextAttemptAt, &r.RepublishAt, &r.LeaseUntil, &r.StartedAt,
		&r.FirstStartedAt, &r.FinishedAt, &r.DeadAt, &r.DeadLetteredAt, &r.CancelRequestedAt)
	return r, err
}

// Attempt is one row of the attempt log.
type Attempt struct {
	Attempt, Generation                     int // in the order of the query: rows are read by position
	Phase, Outcome                          string
	Worker, ErrorClass, Error, Stack, BizID *string
	BizType                                 string
	StartedAt, FinishedAt                   time.Time
}

// Attempts reads the attempt log of a task, oldest first.
func (d *Database) Attempts(t testing.TB, id int64) []Attempt {
	t.Helper()
	rows, err := d.Pool.Query(t.Context(), `SELECT attempt, generation, phase, outcome, worker, error_class, error, stack, biz_id,
		biz_type, started_at, finished_at FROM taskrelay.task_attempt WHERE task_id = $1 ORDER BY started_at, finished_at`, id)
	if err != nil {
		t.Fatal(err)
	}
	return must[[]Attempt](t, "read attempts")(pgx.CollectRows(rows, pgx.RowToStructByPos[Attempt]))
}

// WaitStatus waits until a task has one of the wanted states and returns it.
func (d *Database) WaitStatus(t testing.TB, timeout time.Duration, id int64, want ...string) Row {
	t.Helper()
	var r Row
	err := eventually(t, timeout, func() (err error) {
		if r, err = d.task(t.Context(), id); err != nil {
			return err
		}
		for _, w := range want {
			if r.Status == w {
				return nil
			}
		}
		return fmt.Errorf("task %d is %s (attempt %d, phase %s, last error %s)", id, r.Status, r.Attempt, r.Phase, deref(r.LastError))
	})
	if err != nil {
		t.Fatalf("after %v: %v; want %v", timeout, err, want)
	}
	return r
}

// WaitCount waits until a query that counts yields n.
func (d *Database) WaitCount(t testing.TB, timeout time.Duration, n int64, sql string, args ...any) {
	t.Helper()
	Eventually(t, timeout, func() error {
		var got int64
		if err := d.Pool.QueryRow(t.Context(), sql, args...).Scan(&got); err != nil {
			return err
		}
		if got != n {
			return fmt.Errorf("%s: got %d, want %d", sql, got, n)
		}
		return nil
	})
}

// WaitNoneOpen waits until every task is finished. On failure it says how many are in which state.
func (d *Database) WaitNoneOpen(t testing.TB, timeout time.Duration) {
	t.Helper()
	Eventually(t, timeout, func() error {
		var open int
		var states string
		err := d.Pool.QueryRow(t.Context(), `SELECT coalesce(sum(n), 0), coalesce(string_agg(s || ': ' || n, ', '), '')
			FROM (SELECT biz_type || ' ' || status AS s, count(*) AS n FROM taskrelay.task WHERE finished_at IS NULL GROUP BY 1) AS x`).
			Scan(&open, &states)
		if err != nil {
			return err
		}
		if open > 0 {
			return errors.New("unfinished tasks: " + states)
		}
		return nil
	})
}

func deref(s *string) string {
	if s == nil {
		return "(none)"
	}
	return *s
}
