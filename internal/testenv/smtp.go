package testenv

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/textproto"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// SMTP is a mail server that takes what it is sent. It speaks STARTTLS and, inside of it, AUTH.
type SMTP struct {
	Addr     string
	CertFile string         // its certificate, for SSL_CERT_FILE
	Roots    *x509.CertPool // the same for this process

	// What it is like; set before the first mail.
	NoTLS      bool     // offers no STARTTLS
	Mechanisms string   // of AUTH, such as "PLAIN LOGIN"; none: no AUTH
	User, Pass string   // what AUTH must say
	Refuses    []string // receivers that do not exist

	cert  tls.Certificate
	mu    sync.Mutex
	mails []Mail
	busy  bool // answers 451 to every mail
}

// Mail is one that an SMTP server has taken.
type Mail struct {
	From      string
	To        []string
	Data      string // headers and body, lines end in \n
	Encrypted bool
	User      string
}

// NewSMTP starts a mail server at 127.0.0.1.
func NewSMTP(t testing.TB) *SMTP {
	t.Helper()
	s := &SMTP{}
	key := must[*ecdsa.PrivateKey](t, "make a key")(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "mail of a test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
	}
	der := must[[]byte](t, "make a certificate")(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))
	s.cert = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	s.Roots = x509.NewCertPool()
	s.Roots.AddCert(must[*x509.Certificate](t, "read the certificate")(x509.ParseCertificate(der)))
	s.CertFile = filepath.Join(tempDir(t), "mail.pem")
	if err := os.WriteFile(s.CertFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}

	l := must[net.Listener](t, "listen for mail")(net.Listen("tcp", "127.0.0.1:0"))
	s.Addr = l.Addr().String()
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer conn.Close()
				_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
				s.serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return s
}

// Busy makes the server put off every mail, or take them again.
func (s *SMTP) Busy(busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy = busy
}

// Mails returns what was taken so far.
func (s *SMTP) Mails() []Mail {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.mails)
}

// WaitMails waits until at least n mails were taken.
func (s *SMTP) WaitMails(t testing.TB, timeout time.Duration, n int) []Mail {
	t.Helper()
	var mails []Mail
	Eventually(t, timeout, func() error {
		if mails = s.Mails(); len(mails) < n {
			return fmt.Errorf("%d mails have come, want %d", len(mails), n)
		}
		return nil
	})
	return mails
}

func (s *SMTP) serve(conn net.Conn) {
	r := bufio.NewReader(conn)
	say := func(format string, args ...any) { fmt.Fprintf(conn, format+"\r\n", args...) }
	var m Mail
	say("220 mail of a test")
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		line = strings.TrimRight(line, "\r\n")
		verb, rest, _ := strings.Cut(line, " ")
		switch strings.ToUpper(verb) {
		case "EHLO", "HELO":
			say("250-mail of a test")
			if !s.NoTLS && !m.Encrypted {
				say("250-STARTTLS")
			}
			if s.Mechanisms != "" && (m.Encrypted || s.NoTLS) {
				say("250-AUTH %s", s.Mechanisms)
			}
			say("250 8BITMIME")
		case "STARTTLS":
			say("220 go ahead")
			c := tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{s.cert}, MinVersion: tls.VersionTLS12})
			if c.Handshake() != nil {
				return
			}
			conn, r, m = c, bufio.NewReader(c), Mail{Encrypted: true}
		case "AUTH":
			user, pass := s.credentials(rest, r, say)
			if user != s.User || pass != s.Pass {
				say("535 wrong user or password")
				continue
			}
			m.User = user
			say("235 welcome")
		case "MAIL":
			s.mu.Lock()
			busy := s.busy
			s.mu.Unlock()
			if busy {
				say("451 try again later")
				continue
			}
			m.From = address(rest)
			say("250 ok")
		case "RCPT":
			if slices.Contains(s.Refuses, address(rest)) {
				say("550 no such user")
				continue
			}
			m.To = append(m.To, address(rest))
			say("250 ok")
		case "DATA":
			say("354 end with a dot")
			data, err := io.ReadAll(textproto.NewReader(r).DotReader())
			if err != nil {
				return
			}
			m.Data = string(data)
			s.mu.Lock()
			s.mails = append(s.mails, m)
			s.mu.Unlock()
			m = Mail{Encrypted: m.Encrypted, User: m.User}
			say("250 taken")
		case "QUIT":
			say("221 bye")
			return
		default:
			say("500 %s is not known here", verb)
		}
	}
}

func (s *SMTP) credentials(rest string, r *bufio.Reader, say func(string, ...any)) (user, pass string) {
	decode := func(text string) string {
		b, _ := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
		return string(b)
	}
	mechanism, initial, _ := strings.Cut(rest, " ")
	if strings.EqualFold(mechanism, "PLAIN") {
		parts := bytes.Split([]byte(decode(initial)), []byte{0})
		if len(parts) != 3 {
			return "", ""
		}
		return string(parts[1]), string(parts[2])
	}
	var answers [2]string
	for i, question := range []string{"Username:", "Password:"} {
		say("334 %s", base64.StdEncoding.EncodeToString([]byte(question)))
		line, _ := r.ReadString('\n')
		answers[i] = decode(line)
	}
	return answers[0], answers[1]
}

// address takes a@b out of FROM:<a@b> BODY=8BITMIME.
func address(rest string) string {
	_, rest, _ = strings.Cut(rest, "<")
	rest, _, _ = strings.Cut(rest, ">")
	return rest
}
