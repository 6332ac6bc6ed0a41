package tests

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

// A producer is a service's transaction with one of the three ways in.
type producer struct {
	enqueue  func(bizType string, payload any, opts ...outbox.Option) (outbox.Ref, error)
	exec     func(sql string) error
	commit   func() error
	rollback func() error
}

func pgxProducer(t *testing.T, pool *pgxpool.Pool, o pgx.TxOptions) producer {
	t.Helper()
	ctx := t.Context()
	tx, err := pool.BeginTx(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return producer{
		enqueue: func(bizType string, payload any, opts ...outbox.Option) (outbox.Ref, error) {
			return outbox.Enqueue(ctx, tx, bizType, payload, opts...)
		},
		exec:     func(sql string) error { _, err := tx.Exec(ctx, sql); return err },
		commit:   func() error { return tx.Commit(ctx) },
		rollback: func() error { return tx.Rollback(ctx) },
	}
}

func sqlProducer(t *testing.T, db *sql.DB, o *sql.TxOptions) producer {
	t.Helper()
	ctx := t.Context()
	tx, err := db.BeginTx(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	return producer{
		enqueue: func(bizType string, payload any, opts ...outbox.Option) (outbox.Ref, error) {
			return outbox.EnqueueSQL(ctx, tx, bizType, payload, opts...)
		},
		exec:     func(sql string) error { _, err := tx.ExecContext(ctx, sql); return err },
		commit:   tx.Commit,
		rollback: tx.Rollback,
	}
}

// plainProducer is a service in any language: it knows the table only.
func plainProducer(t *testing.T, pool *pgxpool.Pool) producer {
	p := pgxProducer(t, pool, pgx.TxOptions{})
	exec := p.exec
	p.enqueue = func(bizType string, payload any, _ ...outbox.Option) (outbox.Ref, error) {
		return outbox.Ref{}, exec(fmt.Sprintf("INSERT INTO taskrelay.task (biz_type, payload) VALUES ('%s', '%s')", bizType, payload))
	}
	return p
}

func sqlDB(t *testing.T, url string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// modes is every way in which pgx may send a statement.
func modes(t *testing.T, db *testenv.Database) map[string]*pgxpool.Pool {
	t.Helper()
	pools := map[string]*pgxpool.Pool{}
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		cfg, err := pgxpool.ParseConfig(db.URL)
		if err != nil {
			t.Fatal(err)
		}
		switch mode {
		case "cache_describe":
			cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		case "describe_exec":
			cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeDescribeExec
		case "exec":
			cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
		case "simple_protocol":
			cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		}
		cfg.MaxConns = 3
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		pools[mode] = pool
	}
	return pools
}

func noError(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func TestTaskExistsIfAndOnlyIfItsTransactionCommits(t *testing.T) {
	db := testenv.DB(t)
	db.Exec(t, "CREATE TABLE orders (id int PRIMARY KEY)")
	std := sqlDB(t, db.URL)
	for name, begin := range map[string]func() producer{
		"pgx":          func() producer { return pgxProducer(t, db.Pool, pgx.TxOptions{}) },
		"database/sql": func() producer { return sqlProducer(t, std, nil) },
		"plain SQL":    func() producer { return plainProducer(t, db.Pool) },
	} {
		t.Run(name, func(t *testing.T) {
			db.Exec(t, "TRUNCATE orders")
			db.Exec(t, "DELETE FROM taskrelay.task")
			add := func(p producer, n int) {
				t.Helper()
				noError(t, "business row", p.exec(fmt.Sprintf("INSERT INTO orders VALUES (%d)", n)))
				_, err := p.enqueue("ORDER_PAYMENT", fmt.Sprintf(`{"order":%d}`, n))
				noError(t, "enqueue", err)
			}

			p := begin()
			add(p, 1)
			noError(t, "commit", p.commit())

			p = begin()
			add(p, 2)
			noError(t, "rollback", p.rollback())

			p = begin()
			add(p, 3)
			noError(t, "savepoint", p.exec("SAVEPOINT a"))
			add(p, 4)
			noError(t, "back to savepoint", p.exec("ROLLBACK TO SAVEPOINT a"))
			noError(t, "savepoint", p.exec("SAVEPOINT b"))
			add(p, 5)
			noError(t, "release", p.exec("RELEASE SAVEPOINT b"))
			noError(t, "commit", p.commit())

			p = begin()
			noError(t, "savepoint", p.exec("SAVEPOINT c"))
			add(p, 6)
			noError(t, "release", p.exec("RELEASE SAVEPOINT c"))
			noError(t, "rollback", p.rollback())

			got := db.Text(t, "SELECT string_agg(payload->>'order', ',' ORDER BY id) FROM taskrelay.task")
			equal(t, "orders with a task", got, "1,3,5")
			equal(t, "orders", db.Text(t, "SELECT string_agg(id::text, ',' ORDER BY id) FROM orders"), "1,3,5")
		})
	}
}

// Field case C-006: a byte slice must not arrive as base64, nor a string as a quoted string.
func TestOneDocumentIsTheSameThroughEveryDoor(t *testing.T) {
	db := testenv.DB(t)
	const doc = `{"id":1970670598291982290,"amount":12345678901234567890.10,"memo":"it's \"x\" \\ <b>\u0000 ü"}`
	type payment struct {
		ID     int64       `json:"id"`
		Amount json.Number `json:"amount"`
		Memo   string      `json:"memo"`
	}
	type producers = map[string]func() producer
	begin := producers{
		"database/sql": func() producer { return sqlProducer(t, sqlDB(t, db.URL), nil) },
		"database/sql, simple": func() producer {
			return sqlProducer(t, sqlDB(t, db.URL+"&default_query_exec_mode=simple_protocol"), nil)
		},
		"database/sql, exec": func() producer { return sqlProducer(t, sqlDB(t, db.URL+"&default_query_exec_mode=exec"), nil) },
		"database/sql of a pool": func() producer {
			return sqlProducer(t, stdlib.OpenDBFromPool(db.Pool), nil)
		},
	}
	for mode, pool := range modes(t, db) {
		begin["pgx, "+mode] = func() producer { return pgxProducer(t, pool, pgx.TxOptions{}) }
	}
	if !strings.Contains(db.URL, "?") {
		t.Fatalf("the test appends to the URL's parameters: %s", db.URL)
	}
	due := time.Date(2099, 12, 31, 23, 59, 59, 999_999_000, time.UTC)
	for door, begin := range begin {
		p := begin()
		for name, payload := range map[string]any{
			"bytes": []byte(doc), "raw": json.RawMessage(doc), "string": doc,
			"struct": payment{1970670598291982290, "12345678901234567890.10", "it's \"x\" \\ <b>\x00 ü"},
		} {
			bizID := door + "/" + name + "'$1"
			ref, err := p.enqueue("T", payload, outbox.BizID(bizID), outbox.High(), outbox.At(due), outbox.MaxAttempts(7),
				outbox.Header("tenant", `o'neill \ "x" ü`))
			noError(t, bizID, err)
			again, err := p.enqueue("T", payload, outbox.BizID(bizID))
			noError(t, bizID, err)
			equal(t, bizID, again, outbox.Ref{ID: ref.ID})
			bare, err := p.enqueue("T", nil)
			noError(t, door, err)
			noError(t, door, p.exec("SELECT 1"))
			if !ref.New || !bare.New || bare.ID <= ref.ID {
				t.Errorf("%s: got %+v, then %+v", bizID, ref, bare)
			}
		}
		noError(t, door, p.commit())
	}
	equal(t, "differing rows", db.Text(t, `SELECT string_agg(t::text, E'\n') FROM taskrelay.task AS t WHERE biz_id IS NOT NULL
		AND NOT (payload::text = $1 AND priority = 'high' AND run_at = $2 AND max_attempts = 7 AND headers = '{"tenant": "o''neill \\ \"x\" ü"}')`,
		doc, due), "")
	equal(t, "differing bare rows", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_id IS NULL
		AND NOT (payload::text = '{}' AND priority = 'low' AND run_at IS NULL AND max_attempts IS NULL AND headers = '{}')`), 0)
	equal(t, "rows", db.Int(t, "SELECT count(*) FROM taskrelay.task"), int64(len(begin)*8))
}

// Field case C-038 and the promise of one statement.
func TestEnqueueIsOneStatementWithoutSavepoints(t *testing.T) {
	db := testenv.DB(t)
	cfg := db.Pool.Config()
	trace := &statements{}
	cfg.ConnConfig.Tracer = trace
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	noError(t, "pool", err)
	t.Cleanup(pool.Close)

	p := pgxProducer(t, pool, pgx.TxOptions{})
	trace.reset()
	_, err = p.enqueue("T", nil, outbox.BizID("1"))
	noError(t, "enqueue", err)
	equal(t, "statements of a new task", trace.names(), "-- taskrelay: enqueue")
	trace.reset()
	_, err = p.enqueue("T", nil, outbox.BizID("1"))
	noError(t, "enqueue", err)
	equal(t, "statements of a duplicate", trace.names(), "-- taskrelay: enqueue; -- taskrelay: enqueue, existing")
}

type statements struct {
	mu  sync.Mutex
	all []string
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	name, _, _ := strings.Cut(d.SQL, "\n")
	s.all = append(s.all, name)
	return ctx
}
func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (s *statements) reset()                                                          { s.mu.Lock(); s.all = nil; s.mu.Unlock() }
func (s *statements) names() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.all, "; ")
}

// waitBlocked waits until a session waits for another one's transaction.
func waitBlocked(t *testing.T, db *testenv.Database) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		var n int
		err := db.Pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '-- taskrelay: enqueue%'`).Scan(&n)
		if err == nil && n == 0 {
			err = errors.New("nobody waits")
		}
		return err
	})
}

// Field case C-041: whoever is told "exists already" can rely on it.
func TestDuplicateOfAnOpenTransactionIsToldTheTruth(t *testing.T) {
	db := testenv.DB(t)
	std := sqlDB(t, db.URL)
	rr, stdRR := pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, &sql.TxOptions{Isolation: sql.LevelRepeatableRead}
	many := func(o pgx.TxOptions) func(t *testing.T) producer {
		return func(t *testing.T) producer {
			p := pgxProducer(t, db.Pool, o)
			tx, err := db.Pool.BeginTx(t.Context(), o)
			noError(t, "begin", err)
			t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
			p.enqueue = func(bizType string, payload any, opts ...outbox.Option) (outbox.Ref, error) {
				refs, err := outbox.EnqueueMany(t.Context(), tx, []outbox.NewTask{
					{BizType: bizType}, {BizType: bizType, Payload: payload, Options: opts}, {BizType: bizType}})
				if err != nil {
					return outbox.Ref{}, err
				}
				if !refs[0].New || !refs[2].New {
					t.Errorf("the neighbours: %+v", refs)
				}
				return refs[1], nil
			}
			p.exec = func(sql string) error { _, err := tx.Exec(t.Context(), sql); return err }
			p.commit = func() error { return tx.Commit(t.Context()) }
			return p
		}
	}
	for name, c := range map[string]struct {
		begin    func(t *testing.T) producer
		snapshot bool
	}{
		"pgx":                           {func(t *testing.T) producer { return pgxProducer(t, db.Pool, pgx.TxOptions{}) }, false},
		"database/sql":                  {func(t *testing.T) producer { return sqlProducer(t, std, nil) }, false},
		"many":                          {many(pgx.TxOptions{}), false},
		"pgx, repeatable read":          {func(t *testing.T) producer { return pgxProducer(t, db.Pool, rr) }, true},
		"database/sql, repeatable read": {func(t *testing.T) producer { return sqlProducer(t, std, stdRR) }, true},
		"many, repeatable read":         {many(rr), true},
		"pgx, serializable":             {func(t *testing.T) producer { return pgxProducer(t, db.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}) }, true},
	} {
		for _, end := range []string{"rollback", "commit"} {
			t.Run(name+", "+end, func(t *testing.T) {
				bizID := outbox.BizID(t.Name())
				first := pgxProducer(t, db.Pool, pgx.TxOptions{})
				one, err := first.enqueue("T", `{"from":"first"}`, bizID)
				noError(t, "first", err)

				second := c.begin(t)
				type answer struct {
					ref outbox.Ref
					err error
				}
				answers := make(chan answer, 1)
				go func() {
					ref, err := second.enqueue("T", `{"from":"second"}`, bizID)
					answers <- answer{ref, err}
				}()
				waitBlocked(t, db)
				if end == "commit" {
					noError(t, "commit", first.commit())
				} else {
					noError(t, "rollback", first.rollback())
				}
				got := <-answers

				switch {
				case end == "rollback":
					noError(t, "second", got.err)
					if !got.ref.New || got.ref.ID == one.ID {
						t.Errorf("got %+v after a rollback of %+v", got.ref, one)
					}
					noError(t, "commit of the second", second.commit())
					equal(t, "payload", db.Text(t, "SELECT payload::text FROM taskrelay.task WHERE biz_id = $1", t.Name()), `{"from":"second"}`)
				case c.snapshot:
					var pg *pgconn.PgError
					if !errors.As(got.err, &pg) || pg.Code != "40001" {
						t.Errorf("got %+v, %v, want SQLSTATE 40001", got.ref, got.err)
					}
				default:
					noError(t, "second", got.err)
					equal(t, "second", got.ref, outbox.Ref{ID: one.ID})
					noError(t, "go on", second.exec("SELECT 1"))
					noError(t, "commit of the second", second.commit())
				}
				equal(t, "rows", db.Int(t, "SELECT count(*) FROM taskrelay.task WHERE biz_id = $1", t.Name()), 1)
			})
		}
	}
}

// Field cases C-042 and C-043: one rule for each state. The biz id is taken until the row is gone.
func TestBizIDIsTakenUntilTheRowIsGone(t *testing.T) {
	db := testenv.DB(t)
	p := pgxProducer(t, db.Pool, pgx.TxOptions{})
	for _, set := range []string{
		"status = 'succeeded', finished_at = now()",
		"status = 'cancelled', finished_at = now()",
		"status = 'dead', finished_at = now(), dead_at = now()",
		"status = 'retrying'",
		"status = 'running', lease_until = now()",
	} {
		bizID := outbox.BizID(set)
		first, err := p.enqueue("T", nil, bizID)
		noError(t, set, err)
		noError(t, set, p.exec(fmt.Sprintf("UPDATE taskrelay.task SET %s WHERE id = %d", set, first.ID)))
		again, err := p.enqueue("T", nil, bizID)
		noError(t, set, err)
		equal(t, set, again, outbox.Ref{ID: first.ID})
		noError(t, set, p.exec(fmt.Sprintf("DELETE FROM taskrelay.task WHERE id = %d", first.ID)))
		anew, err := p.enqueue("T", nil, bizID)
		noError(t, set, err)
		if !anew.New || anew.ID == first.ID {
			t.Errorf("%s: after the row was deleted: %+v", set, anew)
		}
		other, err := p.enqueue("T2", nil, bizID)
		noError(t, set, err)
		equal(t, "the same biz id of another type is new", other.New, true)
	}
	noError(t, "commit", p.commit())
}

func TestRowsDeletedMeanwhileAreInsertedAgain(t *testing.T) {
	db := testenv.DB(t)
	ctx, stop := context.WithCancel(t.Context())
	var deleter sync.WaitGroup
	deleter.Go(func() {
		for ctx.Err() == nil {
			_, _ = db.Pool.Exec(ctx, "DELETE FROM taskrelay.task WHERE biz_id = 'x'")
		}
	})
	made := 0
	for range 300 {
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			refs, err := outbox.EnqueueMany(t.Context(), tx, []outbox.NewTask{{BizType: "T", Options: []outbox.Option{outbox.BizID("x")}}, {BizType: "T"}})
			if err != nil || refs[0].ID == 0 || !refs[1].New {
				return fmt.Errorf("many: %+v, %w", refs, err)
			}
			ref, err := outbox.Enqueue(t.Context(), tx, "T", nil, outbox.BizID("x"))
			if err != nil || ref.ID == 0 {
				return fmt.Errorf("enqueue: %+v, %w", ref, err)
			}
			if refs[0].New {
				made++
			}
			return nil
		})
		noError(t, "transaction", err)
	}
	stop()
	deleter.Wait()
	if made == 0 {
		t.Error("nothing was ever deleted: the test shows nothing")
	}
}

// Field cases C-001, C-008, C-010, C-011: the business transaction survives every refusal.
func TestBadInputLeavesTheTransactionUsable(t *testing.T) {
	db := testenv.DB(t)
	std := sqlDB(t, db.URL)
	for name, p := range map[string]producer{"pgx": pgxProducer(t, db.Pool, pgx.TxOptions{}), "database/sql": sqlProducer(t, std, nil)} {
		for what, try := range map[string]func() (outbox.Ref, error){
			"type":    func() (outbox.Ref, error) { return p.enqueue("order.created", nil) },
			"payload": func() (outbox.Ref, error) { return p.enqueue("T", "{") },
			"size":    func() (outbox.Ref, error) { return p.enqueue("T", `"`+strings.Repeat("x", 512<<10)+`"`) },
			"depth": func() (outbox.Ref, error) {
				return p.enqueue("T", strings.Repeat("[", 20_000)+strings.Repeat("]", 20_000))
			},
			"biz id": func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.BizID(strings.Repeat("x", 6000))) },
			"NUL":    func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.BizID("a\x00")) },
			"header": func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.Header("a", "\x00")) },
			"year": func() (outbox.Ref, error) {
				return p.enqueue("T", nil, outbox.At(time.Date(300_000, 1, 1, 0, 0, 0, 0, time.UTC)))
			},
			"attempts":      func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.MaxAttempts(0)) },
			"ordering key":  func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.OrderingKey("k")) },
			"invalid UTF-8": func() (outbox.Ref, error) { return p.enqueue("T", map[string]string{"a": "\xff"}) },
		} {
			if ref, err := try(); err == nil {
				t.Errorf("%s, %s: got %+v", name, what, ref)
			}
			noError(t, name+", after "+what, p.exec("SELECT 1"))
		}
		noError(t, name, p.commit())
	}
	equal(t, "rows", db.Int(t, "SELECT count(*) FROM taskrelay.task"), 0)
}

// What the client lets through the server must take: the limits are the same on both sides.
func TestLimitsAgreeWithTheTable(t *testing.T) {
	db := testenv.DB(t)
	p := pgxProducer(t, db.Pool, pgx.TxOptions{})
	deep := strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000)
	for what, try := range map[string]func() (outbox.Ref, error){
		"type of 63":    func() (outbox.Ref, error) { return p.enqueue(strings.Repeat("A", 63), nil) },
		"biz id of 255": func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.BizID("é"+strings.Repeat("x", 253))) },
		"odd biz id":    func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.BizID(" \u0085 \u2028\ufeff'\"\\%_ ")) },
		"512 KiB":       func() (outbox.Ref, error) { return p.enqueue("T", `"`+strings.Repeat("x", 512<<10-2)+`"`) },
		"512 KiB, wide": func() (outbox.Ref, error) { return p.enqueue("T", `"`+strings.Repeat("é", 256<<10-1)+`"`) },
		"10,000 deep":   func() (outbox.Ref, error) { return p.enqueue("T", deep) },
		"big exponent":  func() (outbox.Ref, error) { return p.enqueue("T", `[1e999999,-0.0,1E+400]`) },
		"escapes":       func() (outbox.Ref, error) { return p.enqueue("T", `["\u0000","\ud800","\udc00\ud800","\/\b\f"]`) },
		"spaces":        func() (outbox.Ref, error) { return p.enqueue("T", " \r\n\t{}\n ") },
		"equal keys":    func() (outbox.Ref, error) { return p.enqueue("T", `{"a":1,"a":2}`) },
		"the first year": func() (outbox.Ref, error) {
			return p.enqueue("T", nil, outbox.At(time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC)))
		},
		"the last year": func() (outbox.Ref, error) {
			return p.enqueue("T", nil, outbox.At(time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)))
		},
		"290 years":     func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.In(1<<63-1)) },
		"1000 attempts": func() (outbox.Ref, error) { return p.enqueue("T", nil, outbox.MaxAttempts(1000)) },
		"all headers": func() (outbox.Ref, error) {
			return p.enqueue("T", nil, outbox.Header("a", strings.Repeat("\t", 48<<10-1)))
		},
	} {
		if _, err := try(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	noError(t, "commit", p.commit())
	equal(t, "the deep one", db.Text(t, "SELECT payload::text FROM taskrelay.task WHERE left(payload::text, 3) = '[[['"), deep)
}

// Field cases C-013 and C-016: one clock, and no session setting changes an instant.
func TestDueTimesDoNotDependOnClientClockOrSession(t *testing.T) {
	db := testenv.DB(t)
	for _, zone := range []string{"Asia/Kolkata", "America/St_Johns", "UTC"} {
		for mode, pool := range modes(t, db) {
			p := pgxProducer(t, pool, pgx.TxOptions{})
			noError(t, zone, p.exec("SET LOCAL TimeZone = '"+zone+"'; SET LOCAL DateStyle = 'SQL, DMY'; SET LOCAL IntervalStyle = 'sql_standard'"))
			at, err := p.enqueue("T", nil, outbox.At(time.Date(2031, 3, 2, 1, 0, 0, 1000, time.FixedZone("", 5*3600+1800))))
			noError(t, zone, err)
			in, err := p.enqueue("T", nil, outbox.In(36*time.Hour+1500*time.Microsecond))
			noError(t, zone, err)
			now, err := p.enqueue("T", nil, outbox.In(0))
			noError(t, zone, err)
			noError(t, zone, p.commit())
			equal(t, mode+", At in "+zone, db.Text(t, "SELECT (run_at AT TIME ZONE 'UTC')::text FROM taskrelay.task WHERE id = $1", at.ID), "2031-03-01 19:30:00.000001")
			// Both columns read the clock, within one row: microseconds apart.
			if µs := db.Int(t, "SELECT (abs(extract(epoch FROM run_at - created_at) - 129600.0015) * 1000000)::bigint FROM taskrelay.task WHERE id = $1", in.ID); µs > 50_000 {
				t.Errorf("%s, In, %s: %d µs off", mode, zone, µs)
			}
			equal(t, "In(0)", db.Text(t, "SELECT run_at::text FROM taskrelay.task WHERE id = $1", now.ID), "")
		}
	}
}

func TestPriorityIsTheTypesUnlessNamed(t *testing.T) {
	db := testenv.DB(t)
	db.Exec(t, "INSERT INTO taskrelay.biz_type (biz_type, default_priority) VALUES ('URGENT', 'high'), ('PLAIN', NULL)")
	p := pgxProducer(t, db.Pool, pgx.TxOptions{})
	for _, c := range []struct {
		bizType string
		opts    []outbox.Option
		want    string
	}{
		{"URGENT", nil, "high"}, {"URGENT", []outbox.Option{outbox.Low()}, "low"}, {"URGENT", []outbox.Option{outbox.High()}, "high"},
		{"PLAIN", nil, "low"}, {"PLAIN", []outbox.Option{outbox.High()}, "high"}, {"NEW", nil, "low"},
	} {
		ref, err := p.enqueue(c.bizType, nil, c.opts...)
		noError(t, c.bizType, err)
		task, err := outbox.Get(t.Context(), db.Pool, ref.ID)
		if !errors.Is(err, outbox.ErrNotFound) {
			t.Fatalf("a task that is not committed: %+v, %v", task, err)
		}
		noError(t, "check", p.exec(fmt.Sprintf("DO $$ BEGIN ASSERT (SELECT priority = '%s' FROM taskrelay.task WHERE id = %d); END $$", c.want, ref.ID)))
	}
}

// Requirement B52: in strict mode an unlisted type is refused when it is created.
func TestStrictTypesRefuseTheUnknown(t *testing.T) {
	db := testenv.DB(t)
	db.Exec(t, "UPDATE taskrelay.installation SET strict_types = true")
	db.Exec(t, "INSERT INTO taskrelay.biz_type (biz_type, known_by) VALUES ('KNOWN', 'worker-1'), ('SET_UP_ONLY', NULL)")
	std := sqlDB(t, db.URL)
	for name, p := range map[string]producer{"pgx": pgxProducer(t, db.Pool, pgx.TxOptions{}), "database/sql": sqlProducer(t, std, nil)} {
		for _, unknown := range []string{"UNKNOWN", "SET_UP_ONLY", "known"} {
			for _, opts := range [][]outbox.Option{nil, {outbox.BizID("1")}} {
				_, err := p.enqueue(unknown, nil, opts...)
				if !errors.Is(err, outbox.ErrUnknownType) || !strings.Contains(err.Error(), unknown) || !strings.Contains(err.Error(), "taskrelay.set_type(") {
					t.Errorf("%s, %s: got %v", name, unknown, err)
				}
			}
		}
		ref, err := p.enqueue("KNOWN", nil)
		noError(t, name, err)
		equal(t, name, ref.New, true)
		noError(t, name, p.commit())
	}

	tx, err := db.Pool.Begin(t.Context())
	noError(t, "begin", err)
	defer tx.Rollback(t.Context())
	_, err = outbox.EnqueueMany(t.Context(), tx, []outbox.NewTask{{BizType: "KNOWN"}, {BizType: "KNOWN", Options: []outbox.Option{outbox.BizID("x")}}, {BizType: "UNKNOWN"}})
	if !errors.Is(err, outbox.ErrUnknownType) || !strings.Contains(err.Error(), "task 2") {
		t.Errorf("many: got %v", err)
	}
	noError(t, "commit", tx.Commit(t.Context()))
	equal(t, "rows", db.Int(t, "SELECT count(*) FROM taskrelay.task"), 2)
}

// Field case C-071: the documented grants are enough, with any search path.
func TestProducerRoleIsEnough(t *testing.T) {
	db := testenv.DB(t)
	p := pgxProducer(t, db.Pool, pgx.TxOptions{})
	noError(t, "role", p.exec("SET LOCAL ROLE taskrelay_producer; SET LOCAL search_path = ''"))
	ref, err := p.enqueue("T", nil, outbox.BizID("1"), outbox.In(time.Hour), outbox.MaxAttempts(2), outbox.Header("a", "b"))
	noError(t, "enqueue", err)
	again, err := p.enqueue("T", nil, outbox.BizID("1"))
	noError(t, "duplicate", err)
	equal(t, "duplicate", again, outbox.Ref{ID: ref.ID})
	noError(t, "commit", p.commit())

	tx, err := db.Pool.Begin(t.Context())
	noError(t, "begin", err)
	defer tx.Rollback(t.Context())
	_, err = tx.Exec(t.Context(), "SET LOCAL ROLE taskrelay_producer; SET LOCAL search_path = ''")
	noError(t, "role", err)
	refs, err := outbox.EnqueueMany(t.Context(), tx, []outbox.NewTask{{BizType: "T", Options: []outbox.Option{outbox.BizID("1")}}, {BizType: "T"}})
	noError(t, "many", err)
	equal(t, "many", refs[0], outbox.Ref{ID: ref.ID})
	noError(t, "commit", tx.Commit(t.Context()))
}

func TestSchemasAreApart(t *testing.T) {
	db := testenv.DB(t)
	_, err := schema.Migrate(t.Context(), db.Pool, schema.Options{Schema: "eu_2"})
	noError(t, "migrate", err)
	eu := outbox.Schema("eu_2")
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		ref, err := eu.Enqueue(t.Context(), tx, "T", `{"at":"eu"}`, outbox.BizID("1"))
		if err != nil {
			return err
		}
		refs, err := eu.EnqueueMany(t.Context(), tx, []outbox.NewTask{{BizType: "T", Options: []outbox.Option{outbox.BizID("1")}}})
		if err != nil {
			return err
		}
		equal(t, "duplicate", refs[0], outbox.Ref{ID: ref.ID})
		task, err := eu.Get(t.Context(), tx, ref.ID)
		equal(t, "payload", string(task.Payload), `{"at":"eu"}`)
		return err
	})
	noError(t, "transaction", err)
	equal(t, "rows of the default schema", db.Int(t, "SELECT count(*) FROM taskrelay.task"), 0)
	_, err = outbox.Schema("no such").Get(t.Context(), db.Pool, 1)
	if err == nil || !strings.Contains(err.Error(), "schema name") {
		t.Errorf("a bad name: got %v", err)
	}
}
