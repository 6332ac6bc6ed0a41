package notify

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// one is a notice about one task; its error text is as hostile as a target can make it.
func one() outbox.Notice {
	at := time.Date(2026, 3, 4, 2, 13, 4, 0, time.UTC)
	return outbox.Notice{
		ID: "notice_1", Installation: "93fef747-081c-4423-9feb-bd5025398472", BizType: "ORDER_PAYMENT", Title: "Order payment 支付",
		RunbookURL: "https://runbooks.example/pay", Event: outbox.EventDead, Count: 1, Counts: map[string]int{outbox.EventDead: 1}, From: at, To: at,
		Tasks: []outbox.NoticeTask{{ID: 42, BizID: "O-\"1\"", Event: outbox.EventDead, Attempts: 3, Reason: "max_attempts",
			Error: `HTTP 503 <!channel> @everyone "bank" is closed`, Compensation: "none", At: at}},
	}
}

func grave() outbox.Notice {
	n := one()
	n.Event, n.Counts = outbox.EventCompensationFailed, map[string]int{outbox.EventCompensationFailed: 1}
	n.Tasks[0].Event, n.Tasks[0].Compensation = outbox.EventCompensationFailed, "failed"
	return n
}

func many() outbox.Notice {
	n := one()
	n.Count, n.Counts = 120, map[string]int{outbox.EventDead: 120}
	for len(n.Tasks) < 10 {
		t := n.Tasks[0]
		t.ID += int64(len(n.Tasks))
		t.Error = strings.Repeat("支", 300)
		n.Tasks = append(n.Tasks, t)
	}
	return n
}

type seen struct {
	header http.Header
	query  url.Values
	body   []byte
}

// listen is a receiver that answers as told and keeps what it got.
func listen(t *testing.T, status int, answer string, header ...string) (address string, calls chan seen) {
	t.Helper()
	calls = make(chan seen, 10)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		calls <- seen{r.Header.Clone(), r.URL.Query(), body}
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, answer)
	}))
	t.Cleanup(s.Close)
	return s.URL, calls
}

func made(t *testing.T) func(outbox.Notifier, error) outbox.Notifier {
	return func(n outbox.Notifier, err error) outbox.Notifier {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

func TestWebhookIsSignedAsStandardWebhooksSays(t *testing.T) {
	t.Parallel()
	address, calls := listen(t, 202, "")
	const key = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	if err := made(t)(Webhook(address+"/hook", "whsec_"+key))(t.Context(), one()); err != nil {
		t.Fatal(err)
	}
	got := <-calls
	raw, err := base64.StdEncoding.DecodeString(key)
	if err != nil {
		t.Fatal(err)
	}
	mac := hmac.New(sha256.New, raw)
	mac.Write([]byte(got.header.Get("webhook-id") + "." + got.header.Get("webhook-timestamp") + "."))
	mac.Write(got.body)
	if want := "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)); got.header.Get("webhook-signature") != want {
		t.Errorf("signature: got %q, want %q", got.header.Get("webhook-signature"), want)
	}
	if sent, err := strconv.ParseInt(got.header.Get("webhook-timestamp"), 10, 64); err != nil || time.Since(time.Unix(sent, 0)).Abs() > time.Minute {
		t.Errorf("timestamp: got %q", got.header.Get("webhook-timestamp"))
	}
	var body struct {
		Type string
		Text string
		Data struct {
			BizType string `json:"biz_type"`
			Count   int
			Tasks   []struct{ ID, Reason string }
		}
	}
	if err := json.Unmarshal(got.body, &body); err != nil {
		t.Fatal(err)
	}
	if body.Type != "taskrelay.dead" || body.Data.BizType != "ORDER_PAYMENT" || body.Data.Count != 1 ||
		len(body.Data.Tasks) != 1 || body.Data.Tasks[0].ID != "42" || !strings.Contains(body.Text, "taskrelay show 42") {
		t.Errorf("body: %s", got.body)
	}
	if got.header.Get("webhook-id") != "notice_1" {
		t.Errorf("webhook-id: got %q, want the notice's", got.header.Get("webhook-id"))
	}
}

// C-125: a receiver must not lead us to another address.
func TestRedirectsAreNotFollowed(t *testing.T) {
	t.Parallel()
	inside, hit := listen(t, 200, "")
	for _, code := range []int{301, 302, 307, 308} {
		address, _ := listen(t, code, "", "Location", inside)
		err := made(t)(Webhook(address, ""))(t.Context(), one())
		if err == nil || !strings.Contains(err.Error(), "redirect") {
			t.Errorf("%d: got %v, want an error that names the redirect", code, err)
		}
	}
	if len(hit) != 0 {
		t.Error("the address that a redirect leads to was called")
	}
}

func TestAnswersThatAreNoSuccess(t *testing.T) {
	t.Parallel()
	for _, code := range []int{400, 401, 404, 429, 500, 503} {
		address, _ := listen(t, code, "")
		if err := made(t)(Webhook(address, ""))(t.Context(), one()); err == nil || !strings.Contains(err.Error(), strconv.Itoa(code)) {
			t.Errorf("%d: got %v", code, err)
		}
	}
	for answer, want := range map[string]string{
		`{"errcode":310000,"errmsg":"keywords not in content"}`: "keywords not in content",
		`{"code":9499,"msg":"Bad Request"}`:                     "Bad Request",
		`{"errcode":0,"errmsg":"ok"}`:                           "",
		`{"code":0,"StatusCode":0}`:                             "",
		`ok`:                                                    "",
		``:                                                      "",
	} {
		address, _ := listen(t, 200, answer)
		err := made(t)(DingTalk(address, ""))(t.Context(), one())
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("answer %s: got %v, want %q", answer, err, want)
		}
	}
}

// The host that hangs, and the one that sends for ever, cost no more than their time.
func TestReceiverThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // the server watches the connection only then
		if r.URL.Path == "/hang" {
			<-r.Context().Done()
			return
		}
		chunk := make([]byte, 64<<10)
		for r.Context().Err() == nil {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}))
	defer s.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := made(t)(Webhook(s.URL+"/hang", ""))(ctx, one()); err == nil {
		t.Error("no answer counts as a success")
	}
	if err := made(t)(Webhook(s.URL+"/endless", ""))(t.Context(), one()); err != nil {
		t.Errorf("2xx with an endless body: %v", err)
	}
}

func TestErrorsShowNoSecret(t *testing.T) {
	t.Parallel()
	const token = "hunter2"
	closed := httptest.NewServer(nil)
	host := closed.Listener.Addr().String()
	closed.Close()
	address := "http://user:" + token + "@" + host + "/robot/" + token + "?access_token=" + token
	for name, n := range map[string]outbox.Notifier{
		"webhook":  made(t)(Webhook(address, "whsec_aHVudGVyMmh1bnRlcjI=")),
		"dingtalk": made(t)(DingTalk(address, token)),
		"chat":     made(t)(Chat(address, "slack")),
		"email":    made(t)(Email{URL: "smtp://u:" + token + "@" + host, From: "a@example.com", To: []string{"b@example.com"}}.Notifier()),
	} {
		err := n(t.Context(), one())
		if err == nil || strings.Contains(err.Error(), token) || !strings.Contains(err.Error(), "127.0.0.1") {
			t.Errorf("%s: got %v, want an error that names the host and no secret", name, err)
		}
	}
	for _, bad := range []string{"://" + token, "ftp://" + token, token} {
		if _, err := Webhook(bad, ""); err == nil || strings.Contains(err.Error(), token) {
			t.Errorf("%s: got %v", bad, err)
		}
	}
}

// C5: the robot's JSON with type, id and attempts, signed as DingTalk documents it.
func TestDingTalk(t *testing.T) {
	t.Parallel()
	address, calls := listen(t, 200, `{"errcode":0}`)
	const secret = "SECtest"
	send := made(t)(DingTalk(address+"/robot/send?access_token=t", secret))
	for _, n := range []outbox.Notice{one(), grave(), many()} {
		if err := send(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		got := <-calls
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(got.query.Get("timestamp") + "\n" + secret))
		if want := base64.StdEncoding.EncodeToString(mac.Sum(nil)); got.query.Get("sign") != want || got.query.Get("access_token") != "t" {
			t.Errorf("query: got %v, want sign %s", got.query, want)
		}
		var m struct {
			MsgType string
			Text    struct{ Content string }
			At      struct{ IsAtAll bool }
		}
		if err := json.Unmarshal(got.body, &m); err != nil {
			t.Fatal(err)
		}
		if m.MsgType != "text" || m.At.IsAtAll != n.Grave() || len(m.Text.Content) > longestText {
			t.Errorf("message: %s", got.body)
		}
		for _, want := range []string{"ORDER_PAYMENT", "42", "3", "max_attempts"} {
			if !strings.Contains(m.Text.Content, want) {
				t.Errorf("the text has no %s:\n%s", want, m.Text.Content)
			}
		}
	}
}

// The limit of a robot counts for one long error too; what is cut is the error, not the commands behind it.
func TestLongErrorKeepsTheCommands(t *testing.T) {
	t.Parallel()
	n := one()
	n.Tasks[0].BizID, n.Tasks[0].Error = strings.Repeat("b", 255), strings.Repeat("支", 341)
	n.RunbookURL = "https://runbooks.example/" + strings.Repeat("r", 200)
	s := shortText(n)
	if len(s) > longestText || !strings.Contains(s, "taskrelay requeue 42") || !strings.Contains(s, "支…\n") {
		t.Errorf("%d bytes:\n%s", len(s), s)
	}
	n.Tasks[0].Error = `<at user_id="all"></at>`
	feishu, err := chatTemplate("feishu")
	if err != nil {
		t.Fatal(err)
	}
	body, err := render(feishu, n)
	if err != nil || strings.Contains(string(body), `\u003cat`) || strings.Contains(string(body), "<at") {
		t.Errorf("%v: %s", err, body)
	}
}

func TestChatTemplates(t *testing.T) {
	t.Parallel()
	address, calls := listen(t, 200, "ok")
	for _, name := range append(ChatTemplates(), `{"msg": {{json .Text}}, "type": {{json .BizType}}, "n": {{.Count}}, "first": {{(index .Tasks 0).ID}}}`) {
		for _, n := range []outbox.Notice{one(), grave(), many()} {
			if err := made(t)(Chat(address, name))(t.Context(), n); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			body := string((<-calls).body)
			if !json.Valid([]byte(body)) || !strings.Contains(body, "ORDER_PAYMENT") || !strings.Contains(body, "42") {
				t.Errorf("%s: %s", name, body)
			}
			if name == "slack" && (strings.Contains(body, "<!channel>") || strings.Contains(body, `\u003c!channel`)) {
				t.Errorf("the text of an error calls a Slack channel: %s", body)
			}
			if name == "discord" && !strings.Contains(body, `"allowed_mentions": {"parse": []}`) {
				t.Errorf("the text of an error calls a Discord server: %s", body)
			}
		}
	}
	for _, bad := range []string{"irc", "", `{"text": {{.Nothing}}}`, `{"text": {{json .Text}}`, `{"text": "{{.Text}}"}`, `{{end}}`} {
		if _, err := Chat(address, bad); err == nil {
			t.Errorf("template %q is accepted", bad)
		}
	}
}

func TestNewMakesWhatIsConfigured(t *testing.T) {
	t.Parallel()
	all, err := New(config.Notify{
		NotifyWebhookURL: "http://127.0.0.1/w", NotifyDingtalkURL: "http://127.0.0.1/d", NotifyChatURL: "http://127.0.0.1/c", NotifyChatTemplate: "feishu",
		NotifySmtpURL: "smtp://127.0.0.1", NotifyEmailFrom: "a@example.com", NotifyEmailTo: config.List{"b@example.com"},
	}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"webhook", "dingtalk", "chat", "email"} {
		if all[name] == nil {
			t.Errorf("%s is missing", name)
		}
	}
	_, err = New(config.Notify{NotifyChatURL: "http://127.0.0.1/c", NotifyChatTemplate: "irc"}, zerolog.Nop())
	if err == nil || !strings.Contains(err.Error(), "TASKRELAY_NOTIFY_CHAT_TEMPLATE") {
		t.Errorf("got %v, want an error that names the variable", err)
	}
	if none, err := New(config.Notify{}, zerolog.Nop()); err != nil || len(none) != 0 {
		t.Errorf("nothing configured: got %v, %v", none, err)
	}
}
