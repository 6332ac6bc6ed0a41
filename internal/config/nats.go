package config

import (
	"crypto/tls"
	"crypto/x509"
	"os"

	"github.com/nats-io/nats.go"
)

// checkNats looks into the files, so that a mistake is named at the start and not by a server that only says no.
func (s *Common) checkNats(c *checks) {
	if s.NatsCreds != "" {
		if f, err := os.Open(s.NatsCreds); err != nil {
			c.add(Invalid("NATS_CREDS", "%w", err))
		} else {
			_ = f.Close()
		}
	}
	switch {
	case s.NatsNkey != "" && s.NatsCreds != "":
		c.add(Invalid("NATS_NKEY", "TASKRELAY_NATS_CREDS is set too: keep one of them"))
	case s.NatsNkey != "":
		if _, err := os.Stat(s.NatsNkey); err != nil {
			c.add(Invalid("NATS_NKEY", "%w", err))
		} else if _, err := nats.NkeyOptionFromSeed(s.NatsNkey); err != nil {
			// err is left out: it may say what is in the file.
			c.add(Invalid("NATS_NKEY", "%q: expected a file with the seed of a user's nkey (it begins with SU), as nk -gen user makes it", s.NatsNkey))
		}
	}
	if s.NatsCA != "" {
		if pem, err := os.ReadFile(s.NatsCA); err != nil {
			c.add(Invalid("NATS_CA", "%w", err))
		} else if !x509.NewCertPool().AppendCertsFromPEM(pem) {
			c.add(Invalid("NATS_CA", "%q: expected certificates in PEM form", s.NatsCA))
		}
	}
	switch {
	case s.NatsCert != "" && s.NatsKey == "":
		c.add(Invalid("NATS_CERT", "set without TASKRELAY_NATS_KEY"))
	case s.NatsCert == "" && s.NatsKey != "":
		c.add(Invalid("NATS_KEY", "set without TASKRELAY_NATS_CERT"))
	case s.NatsCert != "":
		if _, err := tls.LoadX509KeyPair(s.NatsCert, s.NatsKey); err != nil {
			c.add(Invalid("NATS_CERT", "%q with TASKRELAY_NATS_KEY %q: expected a certificate and its key in PEM form: %w", s.NatsCert, s.NatsKey, err))
		}
	}
}
