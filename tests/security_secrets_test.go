package tests

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Issue 5, item 7: with every secret set and everything going wrong, no line of any log shows one, nor what a task holds.
func TestSecretsAreInNoLog(t *testing.T) {
	t.Parallel()
	secrets := map[string]string{}
	secret := func(what string) string {
		secrets[what] = "hunter2" + fmt.Sprintf("%02d", len(secrets)) + "x"
		return secrets[what]
	}
	natsPassword := secret("NATS password")
	e := testenv.NewEnv(t, testenv.DB(t), testenv.NATS(t, func(o *server.Options) {
		o.Users = []*server.User{{Username: "relay", Password: natsPassword}}
		o.NoAuthUser = "test"
		o.Users = append(o.Users, &server.User{Username: "test", Password: secret("password of the test's user")})
	}))
	login := "login_" + e.Name
	dbPassword := secret("Postgres password")
	e.Exec(t, `CREATE ROLE `+login+` SUPERUSER LOGIN PASSWORD '`+dbPassword+`'`)

	// A target and notifiers that get no further than the address: its path, user and query are secrets too.
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hang-up" {
			panic(http.ErrAbortHandler)
		}
		http.Redirect(w, r, "http://127.0.0.1:1/"+secrets["a place to be led to"], http.StatusFound)
	}))
	t.Cleanup(broken.Close)
	secret("a place to be led to")
	host := strings.TrimPrefix(broken.URL, "http://")
	vars := e.Vars(
		"TASKRELAY_DATABASE_URL="+as(t, e.URL, login, dbPassword),
		"TASKRELAY_NATS_URL="+strings.Replace(e.NATS.URL, "nats://", "nats://relay:"+natsPassword+"@", 1),
		"TASKRELAY_LOG_LEVEL=trace",
		"TASKRELAY_NOTIFY_WEBHOOK_URL=http://u:"+secret("webhook password")+"@"+host+"/n?token="+secret("webhook token"),
		"TASKRELAY_NOTIFY_WEBHOOK_SECRET="+secret("webhook secret"),
		"TASKRELAY_NOTIFY_SMTP_URL=smtp://u:"+secret("SMTP password")+"@127.0.0.1:1",
		"TASKRELAY_NOTIFY_EMAIL_FROM=a@example.com", "TASKRELAY_NOTIFY_EMAIL_TO=b@example.com",
		"TASKRELAY_NOTIFY_DINGTALK_URL="+broken.URL+"/robot?access_token="+secret("DingTalk token"),
		"TASKRELAY_NOTIFY_DINGTALK_SECRET="+secret("DingTalk secret"),
		"TASKRELAY_NOTIFY_CHAT_URL="+broken.URL+"/services/"+secret("chat token"),
		"TASKRELAY_BIZ_TYPES=WEB,MAIL,DING,CHAT",
	)
	for _, biz := range []struct{ name, notifier, path string }{{"WEB", "webhook", "/t"}, {"MAIL", "email", "/hang-up"}, {"DING", "dingtalk", "/t"}, {"CHAT", "chat", "/hang-up"}} {
		prefix := "TASKRELAY_BIZ_" + biz.name + "_"
		vars = append(vars, prefix+"TARGET=http://u:"+secret("target password of "+biz.name)+"@"+host+biz.path+"?key="+secret("target key of "+biz.name),
			prefix+"SECRET="+secret("signing secret of "+biz.name), prefix+"NOTIFIER="+biz.notifier, prefix+"MAX_ATTEMPTS=1")
	}
	relay := testenv.Start(t, "relay", nil, vars...)
	worker := testenv.Start(t, "worker", nil, vars...)
	for _, biz := range []string{"WEB", "MAIL", "DING", "CHAT"} {
		e.Insert(t, biz, "payload", `{"card": "`+secret("payload of "+biz)+`"}`, "headers", `{"x-session": "`+secret("header of "+biz)+`"}`)
	}
	e.WaitCount(t, soon, 4, `SELECT count(*) FROM taskrelay.task WHERE status = 'dead'`)
	e.WaitCount(t, soon, 4, `SELECT count(*) FROM taskrelay.notice_turn WHERE tries > 0 AND last_error IS NOT NULL`)
	logs := map[string]string{"errors in the table": e.Text(t, `SELECT string_agg(concat_ws(' ', t.last_error, n.last_error), ' ') FROM taskrelay.task AS t, taskrelay.notice_turn AS n`)}
	for _, args := range [][]string{{"config"}, {"config", "-o", "json"}, {"check"}, {"doctor"}, {"dead", "list"}, {"list"}, {"stats"}, {"dead", "groups"}} {
		run := runCLI(t, "", append(vars, "HOME=/"), args...)
		logs["taskrelay "+strings.Join(args, " ")] = run.out + run.errOut
	}
	wrong := runCLI(t, "", append(vars, "TASKRELAY_DATABASE_URL=postgres://u:"+secret("a wrong password")+"@127.0.0.1:1/x"), "list")
	logs["taskrelay without Postgres"] = wrong.out + wrong.errOut
	relay.Stop(t, soon)
	worker.Stop(t, soon)
	logs["relay"], logs["worker"] = relay.Logs(), worker.Logs()
	for where, log := range logs {
		if len(log) < 20 {
			t.Errorf("%s is silent: %q", where, log)
		}
		for what, s := range secrets {
			if i := strings.Index(log, s); i >= 0 {
				t.Errorf("%s shows the %s: …%s…", where, what, log[max(0, i-150):min(len(log), i+60)])
			}
		}
	}
}

// as is an address with another user.
func as(t *testing.T, address, user, password string) string {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(user, password)
	return u.String()
}
