package notify

import (
	"bytes"
	"crypto/tls"
	"io"
	"mime"
	"mime/quotedprintable"
	"net/mail"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func emailTo(s *testenv.SMTP, userinfo, query string, to ...string) Email {
	if len(to) == 0 {
		to = []string{"Night Shift <night@example.com>"}
	}
	return Email{URL: "smtp://" + userinfo + s.Addr + query, From: "taskrelay <relay@example.com>", To: to, TLS: &tls.Config{RootCAs: s.Roots}}
}

func TestEmailGoesOutEncryptedAndLoggedIn(t *testing.T) {
	t.Parallel()
	for _, mechanisms := range []string{"PLAIN", "PLAIN LOGIN", "LOGIN"} {
		s := testenv.NewSMTP(t)
		s.Mechanisms, s.User, s.Pass = mechanisms, "relay", "p@ss/word"
		send := made(t)(emailTo(s, "relay:p%40ss%2Fword@", "", "night@example.com", "day@example.com").Notifier())
		if err := send(t.Context(), grave()); err != nil {
			t.Fatalf("%s: %v", mechanisms, err)
		}
		got := s.Mails()
		if len(got) != 1 || !got[0].Encrypted || got[0].User != "relay" || got[0].From != "relay@example.com" ||
			strings.Join(got[0].To, " ") != "night@example.com day@example.com" {
			t.Fatalf("%s: got %+v", mechanisms, got)
		}
		m, err := mail.ReadMessage(strings.NewReader(got[0].Data))
		if err != nil {
			t.Fatal(err)
		}
		subject, err := new(mime.WordDecoder).DecodeHeader(m.Header.Get("Subject"))
		if err != nil || !strings.Contains(subject, "COMPENSATION FAILED") || !strings.Contains(subject, "ORDER_PAYMENT task 42") {
			t.Errorf("subject: %q, %v", subject, err)
		}
		if m.Header.Get("Importance") != "high" || m.Header.Get("Message-ID") == "" || m.Header.Get("Auto-Submitted") != "auto-generated" {
			t.Errorf("headers: %v", m.Header)
		}
		body, err := io.ReadAll(quotedprintable.NewReader(m.Body))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"Order payment 支付", "taskrelay requeue 42", "max_attempts", "https://runbooks.example/pay", `HTTP 503 <!channel> @everyone "bank" is closed`} {
			if !strings.Contains(string(body), want) {
				t.Errorf("the mail has no %q:\n%s", want, body)
			}
		}
	}
}

// Somebody between us and the server could take the offer of STARTTLS away, and read.
func TestEmailIsNotSentUnencryptedByAccident(t *testing.T) {
	t.Parallel()
	s := testenv.NewSMTP(t)
	s.NoTLS, s.Mechanisms = true, "PLAIN"
	err := made(t)(emailTo(s, "relay:secret@", "").Notifier())(t.Context(), one())
	if err == nil || !strings.Contains(err.Error(), "STARTTLS") || len(s.Mails()) != 0 {
		t.Errorf("got %v and %d mails", err, len(s.Mails()))
	}
	if err := made(t)(emailTo(s, "", "?starttls=off").Notifier())(t.Context(), one()); err != nil || len(s.Mails()) != 1 {
		t.Errorf("starttls=off: got %v and %d mails", err, len(s.Mails()))
	}
	for _, bad := range []Email{
		emailTo(s, "relay:secret@", "?starttls=off"), emailTo(s, "", "?tls=off"), emailTo(s, "", "", "nobody"),
		{URL: "http://127.0.0.1", From: "a@example.com", To: []string{"b@example.com"}}, {URL: "smtp://127.0.0.1", From: "a@example.com"},
	} {
		if _, err := bad.Notifier(); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
	other := testenv.NewSMTP(t) // a certificate that nobody vouches for
	e := emailTo(other, "", "")
	e.TLS = nil
	if err := made(t)(e.Notifier())(t.Context(), one()); err == nil || !strings.Contains(err.Error(), "STARTTLS") || len(other.Mails()) != 0 {
		t.Errorf("an unknown certificate: got %v and %d mails", err, len(other.Mails()))
	}
}

func TestReceiverThatIsRefusedKeepsNoMailFromTheOthers(t *testing.T) {
	t.Parallel()
	s := testenv.NewSMTP(t)
	s.Refuses = []string{"gone@example.com"}
	var log bytes.Buffer
	e := emailTo(s, "", "", "gone@example.com", "night@example.com")
	e.Logger = zerolog.New(&log)
	if err := made(t)(e.Notifier())(t.Context(), one()); err != nil {
		t.Fatal(err)
	}
	if got := s.Mails(); len(got) != 1 || strings.Join(got[0].To, " ") != "night@example.com" {
		t.Errorf("got %+v", got)
	}
	if !strings.Contains(log.String(), "gone@example.com") {
		t.Errorf("nothing says that a receiver was refused: %s", log.String())
	}
	if err := made(t)(emailTo(s, "", "", "gone@example.com").Notifier())(t.Context(), one()); err == nil {
		t.Error("a mail that nobody gets counts as sent")
	}
	s.Busy(true)
	if err := made(t)(emailTo(s, "", "").Notifier())(t.Context(), one()); err == nil || !strings.Contains(err.Error(), "451") {
		t.Errorf("a server that is busy: got %v", err)
	}
}

// A task's texts come from whoever calls us: they must not become headers or a second mail.
func TestTextsOfTasksStayInTheirPlace(t *testing.T) {
	t.Parallel()
	s := testenv.NewSMTP(t)
	n := one()
	n.Tasks[0].BizID = "x\r\nBcc: everybody@example.com\r\n\r\nbody"
	n.Tasks[0].Error = "line\r\n.\r\nMAIL FROM:<forged@example.com>"
	n.Title = "t\r\nX-Forged: 1"
	if err := made(t)(emailTo(s, "", "").Notifier())(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	got := s.Mails()
	if len(got) != 1 {
		t.Fatalf("got %d mails", len(got))
	}
	m, err := mail.ReadMessage(strings.NewReader(got[0].Data))
	if err != nil {
		t.Fatal(err)
	}
	if m.Header.Get("Bcc") != "" || m.Header.Get("X-Forged") != "" || len(got[0].To) != 1 {
		t.Errorf("headers: %v", m.Header)
	}
	if _, err := io.ReadAll(quotedprintable.NewReader(m.Body)); err != nil {
		t.Errorf("body: %v", err)
	}
}
