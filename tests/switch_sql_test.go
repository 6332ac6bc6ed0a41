package tests

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// The functions behind the switches, as a person calls them from psql: guarded, and audited in the same transaction.
func TestSwitchFunctionsAreGuardedAndAudited(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	db.Insert(t, "SEEN") // by a task alone
	pool := asRole(t, db, "taskrelay_operator")
	call := func(sql string) string {
		t.Helper()
		var changed bool
		var whyNot *string
		if err := pool.QueryRow(t.Context(), `SELECT changed, why_not FROM taskrelay.`+sql).Scan(&changed, &whyNot); err != nil {
			return "error: " + err.Error()
		}
		if changed {
			return "changed"
		}
		return text(whyNot)
	}
	for _, c := range []struct{ sql, want string }{
		{`pause('NOPE', 'x')`, "no such biz type"},
		{`pause('SEEN', ' ')`, "a reason is required"},
		{`pause('SEEN', 'bank down')`, "changed"},
		{`pause('SEEN', 'again')`, "it is paused already, since"},
		{`resume('SEEN', 'bank back')`, "changed"},
		{`resume('SEEN', 'again')`, "it is not paused"},
		{`set_type('NOPE', '{"rate": 1}', 'x')`, "no such biz type"},
		{`set_type('SEEN', '{"rate": 12.5, "policy": {"strategy": "fixed", "base_delay": "1m30s"}}', 'x')`, "changed"},
		{`set_type('SEEN', '{"rate": 12.5}', 'x')`, "it is set so already"},
		{`set_type('SEEN', '{"rat": 1}', 'x')`, "unknown setting: rat"},
		{`set_type('SEEN', '[]', 'x')`, "must be an object"},
		{`set_type('SEEN', '{"rate": 0}', 'x')`, "biz_type_rate_check"},
		{`set_type('SEEN', '{"rate": "NaN"}', 'x')`, "out of range"},
		{`set_type('SEEN', '{"rate": "Infinity"}', 'x')`, "out of range"},
		{`set_type('SEEN', '{"policy": {"strategy": "sometimes", "base_delay": "5s"}}', 'x')`, "is none"},
		{`set_type('SEEN', '{"policy": {"strategy": "fixed", "base_delay": "soon"}}', 'x')`, "is none"},
		{`set_type('SEEN', '{"retain_dead": "-1 day"}', 'x')`, "retention_is_not_negative"},
		{`set_type('SEEN', jsonb_build_object('title', repeat('ä', 201)), 'x')`, "title has 201 characters, at most 200"},
		{`set_type('SEEN', jsonb_build_object('runbook_url', repeat('x', 2001)), 'x')`, "runbook_url has 2001 characters, at most 2000"},
		{`set_type('SEEN', jsonb_build_object('notifier', repeat('x', 64)), 'x')`, "notifier has 64 characters, at most 63"},
		{`set_type('SEEN', '{"rate": null}', 'x')`, "changed"},
		{`set_type('NEW', '{"retain_succeeded": "forever"}', 'x', add => true)`, "changed"},
		{`set_type('a b', '{}', 'x', add => true)`, "biz_type_is_1_to_63"},
		{`set_strict_types(true, 'x')`, "changed"},
		{`set_strict_types(true, 'x')`, "strict types are on already"},
		{`set_strict_types(NULL, 'x')`, "strict types are on already"},
	} {
		if got := call(c.sql); !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", c.sql, got, c.want)
		}
	}
	equal(t, "audit", db.Text(t, `SELECT string_agg(concat_ws(' ', action, biz_type), ', ' ORDER BY id) FROM taskrelay.audit`),
		"pause SEEN, resume SEEN, set type SEEN, set type SEEN, add type NEW, strict types")
	equal(t, "before and after", db.Text(t, `SELECT concat(before->>'rate', ' ', after->>'rate') FROM taskrelay.audit WHERE action = 'set type' ORDER BY id DESC LIMIT 1`), "12.5 ")
	equal(t, "policy", db.Text(t, `SELECT policy->>'base_delay' FROM taskrelay.types WHERE biz_type = 'SEEN'`), "1m30s")
	// As long as no relay has said which notifiers it has, a name may be one of its own.
	equal(t, "a notifier that no relay has spoken of", call(`set_type('SEEN', '{"notifier": "siren"}', 'x')`), "changed")
	db.Exec(t, `INSERT INTO taskrelay.relay (name, host, pid, notifiers) VALUES ('old', 'h', 1, '{}'), ('r', 'h', 2, '{log,pager}')`)
	for name, want := range map[string]string{"pager": "changed", "email": "changed", "wehbook": `no relay has a notifier "wehbook"`} {
		if got := call(`set_type('SEEN', '{"notifier": "` + name + `"}', 'x')`); !strings.Contains(got, want) {
			t.Errorf("notifier %s: got %q, want %q", name, got, want)
		}
	}
	equal(t, "no notifier", call(`set_type('SEEN', '{"notifier": null}', 'x')`), "changed")
	for _, role := range []string{"taskrelay_viewer", "taskrelay_worker", "taskrelay_relay", "taskrelay_producer"} {
		refuse(t, asRole(t, db, role), []refused{
			{`SELECT * FROM taskrelay.pause('SEEN', 'x')`, "permission denied"},
			{`SELECT * FROM taskrelay.set_type('SEEN', '{}', 'x')`, "permission denied"},
		})
	}
	refuse(t, asRole(t, db, "taskrelay_worker"), []refused{{`SELECT * FROM taskrelay.purge_page(0, 1, 1, false)`, "permission denied"}})
	refuse(t, pool, []refused{{`SELECT * FROM taskrelay.purge_page(0, 1, 1, false, older_than => '0')`, "a reason is required"}}) // else no audit
	// What a worker may delete is what has succeeded where nothing is kept, whatever ids it names.
	db.Exec(t, `UPDATE taskrelay.retention SET succeeded = '0'`)
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, status, finished_at) VALUES ('SEEN', 'succeeded', now()), ('NEW', 'succeeded', now())`)
	worker := asRole(t, db, "taskrelay_worker")
	if _, err := worker.Exec(t.Context(), `SELECT taskrelay.forget_succeeded(ARRAY(SELECT id FROM taskrelay.task))`); err != nil {
		t.Fatal(err)
	}
	equal(t, "left", db.Text(t, `SELECT string_agg(biz_type || ' ' || status, ', ' ORDER BY id) FROM taskrelay.task`), "SEEN pending, NEW succeeded")
}

// DESIGN 4.6: attempts and delays of biz_type come before the command's own.
func TestPolicyOfTheTypeComesBeforeTheCommands(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `SELECT * FROM taskrelay.set_type('SLOW', '{"max_attempts": 3, "policy": {"strategy": "fixed", "base_delay": "20ms"}}', 'x', add => true)`)
	var reg command.Registry
	mustRegister(t, &reg, "SLOW", command.Command[raw]{
		Execute:     func(context.Context, *command.Task[raw]) (any, error) { return nil, errFlaky },
		MaxAttempts: 100, Retry: retry.Fixed{Base: time.Hour},
	})
	e.RunRelay()
	e.RunWorker(&reg)
	id := e.Insert(t, "SLOW")
	e.WaitStatus(t, soon, id, "dead")
	equal(t, "attempts", outcomes(t, e, id), "[failed failed failed]")
}

// The commands, their output for people and programs, and their exit codes.
func TestSwitchCommands(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Insert(t, "ORDER_PAYMENT")
	keep(t, e, "30 days", "30 days", "")
	aged(t, e, "REFUND", "succeeded", 3, "31 days")
	aged(t, e, "REFUND", "succeeded", 2, "1 day")
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"pause ORDER_PAYMENT", 2, "--reason is required"},
		{"pause NOPE --reason x", 3, "no such biz type"},
		{"pause ORDER_PAYMENT --reason bank-down", 0, "taskrelay resume ORDER_PAYMENT"},
		{"pause ORDER_PAYMENT --reason bank-down", 4, "it is paused already"},
		{"types list", 0, ": bank-down"},
		{"resume ORDER_PAYMENT --reason bank-up -o json", 0, `"changed": true`},
		{"resume ORDER_PAYMENT --reason bank-up", 4, "it is not paused"},
		{"types set ORDER_PAYMENT --reason x", 2, "nothing to set"},
		{"types set ORDER_PAYMENT --rate 0 --reason x", 2, "must be above 0"},
		{"types set ORDER_PAYMENT --rate 50 --concurrency 8 --retain-succeeded 7d --reason x", 0, "holds within seconds"},
		{"types set ORDER_PAYMENT --rate NaN --reason x", 2, "must be above 0"},
		{"types set ORDER_PAYMENT --clear rat --reason x", 2, "Known: rate"},
		{"types set ORDER_PAYMENT --retain-succeeded soon --reason x", 2, "or forever"},
		{"types set ORDER_PAYMENT --strategy fixed --reason x", 2, "--base-delay"},
		{"types set ORDER_PAYMENT --strategy fixed --base-delay 5m --reason x", 0, "true"},
		{"types set ORDER_PAYMENT --clear rate,policy --reason x", 0, "true"},
		{"types add GIFT --title Gifts --reason x", 0, "true"},
		{"types strict maybe --reason x", 2, "on or off"},
		{"types strict on --reason x", 0, "strict types are on"},
		{"types strict off --reason x", 0, "strict types are off"},
		{"types list -o id", 0, "GIFT\nORDER_PAYMENT\nREFUND"},
		{"purge", 2, "--reason is required"},
		{"purge --dry-run", 0, "3 rows would be deleted"},
		{"purge --dry-run", 0, "too young"},
		{"purge --reason x", 2, "--yes"},
		{"purge --reason x --yes --older-than 1h", 2, "--status"},
		{"purge --reason disk --yes", 0, "3 rows deleted"},
		{"purge --reason disk --yes --older-than 2h --status succeeded --type REFUND -o json", 0, `"verdict": "deleted"`},
	} {
		out, code := e.CLI(strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%s: exit %d, want %d; got %s, want %q", c.args, code, c.code, out, c.want)
		}
	}
	var types []struct {
		BizType         string   `json:"biz_type"`
		Rate            *float64 `json:"rate"`
		Concurrency     *int     `json:"concurrency"`
		RetainSucceeded string   `json:"retain_succeeded"`
		Title           string   `json:"title"`
	}
	out, code := e.CLI("types", "list", "-o", "json")
	if err := json.Unmarshal([]byte(out), &types); err != nil || code != 0 || len(types) != 2 { // the last task of REFUND is gone, and with it the type
		t.Fatalf("exit %d, %v: %s", code, err, out)
	}
	equal(t, "title of the first", types[0].Title, "Gifts")
	equal(t, "rate, cleared", types[1].Rate == nil, true)
	equal(t, "concurrency", *types[1].Concurrency, 8)
	equal(t, "kept for", types[1].RetainSucceeded, "7 days")
	equal(t, "rows of REFUND", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'REFUND'`), 0)
	equal(t, "purges in the audit", e.Text(t, `SELECT string_agg(reason || ' ' || (after->>'REFUND succeeded'), ', ' ORDER BY id) FROM taskrelay.audit WHERE action = 'purge'`), "disk 3, disk 2")
}
