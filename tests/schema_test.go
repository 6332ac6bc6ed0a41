package tests

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/schema"
)

func TestEightMigrationsAtOnceAllSucceed(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDB(t)
	applied := make([][]int64, 8)
	errs := make([]error, 8)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			pool := openPool(t, db.URL, nil)
			applied[i], errs[i] = schema.Migrate(t.Context(), pool, schema.Options{})
		})
	}
	wg.Wait()
	var all []int64
	for i := range 8 {
		if errs[i] != nil {
			t.Errorf("migration %d: %v", i, errs[i])
		}
		all = append(all, applied[i]...)
	}
	equal(t, "steps applied by all eight", len(all), schema.Version)
	if err := schema.Validate(t.Context(), db.Pool, schema.Options{}); err != nil {
		t.Error(err)
	}
}

// The same with real processes, which share nothing.
func TestEightProcessesMigrateAtOnce(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDB(t)
	var ps []*testenv.Process
	for range 8 {
		ps = append(ps, testenv.Start(t, "taskrelay", []string{"migrate", "up"}, "TASKRELAY_DATABASE_URL="+db.URL))
	}
	for _, p := range ps {
		if code := p.Wait(t, soon); code != 0 {
			t.Errorf("exit code %d: %s", code, p.Logs())
		}
	}
	if err := schema.Validate(t.Context(), db.Pool, schema.Options{}); err != nil {
		t.Error(err)
	}
}

func TestMigratingTwiceChangesNothing(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	before := dump(t, db.URL)
	applied, err := schema.Migrate(t.Context(), db.Pool, schema.Options{})
	if err != nil || len(applied) > 0 {
		t.Errorf("got %v, %v, want nothing to do", applied, err)
	}
	if dump(t, db.URL) != before {
		t.Error("the second migration changed the schema")
	}
}

func TestPlainFileEqualsMigrateUp(t *testing.T) {
	t.Parallel()
	migrated, plain := testenv.DB(t), testenv.EmptyDB(t)
	out, err := exec.Command("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", filepath.Join(testenv.Root(), "schema", "taskrelay.sql"), plain.URL).CombinedOutput()
	if err != nil {
		t.Fatalf("psql: %v: %s", err, out)
	}
	if got, want := dump(t, plain.URL), dump(t, migrated.URL); got != want {
		t.Errorf("pg_dump differs:\n%s", firstDifference(got, want))
	}
	const versions = `SELECT string_agg(version_id || ' ' || is_applied, ',' ORDER BY id) FROM taskrelay.schema_version`
	equal(t, "version rows", plain.Text(t, versions), migrated.Text(t, versions))
	applied, err := schema.Migrate(t.Context(), plain.Pool, schema.Options{})
	if err != nil || len(applied) > 0 {
		t.Errorf("migrate up after the file: got %v, %v, want nothing to do", applied, err)
	}
	// A second run stops at the start instead of half way through.
	if out, err := exec.Command("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", filepath.Join(testenv.Root(), "schema", "taskrelay.sql"), plain.URL).CombinedOutput(); err == nil {
		t.Errorf("the file ran twice: %s", out)
	}
	if got, want := dump(t, plain.URL), dump(t, migrated.URL); got != want {
		t.Error("the refused second run changed the schema")
	}
}

// No name is looked up in the search path, so nothing of ours lands in, or is found in, another schema.
func TestTwoInstallationsLiveInOneDatabase(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDB(t)
	pool := openPool(t, db.URL, func(c *pgxpool.Config) {
		c.MaxConns = 1 // Migrate must not wait for a second connection of the pool
		c.ConnConfig.RuntimeParams["search_path"] = ""
	})
	for _, name := range []string{"one", "two_2"} {
		if _, err := schema.Migrate(t.Context(), pool, schema.Options{Schema: name}); err != nil {
			t.Fatal(err)
		}
		if err := schema.Validate(t.Context(), pool, schema.Options{Schema: name}); err != nil {
			t.Error(err)
		}
	}
	db.Exec(t, `SELECT one.enqueue('A', biz_id => 'x'); SELECT two_2.enqueue('A', biz_id => 'x'); SELECT two_2.cancel(1, 'test')`)
	equal(t, "tasks of one", db.Int(t, `SELECT count(*) FROM one.task WHERE status = 'pending'`), 1)
	equal(t, "tasks of two", db.Int(t, `SELECT count(*) FROM two_2.task WHERE status = 'cancelled'`), 1)
	equal(t, "objects elsewhere", db.Int(t, `SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace`), 0)

	for _, name := range []string{"user", "order", "Tasks", "a-b"} {
		if _, err := schema.Migrate(t.Context(), pool, schema.Options{Schema: name}); err == nil {
			t.Errorf("schema %q is accepted", name)
		}
	}
}

func TestValidateNamesTheCommandThatMends(t *testing.T) {
	t.Parallel()
	empty, db := testenv.EmptyDB(t), testenv.DB(t)
	check := func(d *testenv.Database, want string) {
		t.Helper()
		got := fmt.Sprint(schema.Validate(t.Context(), d.Pool, schema.Options{}))
		equal(t, "Validate", got, want)
	}
	check(empty, `schema "taskrelay" has no taskrelay tables: run "taskrelay migrate up"`)
	if ms, err := schema.Status(t.Context(), empty.Pool, schema.Options{}); err != nil || len(ms) != schema.Version || ms[0].Applied() {
		t.Errorf("Status of an empty database: %v, %v", ms, err)
	}
	equal(t, "schemas made by looking", empty.Int(t, `SELECT count(*) FROM pg_namespace WHERE nspname = 'taskrelay'`), 0)
	check(db, "<nil>")
	db.Exec(t, `INSERT INTO taskrelay.schema_version (version_id, is_applied) VALUES (99, true)`)
	check(db, "<nil>") // expand/contract: a newer schema still serves this binary
	ms, err := schema.Status(t.Context(), db.Pool, schema.Options{})
	if err != nil || len(ms) != schema.Version+1 || ms[schema.Version].Version != 99 || !ms[0].Applied() {
		t.Errorf("Status of a newer database: %v, %v", ms, err)
	}
	if applied, err := schema.Migrate(t.Context(), db.Pool, schema.Options{}); err != nil || len(applied) > 0 {
		t.Errorf("Migrate of a newer schema: got %v, %v, want nothing to do", applied, err)
	}
	db.Exec(t, `DELETE FROM taskrelay.schema_version WHERE version_id > 2`)
	check(db, fmt.Sprintf(`schema "taskrelay" is at version 2, this binary needs %d: run "taskrelay migrate up"`, schema.Version))
	db.Exec(t, `CREATE ROLE nobody_of_ours LOGIN PASSWORD 'x'`)
	t.Cleanup(func() { _, _ = empty.Pool.Exec(context.Background(), `DROP ROLE nobody_of_ours`) })
	pool := openPool(t, db.URL, func(c *pgxpool.Config) { c.AfterConnect = setRole("nobody_of_ours") })
	if err := schema.Validate(t.Context(), pool, schema.Options{}); err == nil || !strings.Contains(err.Error(), "taskrelay_worker") {
		t.Errorf("got %v, want an error that names the roles", err)
	}
}

// A user who may not create roles gets everything else, and the SQL for somebody who may.
func TestMigrationWithoutRightToCreateRoles(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDB(t)
	db.Exec(t, `CREATE ROLE plain_owner LOGIN PASSWORD 'x'; GRANT CREATE ON DATABASE `+db.Name+` TO plain_owner`)
	opts := schema.Options{Schema: "without_roles"}
	t.Cleanup(func() {
		ctx := context.Background()
		_, _ = db.Pool.Exec(ctx, `DROP SCHEMA IF EXISTS without_roles CASCADE; REVOKE ALL ON DATABASE `+db.Name+` FROM plain_owner; DROP ROLE plain_owner`)
		dropRoles(db, "without_roles")
	})
	pool := openPool(t, db.URL, func(c *pgxpool.Config) {
		c.ConnConfig.User, c.ConnConfig.Password = "plain_owner", "x"
	})
	var log strings.Builder
	opts.Logger = zerolog.New(&log)
	if _, err := schema.Migrate(t.Context(), pool, opts); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), "CREATE ROLE without_roles_producer NOLOGIN;") {
		t.Errorf("the log does not show the SQL: %s", log.String())
	}
	missing, err := schema.MissingRoles(t.Context(), pool, opts)
	if err != nil || len(missing) != 5 {
		t.Errorf("missing roles: %v, %v", missing, err)
	}
	sql, err := schema.RolesSQL(opts)
	if err != nil {
		t.Fatal(err)
	}
	db.Exec(t, sql)
	db.Exec(t, sql) // again is no error
	missing, err = schema.MissingRoles(t.Context(), pool, opts)
	if err != nil || len(missing) != 0 {
		t.Errorf("missing roles after RolesSQL: %v, %v", missing, err)
	}
	equal(t, "producer may insert", db.Text(t, `SELECT has_column_privilege('without_roles_producer', 'without_roles.task', 'payload', 'INSERT')::text`), "true")
}

// Roles belong to the server: migrations of several databases make them at the same time.
func TestDatabasesMakeTheSameRolesAtOnce(t *testing.T) {
	t.Parallel()
	var dbs []*testenv.Database
	for range 4 {
		dbs = append(dbs, testenv.EmptyDB(t))
	}
	t.Cleanup(func() {
		for _, d := range dbs {
			_, _ = d.Pool.Exec(context.Background(), `DROP SCHEMA IF EXISTS same_roles CASCADE`)
		}
		dropRoles(dbs[0], "same_roles")
	})
	var wg sync.WaitGroup
	for _, d := range dbs {
		wg.Go(func() {
			if _, err := schema.Migrate(t.Context(), d.Pool, schema.Options{Schema: "same_roles"}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func openPool(t *testing.T, url string, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(cfg)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func dropRoles(db *testenv.Database, name string) {
	for _, r := range []string{"producer", "relay", "worker", "operator", "viewer"} {
		_, _ = db.Pool.Exec(context.Background(), `DROP ROLE IF EXISTS `+name+"_"+r)
	}
}

// dump is the schema as pg_dump sees it, without what differs from run to run.
func dump(t *testing.T, url string) string {
	t.Helper()
	cmd := exec.Command("pg_dump", "--schema-only", url)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("pg_dump: %v: %s", err, stderr.String())
	}
	return regexp.MustCompile(`(?m)^\\.*$`).ReplaceAllString(string(out), "")
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			return fmt.Sprintf("line %d: got %q, want %q", i+1, g[i], w[i])
		}
	}
	return fmt.Sprintf("%d lines, want %d", len(g), len(w))
}

// A pooler in transaction mode would let two migrations run at once. It is refused before anything is made, while
// everything else works through it.
func TestMigrateRefusesPoolerInTransactionMode(t *testing.T) {
	t.Parallel()
	bin := pgbouncer(t)
	db := testenv.EmptyDB(t)
	for _, mode := range []string{"default_pool_size=5", "default_pool_size=1", "server_round_robin=1"} {
		url := startBouncer(t, bin, db, "transaction", mode)
		_, err := schema.Migrate(t.Context(), openPool(t, url, nil), schema.Options{})
		if err == nil || !strings.Contains(err.Error(), "TASKRELAY_MIGRATE_DATABASE_URL") {
			t.Errorf("%s: got %v, want a refusal that names the variable", mode, err)
		}
	}
	equal(t, "schemas made", db.Int(t, `SELECT count(*) FROM pg_namespace WHERE nspname = 'taskrelay'`), 0)

	url := startBouncer(t, bin, db, "session", "")
	if _, err := schema.Migrate(t.Context(), openPool(t, url, nil), schema.Options{}); err != nil {
		t.Errorf("session mode: %v", err)
	}
	for _, mode := range []string{"exec", "simple_protocol"} {
		url := startBouncer(t, bin, db, "transaction", "") + "&default_query_exec_mode=" + mode
		if err := schema.Validate(t.Context(), openPool(t, url, nil), schema.Options{}); err != nil {
			t.Errorf("Validate by %s: %v", mode, err)
		}
	}
}

func startBouncer(t *testing.T, bin string, db *testenv.Database, mode, setting string) (url string) {
	t.Helper()
	cfg := db.Pool.Config().ConnConfig
	dir, err := os.MkdirTemp("", "bouncer") // t.TempDir is closed to the user nobody
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	port := freePort(t)
	ini := fmt.Sprintf(`[databases]
%s = host=127.0.0.1 port=%d user=%s password=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = %s
ignore_startup_parameters = extra_float_digits
%s
`, db.Name, cfg.Port, cfg.User, cfg.Password, port, mode, setting)
	file := filepath.Join(dir, "pgbouncer.ini")
	if err := os.WriteFile(file, []byte(ini), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	args := []string{file}
	if os.Getuid() == 0 { // it refuses root
		args = []string{"-u", "nobody", file}
	}
	cmd := exec.Command(bin, args...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	url = fmt.Sprintf("postgres://%s@127.0.0.1:%d/%s?sslmode=disable", cfg.User, port, db.Name)
	pool := openPool(t, url+"&default_query_exec_mode=exec", nil)
	testenv.Eventually(t, soon, func() error { return pool.Ping(t.Context()) })
	return url
}
