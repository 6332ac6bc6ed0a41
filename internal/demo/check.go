package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Result is what became of the tasks.
type Result struct {
	Table    string   // per biz type and status
	Checks   []Check  // what must hold, in words
	Letters  []Letter // read from the stream of dead letters
	Problems []string // what did not hold; empty if all is well
	Retries  Retries
	Example  *Letter // a dead letter worth looking at
}

// Check is one thing that must hold.
type Check struct {
	OK   bool
	Text string
}

// Letter is a dead letter as it is in the stream.
type Letter struct {
	Subject, ID, BizType, BizID, Reason, Attempts, Compensation, Error string
	Body                                                               []byte
}

// Retries says how failed attempts came back.
type Retries struct{ ByNak, ByTable int }

// row is a task of the run, as the table has it.
type row struct {
	id                              int64
	bizType, status, phase          string
	compensation, deadReason, class string
	handedBack                      bool
	payload                         []byte
	calls, logged, undecoded, lost  int
}

const resultSQL = `-- taskrelay demo: results
SELECT t.id, t.biz_type, t.status, t.phase, t.compensation, coalesce(t.dead_reason, ''), coalesce(t.error_class, ''),
       t.generation > 0, t.payload::text,
       coalesce(a.logged, 0), coalesce(a.undecoded, 0), coalesce(a.lost, 0)
FROM {{schema}}.task AS t
LEFT JOIN (
    SELECT task_id, count(*) AS logged, count(*) FILTER (WHERE error_class = 'decode') AS undecoded,
           count(*) FILTER (WHERE outcome = 'lost') AS lost
    FROM {{schema}}.task_attempt WHERE task_id > $1 GROUP BY task_id
) AS a ON a.task_id = t.id
WHERE t.id > $1
ORDER BY t.id`

func (d *Demo) tasks(ctx context.Context) (map[int64]*row, error) {
	rows, err := d.cfg.Pool.Query(ctx, d.cfg.Schema.Render(resultSQL), d.firstID)
	if err != nil {
		return nil, err
	}
	found := map[int64]*row{}
	var r row
	var payload string
	_, err = pgx.ForEachRow(rows, []any{&r.id, &r.bizType, &r.status, &r.phase, &r.compensation, &r.deadReason, &r.class,
		&r.handedBack, &payload, &r.logged, &r.undecoded, &r.lost}, func() error {
		c := r
		c.payload = []byte(payload)
		found[r.id] = &c
		return nil
	})
	for k, n := range d.shop.calls.snapshot() {
		if found[k.task] != nil {
			found[k.task].calls += n
		}
	}
	return found, err
}

// check compares what the business committed with the table, the attempt log, the outside world's books, and the
// stream of dead letters.
func (d *Demo) check(ctx context.Context) (Result, error) {
	var res Result
	that := func(ok bool, format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		res.Checks = append(res.Checks, Check{ok, text})
		if !ok {
			res.Problems = append(res.Problems, text)
		}
	}
	p, err := d.look(ctx)
	if err != nil {
		return res, err
	}
	res.Table = p.table()
	found, err := d.tasks(ctx)
	if err != nil {
		return res, err
	}
	state := d.producer.state()

	// Every committed task has its end, and there are no others.
	byStatus := map[string]int{}
	missing := 0
	for _, m := range state.committed {
		if t := found[m.id]; t == nil {
			missing++
		} else {
			byStatus[t.status]++
		}
	}
	finished := byStatus["succeeded"] + byStatus["dead"] + byStatus["cancelled"]
	that(missing == 0 && finished == len(state.committed) && len(found) == len(state.committed),
		"%d tasks committed, %d finished: %d succeeded, %d dead, %d cancelled",
		len(state.committed), finished, byStatus["succeeded"], byStatus["dead"], byStatus["cancelled"])

	// What was rolled back never happened.
	ran := 0
	calls := d.shop.calls.snapshot()
	installation, err := d.cfg.Schema.Installation(ctx, d.cfg.Pool)
	if err != nil {
		return res, err
	}
	for _, m := range state.rolledBack {
		heard := 0
		for _, s := range d.world.services() {
			heard += s.seen(fmt.Sprintf("%s-%d", installation.ID, m.id)) // what Task.Key would be
		}
		if found[m.id] != nil || heard > 0 || calls[callKey{m.id, "execute"}] > 0 || calls[callKey{m.id, "compensate"}] > 0 {
			ran++
		}
	}
	that(ran == 0, "%d rolled back with their business rows, %s of them ran", len(state.rolledBack), none(ran))
	that(len(state.problems) == 0, "%d sent twice, each is one task%s", state.duplicates, because(state.problems))

	// Attempts logged are calls made. A payload that does not decode is an attempt without a call.
	made, logged, undecoded, lost := 0, 0, 0, 0
	var differ []string
	for _, id := range slices.Sorted(maps.Keys(found)) {
		t := found[id]
		made, logged, undecoded, lost = made+t.calls, logged+t.logged, undecoded+t.undecoded, lost+t.lost
		// A lost attempt may have been lost before its handler was entered.
		if most := t.logged - t.undecoded; t.calls > most || t.calls < most-t.lost {
			differ = append(differ, fmt.Sprintf("task %d: %d calls, %d attempts", id, t.calls, t.logged))
		}
	}
	text := fmt.Sprintf("%d handler calls = %d attempts logged - %d whose payload did not decode", made, logged, undecoded)
	if lost > 0 {
		text += fmt.Sprintf(" (%d attempts were lost)", lost)
	}
	that(len(differ) == 0, "%s%s", text, because(differ))

	if err := d.checkBooks(ctx, state, found, that); err != nil {
		return res, err
	}
	if err := d.readLetters(ctx, found, &res, that); err != nil {
		return res, err
	}
	return res, d.countRetries(ctx, &res)
}

// checkBooks compares the shop's rows with the books of the outside world.
func (d *Demo) checkBooks(ctx context.Context, state produced, found map[int64]*row, that func(bool, string, ...any)) error {
	var captured, refunded, paidBack int64
	for _, m := range state.committed {
		t := found[m.id]
		if t == nil || t.status != "succeeded" {
			continue
		}
		switch m.bizType {
		case orderPayment:
			captured += m.cents
		case refundCard, refundWallet, refundBank:
			refunded += m.cents
		}
	}
	_, gateway := d.world.gateway.total("capture")
	that(gateway == captured, "payments: gateway booked %s, succeeded tasks %s", euros(gateway), euros(captured))

	var channels int64
	for _, c := range []*service{d.world.card, d.world.wallet, d.world.transfer} {
		_, cents := c.total("refund")
		channels += cents
	}
	// Orders of an earlier run with the same data directory have their own sums, so only this run's are asked for.
	ids := make([]int64, 0, len(d.producer.orders))
	for _, o := range d.producer.orders {
		ids = append(ids, o.id)
	}
	err := d.cfg.Pool.QueryRow(ctx, `SELECT coalesce(sum(refunded_cents), 0)::bigint FROM demo.orders WHERE id = ANY($1::bigint[])`, ids).Scan(&paidBack)
	if err != nil {
		return err
	}
	that(channels == refunded && paidBack == refunded, "refunds: channels booked %s, orders say %s, succeeded tasks %s",
		euros(channels), euros(paidBack), euros(refunded))

	var accounts []string
	atBank := d.world.bank.open()
	open := 0
	for _, m := range state.committed {
		t := found[m.id]
		if m.bizType != accountOpen || t == nil {
			continue
		}
		shouldBe := t.status == "succeeded" || t.compensation == "failed" && atBank[m.bizID]
		if atBank[m.bizID] != shouldBe {
			accounts = append(accounts, fmt.Sprintf("%s (task %d) is %s, at the bank open=%v", m.bizID, m.id, t.status, atBank[m.bizID]))
		}
		if t.status == "succeeded" {
			open++
		}
	}
	done, failed := 0, 0
	for _, t := range found {
		switch t.compensation {
		case "done":
			done++
		case "failed":
			failed++
		}
	}
	that(len(accounts) == 0, "accounts: %d open here and at the bank, %d cancelled by compensation, %d compensation failed and waits for a person%s",
		open, done, failed, because(accounts))
	return nil
}

// readLetters reads the dead letter of every dead task from the stream.
func (d *Demo) readLetters(ctx context.Context, found map[int64]*row, res *Result, that func(bool, string, ...any)) error {
	js, err := jetstream.New(d.cfg.NC)
	if err != nil {
		return err
	}
	stream, err := js.Stream(ctx, d.names.DeadStream())
	if err != nil {
		return fmt.Errorf("open stream %s: %w", d.names.DeadStream(), err)
	}
	dead, wrong := 0, []string(nil)
	for _, id := range slices.Sorted(maps.Keys(found)) {
		t := found[id]
		if t.status != "dead" {
			continue
		}
		dead++
		subject := d.names.DeadSubject(t.bizType, t.id)
		msg, err := stream.GetLastMsgForSubject(ctx, subject)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			wrong = append(wrong, "no letter at "+subject)
			continue
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", subject, err)
		}
		if !bytes.Equal(msg.Data, t.payload) {
			wrong = append(wrong, subject+" has another body than the task")
		}
		h := msg.Header
		res.Letters = append(res.Letters, Letter{
			Subject: subject, ID: h.Get(outbox.HeaderID), BizType: h.Get(outbox.HeaderBizType), BizID: h.Get(outbox.HeaderBizID),
			Reason: h.Get(outbox.HeaderReason), Attempts: h.Get(outbox.HeaderAttempts),
			Compensation: h.Get(outbox.HeaderCompensation), Error: h.Get(outbox.HeaderError), Body: msg.Data,
		})
	}
	for i, l := range res.Letters {
		if res.Example == nil || interest(l) > interest(*res.Example) {
			res.Example = &res.Letters[i]
		}
	}
	that(len(wrong) == 0, "%d dead tasks have their letter in %s, body byte for byte%s", dead, d.names.DeadStream(), because(wrong))
	return nil
}

// A failed attempt that another one of the same generation and phase follows came back by nak. One that a hand-back
// follows came back through the table.
const retriesSQL = `-- taskrelay demo: retries
SELECT count(*) FILTER (WHERE next = generation)::bigint, count(*) FILTER (WHERE next > generation)::bigint
FROM (
    SELECT outcome, generation,
           lead(generation) OVER (PARTITION BY task_id, phase ORDER BY started_at) AS next
    FROM {{schema}}.task_attempt WHERE task_id > $1
) AS a
WHERE outcome IN ('failed', 'timeout', 'panic')`

func (d *Demo) countRetries(ctx context.Context, res *Result) error {
	return d.cfg.Pool.QueryRow(ctx, d.cfg.Schema.Render(retriesSQL), d.firstID).Scan(&res.Retries.ByNak, &res.Retries.ByTable)
}

// interest ranks dead letters by how much of the path they show.
func interest(l Letter) int {
	switch l.Compensation {
	case "done":
		return 2
	case "failed":
		return 1
	}
	return 0
}

func none(n int) string {
	if n == 0 {
		return "none"
	}
	return fmt.Sprint(n)
}

func because(problems []string) string {
	if len(problems) == 0 {
		return ""
	}
	if len(problems) > 5 {
		problems = append(slices.Clone(problems[:5]), fmt.Sprintf("and %d more", len(problems)-5))
	}
	return ": " + strings.Join(problems, "; ")
}

func euros(cents int64) string { return fmt.Sprintf("%d.%02d EUR", cents/100, cents%100) }
