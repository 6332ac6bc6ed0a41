package notify

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// longestText is what every robot takes: WeCom's limit is 2,048 bytes, the others take more.
const longestText = 1900

// DingTalk posts notices to a robot of a DingTalk group, signed when there is a secret. The group is called by its name
// (@all) when a compensation has failed.
func DingTalk(address, secret string) (outbox.Notifier, error) {
	p, err := newPoster(address)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, n outbox.Notice) error {
		var m struct {
			MsgType string `json:"msgtype"`
			Text    struct {
				Content string `json:"content"`
			} `json:"text"`
			At struct {
				IsAtAll bool `json:"isAtAll"`
			} `json:"at"`
		}
		m.MsgType, m.Text.Content, m.At.IsAtAll = "text", shortText(n), n.Grave()
		body, err := json.Marshal(m)
		if err != nil {
			return err
		}
		answer, err := p.post(ctx, body, func(req *http.Request) {
			if secret == "" {
				return
			}
			q := req.URL.Query()
			at := strconv.FormatInt(time.Now().UnixMilli(), 10)
			q.Set("timestamp", at)
			q.Set("sign", dingTalkSignature(secret, at))
			req.URL.RawQuery = q.Encode()
		})
		if err != nil {
			return err
		}
		return robotTook(p.host, answer)
	}, nil
}

// dingTalkSignature is base64(HMAC-SHA256(secret, timestamp + "\n" + secret)), as DingTalk documents it.
func dingTalkSignature(secret, timestamp string) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(timestamp + "\n" + secret))
	return base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// chatTemplates are the bodies of robots that many have.
var chatTemplates = map[string]string{
	// The text of an error must not call a channel: Slack reads <!channel>, Discord @everyone, Feishu <at user_id="all">.
	"slack":   `{"text": {{json (slack .Text)}}}`,
	"discord": `{"content": {{json .Text}}, "allowed_mentions": {"parse": []}}`,
	"feishu":  `{"msg_type": "text", "content": {"text": {{json (feishu .Text)}}}}`,
	"wecom":   `{"msgtype": "text", "text": {"content": {{json .Text}}{{if .Grave}}, "mentioned_list": ["@all"]{{end}}}}`,
	"teams": `{"type": "message", "attachments": [{"contentType": "application/vnd.microsoft.card.adaptive", "content": {
		"type": "AdaptiveCard", "version": "1.4", "body": [{"type": "TextBlock", "text": {{json .Subject}}, "weight": "bolder", "wrap": true},
		{"type": "TextBlock", "text": {{json .Text}}, "fontType": "monospace", "wrap": true}]}}]}`,
}

// ChatTemplates are the names that Chat knows.
func ChatTemplates() []string { return slices.Sorted(maps.Keys(chatTemplates)) }

// chatData is what a template sees: the notice, and two texts about it.
type chatData struct {
	outbox.Notice
	Subject, Text string
	Grave         bool
}

// Chat posts notices to a chat robot. body is one of ChatTemplates, or a text/template that makes JSON of
// a notice: {{json .Text}} is the whole of it as a JSON string, .Subject one line; .BizType, .Event, .Count, .Tasks… are
// its parts.
func Chat(address, body string) (outbox.Notifier, error) {
	p, err := newPoster(address)
	if err != nil {
		return nil, err
	}
	t, err := chatTemplate(body)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, n outbox.Notice) error {
		body, err := render(t, n)
		if err != nil {
			return err
		}
		answer, err := p.post(ctx, body, nil)
		if err != nil {
			return err
		}
		return robotTook(p.host, answer)
	}, nil
}

func chatTemplate(body string) (*template.Template, error) {
	if known, ok := chatTemplates[body]; ok {
		body = known
	}
	if !strings.Contains(body, "{{") {
		return nil, fmt.Errorf("template %.40q: expected one of %s, or a Go template such as {\"text\": {{json .Text}}}", body, strings.Join(ChatTemplates(), ", "))
	}
	t, err := template.New("chat").Option("missingkey=error").Funcs(template.FuncMap{"json": func(v any) (string, error) {
		b, err := json.Marshal(v)
		return string(b), err
	}, "slack": strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace, "feishu": strings.NewReplacer("<", "＜").Replace}).Parse(body)
	if err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	// A mistake in it shall stop the start, not the first notice at night.
	_, err = render(t, outbox.Notice{BizType: "EXAMPLE", Event: outbox.EventDead, Count: 1, Counts: map[string]int{outbox.EventDead: 1},
		Tasks: []outbox.NoticeTask{{ID: 1, Event: outbox.EventDead, Error: `a "quoted" error`}}})
	return t, err
}

func render(t *template.Template, n outbox.Notice) ([]byte, error) {
	var b bytes.Buffer
	if err := t.Execute(&b, chatData{Notice: n, Subject: n.Subject(), Text: shortText(n), Grave: n.Grave()}); err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	if !json.Valid(b.Bytes()) {
		return nil, errors.New("template: it does not make JSON: write texts as {{json .Text}}")
	}
	return b.Bytes(), nil
}

// shortText leaves out tasks from the end of a long notice, and the end of the error of its only one: its first lines and
// its commands say what matters.
func shortText(n outbox.Notice) string {
	for {
		s := n.Text()
		over := len(s) - longestText
		if over <= 0 || len(n.Tasks) == 0 {
			return strings.TrimSpace(s)
		}
		if len(n.Tasks) > 1 {
			n.Tasks = n.Tasks[:len(n.Tasks)-1]
			continue
		}
		t := n.Tasks[0]
		if t.Error == "" {
			return strings.TrimSpace(s)
		}
		t.Error = strings.ToValidUTF8(t.Error[:max(0, len(t.Error)-over-len("…"))], "")
		if t.Error != "" {
			t.Error += "…"
		}
		n.Tasks = []outbox.NoticeTask{t}
	}
}

// robotTook reads the answer: these robots say 200 and the failure in the body (errcode of DingTalk and WeCom, code of
// Feishu).
func robotTook(host string, answer []byte) error {
	var a struct {
		ErrCode int    `json:"errcode"`
		ErrMsg  string `json:"errmsg"`
		Code    int    `json:"code"`
		Msg     string `json:"msg"`
	}
	if json.Unmarshal(answer, &a) != nil {
		return nil // Slack says ok, Discord and Teams nothing
	}
	switch {
	case a.ErrCode != 0:
		return fmt.Errorf("%s refused the message: errcode %d, %.200s", host, a.ErrCode, a.ErrMsg)
	case a.Code != 0:
		return fmt.Errorf("%s refused the message: code %d, %.200s", host, a.Code, a.Msg)
	}
	return nil
}
