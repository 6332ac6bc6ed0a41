package tests

import (
	"errors"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/pgtemp"
	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Issue 5, item 7: each statement, and which of the shipped roles may run it. All the others are refused.
func TestPostgresRolesMayDoThisAndNoMore(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Insert(t, "A", "biz_id", "1", "payload", `{"a":1}`)
	roles := []string{"producer", "relay", "worker", "operator", "viewer"}
	pools := map[string]*pgxpool.Pool{}
	for _, role := range roles {
		pools[role] = asRole(t, db, "taskrelay_"+role)
	}
	for _, c := range []struct{ sql, may string }{
		{`INSERT INTO taskrelay.task (biz_type) VALUES ('A')`, "producer"},
		{`SELECT * FROM taskrelay.enqueue('A')`, "producer"},
		{`INSERT INTO taskrelay.task (biz_type, status) VALUES ('A', 'succeeded')`, ""},
		{`INSERT INTO taskrelay.task (biz_type, xid) VALUES ('A', '1')`, ""},
		{`SELECT id, status FROM taskrelay.task`, "producer relay worker operator"},
		{`SELECT payload FROM taskrelay.task`, "relay worker operator"},
		{`SELECT count(*) FROM taskrelay.task_view`, "operator viewer"},
		{`SELECT count(*) FROM taskrelay.attempt_view`, "operator viewer"},
		{`SELECT count(*) FROM taskrelay.dead`, "operator viewer"},
		{`SELECT count(*) FROM taskrelay.lag`, "relay operator viewer"},
		{`SELECT count(*) FROM taskrelay.stuck`, "relay operator viewer"},
		{`SELECT count(*) FROM taskrelay.audit`, "operator"},
		{`SELECT count(*) FROM taskrelay.types`, "operator viewer"},
		{`SELECT count(*) FROM taskrelay.bulk`, "operator viewer"},
		{`UPDATE taskrelay.task SET payload = '{}'`, ""},
		{`UPDATE taskrelay.task SET biz_id = 'x'`, ""},
		{`UPDATE taskrelay.task SET run_at = now()`, ""},
		{`UPDATE taskrelay.task SET created_at = now()`, ""},
		{`UPDATE taskrelay.task SET republish_at = now()`, "relay worker"},
		{`UPDATE taskrelay.task SET lease_token = 1`, "worker"},
		{`UPDATE taskrelay.task SET attempt = 0`, "worker"},
		{`UPDATE taskrelay.task SET xid = pg_current_xact_id()`, "relay"},
		{`DELETE FROM taskrelay.task`, ""},
		{`TRUNCATE taskrelay.task`, ""},
		{`DROP TABLE taskrelay.task_attempt`, ""},
		{`ALTER TABLE taskrelay.task DISABLE TRIGGER ALL`, ""},
		{`CREATE TABLE taskrelay.mine ()`, ""},
		{`DELETE FROM taskrelay.task_attempt`, ""},
		{`UPDATE taskrelay.lane SET at = now()`, "relay"},
		{`DELETE FROM taskrelay.lane`, "relay"},
		{`DELETE FROM taskrelay.worker`, "worker"},
		{`UPDATE taskrelay.installation SET id = gen_random_uuid()`, ""},
		{`UPDATE taskrelay.installation SET strict_types = true`, ""},
		{`UPDATE taskrelay.biz_type SET notifier = 'log'`, "worker"},
		{`SELECT * FROM taskrelay.set_type('A', '{}', 'x', add => true)`, "operator"},
		{`SELECT * FROM taskrelay.set_strict_types(true, 'x')`, "operator"},
		{`INSERT INTO taskrelay.audit (action) VALUES ('x')`, ""},
		{`UPDATE taskrelay.audit SET reason = 'other'`, ""},
		{`DELETE FROM taskrelay.audit`, ""},
		{`UPDATE taskrelay.retention SET dead = '1 s'`, "relay"},
		{`SELECT * FROM taskrelay.requeue(1, 'x')`, "operator"},
		{`SELECT * FROM taskrelay.reset('A', '1', 'x')`, "operator"},
		{`SELECT * FROM taskrelay.run_now(1, 'x')`, "operator"},
		{`SELECT * FROM taskrelay.delay(1, '1 h', 'x')`, "operator"},
		{`SELECT * FROM taskrelay.set_priority(1, 'high', 'x')`, "operator"},
		{`SELECT * FROM taskrelay.cancel(1, 'x')`, "operator"},
		{`SELECT * FROM taskrelay.cancel(1, 'x', false, true)`, "operator"},
		{`SELECT taskrelay.audit_consumer('A', 'A-low', 'x')`, "operator"},
		{`SELECT * FROM taskrelay.discard(1, 'x')`, "operator"},
		{`SELECT * FROM taskrelay.delete_task(1, 'x')`, "operator"},
		{`SELECT * FROM taskrelay.pause('A', 'x')`, "operator"},
		{`SELECT * FROM taskrelay.resume('A', 'x')`, "operator"},
		{`SELECT taskrelay.rescan('x')`, "operator"},
		{`SELECT taskrelay.replay_letters('x')`, "operator"},
		{`SELECT * FROM taskrelay.operate('delete', ARRAY[1], 'x')`, ""},
		{`SELECT * FROM taskrelay.bulk_step('me', '1 s')`, "relay"},
		{`SELECT * FROM taskrelay.forget_succeeded(ARRAY[1])`, "worker"},
		{`SELECT pg_read_file('/etc/passwd')`, ""},
		{`COPY taskrelay.task TO PROGRAM 'true'`, ""},
		{`CREATE ROLE mine`, ""},
	} {
		for _, role := range roles {
			want := slices.Contains(strings.Fields(c.may), role)
			if got, err := mayRun(t, pools[role], c.sql); err != nil {
				t.Errorf("%s: %s: neither done nor refused: %v", role, c.sql, err)
			} else if got != want {
				t.Errorf("may %s run %q: got %v, want %v", role, c.sql, got, want)
			}
		}
	}
}

// mayRun runs a statement and takes it back. Only a missing right is a refusal.
func mayRun(t *testing.T, pool *pgxpool.Pool, sql string) (bool, error) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), sql)
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == "42501" {
		return false, nil
	}
	return err == nil, err
}

// Nobody talks to a Postgres that cannot show whom it is, when the address asks for that.
func TestTLSToPostgresIsVerified(t *testing.T) {
	t.Parallel()
	ca, other := testenv.NewCA(t), testenv.NewCA(t)
	cert, key := ca.Issue(t, "postgres")
	ca.ForPostgres(t, key)
	s, err := pgtemp.Start(t.Context(), "", pgtemp.Options{Settings: map[string]string{"ssl": "on", "ssl_cert_file": cert, "ssl_key_file": key}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Stop() })
	address := func(host, ca string) string {
		u, err := url.Parse(s.URL)
		if err != nil {
			t.Fatal(err)
		}
		u.Host = host + ":" + u.Port()
		u.RawQuery = url.Values{"sslmode": {"verify-full"}, "sslrootcert": {ca}}.Encode()
		return u.String()
	}
	good := []string{"TASKRELAY_DATABASE_URL=" + address("127.0.0.1", ca.File)}
	runCLI(t, "", good, "migrate", "up").ok(t, 0)
	runCLI(t, "", good, "enqueue", "A").ok(t, 0)
	for what, c := range map[string]struct{ url, reason string }{
		"another authority": {address("127.0.0.1", other.File), "unknown authority"},
		"another host":      {address("localhost", ca.File), "not valid for any names"},
	} {
		run := runCLI(t, "", []string{"TASKRELAY_DATABASE_URL=" + c.url}, "list")
		run.ok(t, 7, c.reason)
		if secret, _ := url.Parse(c.url); strings.Contains(run.out+run.errOut, passwordOf(secret)) {
			t.Errorf("%s: the password is shown: %s", what, run.errOut)
		}
	}

	// The relay says why it waits, and does not send its password to the wrong server.
	e := testenv.NewEnv(t, &testenv.Database{URL: address("127.0.0.1", other.File)}, testenv.NATS(t))
	relay := e.StartRelay()
	relay.WaitLog(t, soon, "unknown authority")
	relay.Kill9(t)
	e = testenv.NewEnv(t, &testenv.Database{URL: address("127.0.0.1", ca.File)}, testenv.NATS(t))
	relay = e.StartRelay()
	relay.WaitLog(t, soon, `"component":"postgres","address":"127.0.0.1`)
	e.NATS.WaitStream(t, "TASKS")
}

func passwordOf(u *url.URL) string {
	p, _ := u.User.Password()
	return p
}
