package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// told is a notifier that keeps what it is told.
type told struct {
	mu  sync.Mutex
	all []outbox.Notice
}

func (n *told) notify(_ context.Context, notice outbox.Notice) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, notice)
	return nil
}

func (n *told) notices() []outbox.Notice {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]outbox.Notice(nil), n.all...)
}

// count is how often a task was told of, by event.
func (n *told) count(event string) (count int) {
	for _, notice := range n.notices() {
		count += notice.Counts[event]
	}
	return count
}

func (n *told) wait(t *testing.T, event string, want int) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		if got := n.count(event); got < want {
			return errorf("%d of %d told as %s: %+v", got, want, event, n.notices())
		}
		return nil
	})
}

// giveUp registers a type whose tasks die at once; payload "undo" compensates, "stay" fails to.
func giveUp(t *testing.T, reg *command.Registry, bizTypes ...string) {
	t.Helper()
	for _, bizType := range bizTypes {
		mustRegister(t, reg, bizType, command.Command[string]{
			Retry: quickRetry, MaxAttempts: 2, Timeout: time.Second,
			Execute: func(context.Context, *command.Task[string]) (any, error) {
				return nil, retry.Permanent(errors.New("the bank said\nno"))
			},
			Compensate: func(_ context.Context, task *command.Task[string], _ error) error {
				if task.Payload == "stay" {
					return retry.Permanent(errors.New("cannot be undone"))
				}
				return nil
			},
		})
	}
}

func noNoticeLeft(t *testing.T, e *testenv.Env) {
	t.Helper()
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.notice`)
}

// C44, C20, C-119: what a notifier gets says which task, why, and what was done about it; a task that was not undone is
// told of as that, louder, and not as dead too.
func TestNoticesSayWhatHappened(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, notifier, title, runbook_url)
		VALUES ('ACCOUNT', 'mine', 'Open an account', 'https://runbooks.example/account')`)
	var mine, others told
	e.RunRelay(func(c *outbox.RelayConfig) {
		c.Notifiers = map[string]outbox.Notifier{"mine": mine.notify, "others": others.notify}
		c.DefaultNotifier, c.NoticeInterval = "others", time.Second
	})
	var reg command.Registry
	giveUp(t, &reg, "ACCOUNT", "OTHER")
	e.RunWorker(&reg)
	undone := e.Insert(t, "ACCOUNT", "biz_id", "A-1", "payload", `"undo"`)
	stays := e.Insert(t, "ACCOUNT", "biz_id", "A-2", "payload", `"stay"`)
	other := e.Insert(t, "OTHER", "payload", `"undo"`)
	mine.wait(t, "failed", 2)
	mine.wait(t, "dead", 1)
	mine.wait(t, "compensation_failed", 1)
	others.wait(t, "dead", 1)
	noNoticeLeft(t, e)
	equal(t, "told as dead", mine.count("dead"), 1)
	equal(t, "told as not undone", mine.count("compensation_failed"), 1)
	equal(t, "told of the other type", others.count("dead"), 1)

	events := map[int64]map[string]outbox.NoticeTask{}
	for _, n := range mine.notices() {
		equal(t, "type", n.BizType, "ACCOUNT")
		equal(t, "title", n.Title, "Open an account")
		equal(t, "runbook", n.RunbookURL, "https://runbooks.example/account")
		if strings.Contains(n.Text(), "stay") || !strings.Contains(n.Text(), "https://runbooks.example/account") {
			t.Errorf("text: %s", n.Text())
		}
		if n.Grave() != (n.Counts["compensation_failed"] > 0) {
			t.Errorf("grave: %t, counts %v", n.Grave(), n.Counts)
		}
		for _, task := range n.Tasks {
			if events[task.ID] == nil {
				events[task.ID] = map[string]outbox.NoticeTask{}
			}
			events[task.ID][task.Event] = task
		}
	}
	for id, want := range map[int64][3]string{undone: {"dead", "permanent", "done"}, stays: {"compensation_failed", "compensation_failed", "failed"}} {
		failed, end := events[id]["failed"], events[id][want[0]]
		equal(t, "attempts in failed", failed.Attempts, 1)
		equal(t, "reason in failed", failed.Reason, "permanent")
		equal(t, "error in failed", failed.Error, "the bank said no")
		equal(t, "attempts", end.Attempts, 1)
		equal(t, "reason", end.Reason, want[1])
		equal(t, "compensation", end.Compensation, want[2])
		if end.Error == "" || end.BizID == "" || time.Since(end.At) > time.Hour {
			t.Errorf("task: %+v", end)
		}
	}
	if _, ok := events[other]; ok {
		t.Error("a task of another type was told by this notifier")
	}
}

// Many that die at once are one message for each type and interval, with a count, although two relays share the work;
// and each is counted once.
func TestManyNoticesBecomeOne(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	const n = 120
	const interval = 2 * time.Second
	var mine told
	var mu sync.Mutex
	at := map[string][]time.Time{}
	config := func(c *outbox.RelayConfig) {
		c.NoticeInterval, c.DefaultNotifier = interval, "mine"
		c.Notifiers = map[string]outbox.Notifier{"mine": func(ctx context.Context, notice outbox.Notice) error {
			mu.Lock()
			at[notice.BizType] = append(at[notice.BizType], time.Now())
			mu.Unlock()
			return mine.notify(ctx, notice)
		}}
	}
	e.RunRelay(config)
	e.RunRelay(config)
	var reg command.Registry
	giveUp(t, &reg, "FLOOD", "QUIET")
	e.RunWorker(&reg)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, payload) SELECT 'FLOOD', '"undo"' FROM generate_series(1, $1)`, n)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, payload) VALUES ('QUIET', '"undo"')`)
	e.WaitNoneOpen(t, soon)
	mine.wait(t, "failed", n+1)
	mine.wait(t, "dead", n+1)
	noNoticeLeft(t, e)
	equal(t, "told as dead", mine.count("dead"), n+1)
	equal(t, "told as failed", mine.count("failed"), n+1)
	most := 0
	for _, notice := range mine.notices() {
		most = max(most, notice.Count)
		if len(notice.Tasks) > 10 || len(notice.Tasks) == 0 || notice.Count < len(notice.Tasks) {
			t.Errorf("notice of %d tasks names %d", notice.Count, len(notice.Tasks))
		}
	}
	if most < 20 {
		t.Errorf("the largest notice counts %d, so they are not gathered: %d notices", most, len(mine.notices()))
	}
	mu.Lock()
	defer mu.Unlock()
	for bizType, times := range at {
		for i := 1; i < len(times); i++ {
			// Postgres counts the interval from the end of the message before, so here it can only be longer.
			if gap := times[i].Sub(times[i-1]); gap < interval-100*time.Millisecond {
				t.Errorf("two messages about %s within %v", bizType, gap)
			}
		}
	}
}

// C20, C-121: the host of the notifier is down, a relay is killed meanwhile; the notice comes when it is back. The
// task was dead in time, and other notifiers were not kept waiting.
func TestNoticeWaitsForItsHost(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422, Body: "card refused"})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close() // nobody is there
	robot := testenv.NewSink(t)
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, notifier) VALUES ('ORDER_PAYMENT', 'webhook'), ('OTHER', 'dingtalk')`)
	vars := []string{"TASKRELAY_NOTIFY_WEBHOOK_URL=http://" + address + "/hook?token=hunter2", "TASKRELAY_NOTIFY_WEBHOOK_SECRET=hunter2",
		"TASKRELAY_NOTIFY_DINGTALK_URL=" + robot.URL + "/robot/send?access_token=hunter2", "TASKRELAY_NOTIFY_DINGTALK_SECRET=hunter2"}
	relay := e.StartRelay(vars...)
	e.StartWorker(testenv.Types(testenv.HTTPType("ORDER_PAYMENT", sink.URL), testenv.HTTPType("OTHER", sink.URL))...)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-1")
	other := e.Insert(t, "OTHER")
	e.WaitStatus(t, soon, id, "dead")
	relay.WaitLog(t, soon, "notice not told, trying again")
	robot.WaitCalls(t, soon, 1)
	var m struct{ Text struct{ Content string } }
	if err := json.Unmarshal([]byte(robot.Calls()[0].Body), &m); err != nil || !strings.Contains(m.Text.Content, fmt.Sprintf("OTHER task %d is dead", other)) {
		t.Errorf("the robot was sent %v %s", err, robot.Calls()[0].Body)
	}
	var failure string
	testenv.Eventually(t, soon, func() error {
		if failure = e.Text(t, `SELECT last_error FROM taskrelay.notice_turn WHERE biz_type = 'ORDER_PAYMENT'`); failure == "" {
			return errorf("the table says nothing of the failure")
		}
		return nil
	})
	if !strings.Contains(failure, address) || strings.Contains(failure, "hunter2") {
		t.Errorf("last_error: %q", failure)
	}
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.notice WHERE biz_type = 'OTHER'`)
	relay.Kill9(t)
	if strings.Contains(relay.Logs(), "hunter2") {
		t.Error("the log shows a secret")
	}

	got := make(chan *http.Request, 10)
	host := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { got <- r }))
	if host.Listener, err = net.Listen("tcp", address); err != nil {
		t.Fatal(err)
	}
	host.Start()
	t.Cleanup(host.Close)
	e.Exec(t, `UPDATE taskrelay.notice_turn SET next_at = now(), taken_until = NULL`) // not to wait for the pause, or for the turn of the killed
	e.StartRelay(vars...)
	select {
	case r := <-got:
		if r.Header.Get("webhook-signature") == "" || r.URL.Path != "/hook" {
			t.Errorf("request: %s %v", r.URL.Path, r.Header)
		}
	case <-time.After(soon):
		t.Fatal("the notice did not come")
	}
	noNoticeLeft(t, e)
	equal(t, "messages of the robot", len(robot.Calls()), 1)
}

// A notifier that neither returns nor heeds its context stops neither the others nor the relay, nor its end.
func TestNotifierThatHangsStopsNobody(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, notifier) VALUES ('STUCK', 'hangs'), ('BAD', 'panics'), ('GOOD', 'mine'), ('TYPO', 'wehbook')`)
	var mine told
	release, entered := make(chan struct{}), make(chan struct{}, 10)
	panics := 0
	relay := e.RunRelay(func(c *outbox.RelayConfig) {
		c.Notifiers = map[string]outbox.Notifier{
			"mine":  mine.notify,
			"hangs": func(context.Context, outbox.Notice) error { entered <- struct{}{}; <-release; return nil },
			"panics": func(ctx context.Context, n outbox.Notice) error {
				if panics++; panics == 1 { // called by one goroutine at a time
					panic("a bug in a notifier")
				}
				return mine.notify(ctx, n)
			},
		}
	})
	t.Cleanup(func() { close(release) })
	var reg command.Registry
	giveUp(t, &reg, "STUCK", "BAD", "GOOD", "TYPO")
	e.RunWorker(&reg)
	e.Insert(t, "STUCK", "payload", `"undo"`)
	select {
	case <-entered:
	case <-time.After(soon):
		t.Fatal("the notifier that hangs was not called")
	}
	good := e.Insert(t, "GOOD", "payload", `"undo"`)
	e.Insert(t, "BAD", "payload", `"undo"`)
	e.Insert(t, "TYPO", "payload", `"undo"`)
	e.WaitStatus(t, soon, good, "dead")
	mine.wait(t, "dead", 1) // of GOOD, or of BAD after its panic
	// What set_type goes by.
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.relay WHERE notifiers @> '{mine,hangs,panics,log}'`)
	testenv.Eventually(t, soon, func() error {
		for _, want := range []string{"notifier panicked: a bug in a notifier", `"notifier":"wehbook"`, "notifier is not configured in this relay, logged instead"} {
			if !strings.Contains(relay.Logs(), want) {
				return errorf("the log has no %s", want)
			}
		}
		return nil
	})
	relay.Stop()
}

// C31: without any setting a dead task is an error line of the relay. Replayed letters are no news, and a stranger's
// messages on the events' subjects harm nothing.
func TestNoticesGoToTheLogByDefault(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422, Body: "card refused"})
	relay := e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	e.NATS.WaitStream(t, "TASKS_EVENTS")
	for _, m := range []*nats.Msg{
		{Subject: "events.ORDER_PAYMENT.dead", Data: []byte("hello")},
		{Subject: "events.x.y", Header: nats.Header{"Task-Id": {"1"}, "Nats-Msg-Id": {"1"}, "Task-Event": {"dead"}, "Task-Biz-Type": {"x' OR 1"}}},
		{Subject: "events.ORDER_PAYMENT.dead", Header: nats.Header{"Task-Id": {"99"}, "Nats-Msg-Id": {"r"}, "Task-Event": {"dead"},
			"Task-Biz-Type": {"ORDER_PAYMENT"}, "Task-Installation": {installation(t, e)}, "Task-Replayed": {"true"}}},
		{Subject: "events.ORDER_PAYMENT.dead", Header: nats.Header{"Task-Id": {"98"}, "Nats-Msg-Id": {"f"}, "Task-Event": {"dead"},
			"Task-Biz-Type": {"ORDER_PAYMENT"}, "Task-Installation": {"93fef747-081c-4423-9feb-bd5025398472"}}},
	} {
		if _, err := e.NATS.JS.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-1")
	e.WaitStatus(t, soon, id, "dead")
	relay.WaitLog(t, soon, "notice: tasks dead")
	lines := relay.LogLines("notice: tasks dead")
	if len(lines) != 1 {
		t.Fatalf("got %d lines, want 1: %v", len(lines), lines)
	}
	for key, want := range map[string]any{"level": "error", "biz_type": "ORDER_PAYMENT", "task_id": float64(id), "biz_id": "O-1", "attempt": 1.0, "reason": "permanent", "count": 1.0} {
		equal(t, key, lines[0][key], want)
	}
	noNoticeLeft(t, e)
	info, err := e.NATS.JS.Consumer(t.Context(), "TASKS_EVENTS", "notices")
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		i, err := info.Info(t.Context())
		if err == nil && (i.NumPending > 0 || i.NumAckPending > 0) {
			err = errorf("%d events wait, %d are not acked", i.NumPending, i.NumAckPending)
		}
		return err
	})
}

// Mail by the stock relay: encrypted, to an address of the configuration.
func TestNoticeByEmail(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	mail := testenv.NewSMTP(t)
	mail.Mechanisms, mail.User, mail.Pass = "PLAIN", "relay", "hunter2"
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422, Body: "card refused"})
	mail.Busy(true)
	relay := e.StartRelay("TASKRELAY_NOTIFY_SMTP_URL=smtp://relay:hunter2@"+mail.Addr, "TASKRELAY_NOTIFY_EMAIL_FROM=relay@example.com",
		"TASKRELAY_NOTIFY_EMAIL_TO=night@example.com", "TASKRELAY_NOTIFY_DEFAULT=email", "SSL_CERT_FILE="+mail.CertFile)
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT")
	relay.WaitLog(t, soon, "notice not told, trying again")
	mail.Busy(false)
	got := mail.WaitMails(t, soon, 1)[0]
	if !got.Encrypted || got.User != "relay" || len(got.To) != 1 || !strings.Contains(got.Data, fmt.Sprintf("ORDER_PAYMENT task %d is dead", id)) {
		t.Errorf("mail: %+v", got)
	}
	noNoticeLeft(t, e)
	if strings.Contains(relay.Logs(), "hunter2") {
		t.Error("the log shows the password")
	}
}

// The consumer is deleted, the stream too: the relay makes them again, and later notices come.
func TestNoticesOutliveTheirStream(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var mine told
	e.RunRelay(func(c *outbox.RelayConfig) {
		c.Notifiers, c.DefaultNotifier, c.NoticeInterval = map[string]outbox.Notifier{"mine": mine.notify}, "mine", time.Second
	})
	var reg command.Registry
	giveUp(t, &reg, "ACCOUNT")
	e.RunWorker(&reg)
	e.Insert(t, "ACCOUNT", "payload", `"undo"`)
	mine.wait(t, "dead", 1)
	if err := e.NATS.JS.DeleteConsumer(t.Context(), "TASKS_EVENTS", "notices"); err != nil {
		t.Fatal(err)
	}
	e.Insert(t, "ACCOUNT", "payload", `"undo"`)
	mine.wait(t, "dead", 2)
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS_EVENTS"); err != nil {
		t.Fatal(err)
	}
	before := mine.count("dead")
	e.Insert(t, "ACCOUNT", "payload", `"undo"`)
	mine.wait(t, "dead", before+1)
	noNoticeLeft(t, e)
}
