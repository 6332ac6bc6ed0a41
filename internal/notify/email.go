package notify

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"mime"
	"mime/quotedprintable"
	"net"
	"net/mail"
	"net/smtp"
	"net/url"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Email sends notices as plain text mail.
type Email struct {
	// Required: smtp://user:password@host:587, encrypted by STARTTLS, or smtps://host:465. With ?starttls=off in
	// smtp:// nothing is encrypted, and no password is sent: for a mail server on this machine.
	URL string
	// Required: one sender, and receivers.
	From string
	To   []string
	// Optional: how the server's certificate is checked. By default by the system's roots and the host's name.
	TLS *tls.Config
	// Optional: says which receivers the server does not want.
	Logger zerolog.Logger
}

// emailTime is what one mail may take, from the connection to the server's last answer.
const emailTime = 20 * time.Second

type mailer struct {
	Email
	host, port string
	implicit   bool // TLS from the first byte
	plain      bool // starttls=off
	auth       *url.Userinfo
	from       *mail.Address
	to         []*mail.Address
}

// Notifier checks the configuration. It does not connect: mail may be down when the relay starts.
func (e Email) Notifier() (outbox.Notifier, error) {
	u, err := url.Parse(e.URL)
	if err != nil || u.Hostname() == "" || u.Scheme != "smtp" && u.Scheme != "smtps" {
		return nil, errors.New("expected smtp://user:password@host:587 or smtps://host:465")
	}
	m := &mailer{Email: e, host: u.Hostname(), port: u.Port(), implicit: u.Scheme == "smtps", auth: u.User}
	for name, values := range u.Query() {
		if name != "starttls" || len(values) != 1 || values[0] != "off" && values[0] != "on" {
			return nil, errors.New("after the ? of the address only starttls=off is known")
		}
		m.plain = values[0] == "off"
	}
	if m.plain && m.auth != nil {
		return nil, errors.New("starttls=off with a user: the password would be readable on the way")
	}
	if m.port == "" {
		m.port = map[bool]string{true: "465", false: "587"}[m.implicit]
	}
	if m.from, err = mail.ParseAddress(e.From); err != nil {
		return nil, fmt.Errorf("sender %q: %w", e.From, err)
	}
	for _, to := range e.To {
		a, err := mail.ParseAddress(to)
		if err != nil {
			return nil, fmt.Errorf("receiver %q: %w", to, err)
		}
		m.to = append(m.to, a)
	}
	if len(m.to) == 0 {
		return nil, errors.New("no receiver")
	}
	return m.send, nil
}

func (m *mailer) send(ctx context.Context, n outbox.Notice) error {
	ctx, cancel := context.WithTimeout(ctx, emailTime)
	defer cancel()
	c, err := m.connect(ctx)
	if err != nil {
		return fmt.Errorf("mail server %s: %w", m.host, err)
	}
	defer c.Close()
	if err := m.deliver(c, n); err != nil {
		return fmt.Errorf("mail server %s: %w", m.host, err)
	}
	_ = c.Quit() // the server has the mail: how it says goodbye changes nothing
	return nil
}

// connect connects, encrypts and logs in.
func (m *mailer) connect(ctx context.Context) (*smtp.Client, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(m.host, m.port))
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) }) // at the end of send, or when the relay stops
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if m.TLS != nil {
		config = m.TLS.Clone()
	}
	config.ServerName = m.host
	if m.implicit {
		conn = tls.Client(conn, config)
	}
	c, err := smtp.NewClient(conn, m.host)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	if err := m.login(c, config); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func (m *mailer) login(c *smtp.Client, config *tls.Config) error {
	if !m.implicit && !m.plain {
		// Not "when it is offered": somebody between us could take the offer away.
		if ok, _ := c.Extension("STARTTLS"); !ok {
			return errors.New("it offers no STARTTLS: use smtps://, or ?starttls=off if nobody can listen on the way")
		}
		if err := c.StartTLS(config); err != nil {
			return fmt.Errorf("STARTTLS: %w", err)
		}
	}
	if m.auth == nil {
		return nil
	}
	ok, offered := c.Extension("AUTH")
	if !ok {
		return errors.New("it offers no login, but the address has a user")
	}
	password, _ := m.auth.Password()
	var auth smtp.Auth = smtp.PlainAuth("", m.auth.Username(), password, m.host)
	if mechanisms := strings.Fields(offered); !contains(mechanisms, "PLAIN") && contains(mechanisms, "LOGIN") {
		auth = &loginAuth{m.auth.Username(), password}
	}
	if err := c.Auth(auth); err != nil {
		return fmt.Errorf("login: %w", err)
	}
	return nil
}

// deliver hands the mail over. A receiver that the server does not want must not keep it from the others.
func (m *mailer) deliver(c *smtp.Client, n outbox.Notice) error {
	if err := c.Mail(m.from.Address); err != nil {
		return fmt.Errorf("sender %s: %w", m.from.Address, err)
	}
	var refused error
	taken := 0
	for _, to := range m.to {
		if err := c.Rcpt(to.Address); err != nil {
			refused = errors.Join(refused, fmt.Errorf("receiver %s: %w", to.Address, err))
			continue
		}
		taken++
	}
	if taken == 0 {
		return refused
	}
	w, err := c.Data()
	if err != nil {
		return err
	}
	if _, err := w.Write(m.message(n, time.Now())); err != nil {
		return err
	}
	if err := w.Close(); err != nil { // the server's answer: now the mail is its own
		return err
	}
	if refused != nil {
		m.Logger.Error().Err(refused).Str("biz_type", n.BizType).Msg("mail server refused receivers, the others have the notice")
	}
	return nil
}

// message writes the mail. Nothing of a task gets into a header unencoded.
func (m *mailer) message(n outbox.Notice, now time.Time) []byte {
	var b bytes.Buffer
	header := func(name, value string) { fmt.Fprintf(&b, "%s: %s\r\n", name, value) }
	to := make([]string, len(m.to))
	for i, a := range m.to {
		to[i] = a.String()
	}
	header("From", m.from.String())
	header("To", strings.Join(to, ", "))
	header("Subject", mime.QEncoding.Encode("utf-8", n.Subject()))
	header("Date", now.Format(time.RFC1123Z))
	header("Message-ID", messageID(n, m.from.Address))
	header("Auto-Submitted", "auto-generated")
	if n.Grave() {
		header("Importance", "high")
		header("X-Priority", "1")
	}
	header("MIME-Version", "1.0")
	header("Content-Type", "text/plain; charset=utf-8")
	header("Content-Transfer-Encoding", "quoted-printable")
	b.WriteString("\r\n")
	q := quotedprintable.NewWriter(&b)
	_, _ = q.Write([]byte(strings.ReplaceAll(n.Text(), "\n", "\r\n"))) // into memory
	_ = q.Close()
	return b.Bytes()
}

// messageID names the notice, so that a repetition is seen as one.
func messageID(n outbox.Notice, from string) string {
	_, domain, _ := strings.Cut(from, "@")
	id := n.ID
	if id == "" {
		var random [16]byte
		_, _ = rand.Read(random[:]) // never fails
		id = hex.EncodeToString(random[:])
	}
	return "<" + id + "." + n.Installation + "@" + domain + ">"
}

// loginAuth is the mechanism LOGIN, the only one of some servers. Only over TLS.
type loginAuth struct{ user, password string }

func (a *loginAuth) Start(s *smtp.ServerInfo) (string, []byte, error) {
	if !s.TLS {
		return "", nil, errors.New("unencrypted connection")
	}
	return "LOGIN", nil, nil
}

func (a *loginAuth) Next(from []byte, more bool) ([]byte, error) {
	if !more {
		return nil, nil
	}
	switch strings.ToLower(strings.TrimRight(string(from), ": ")) {
	case "username", "user name":
		return []byte(a.user), nil
	case "password":
		return []byte(a.password), nil
	}
	return nil, errors.New("the server asks for something else than user name and password")
}

func contains(list []string, s string) bool {
	for _, l := range list {
		if strings.EqualFold(l, s) {
			return true
		}
	}
	return false
}
