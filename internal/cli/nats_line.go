package cli

import (
	"strings"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/internal/natscli"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Lines for the nats CLI work as they are pasted: with the server, the identity and JetStream's prefix that this command
// has.

// urlVariable stands for an address that is not known, or holds a password.
const urlVariable = "$TASKRELAY_NATS_URL"

func names(cfg config.CLI) outbox.Names {
	return outbox.Names{Namespace: cfg.Namespace, APIPrefix: cfg.NatsAPIPrefix}
}

// natsServer is the server of this command; unset is the address where it has none.
func natsServer(cfg config.CLI, unset string) natscli.Server {
	s := natscli.Server{URL: string(cfg.NatsURL), Creds: cfg.NatsCreds, NKey: cfg.NatsNkey, CA: cfg.NatsCA, Cert: cfg.NatsCert, ClientsKey: cfg.NatsKey}
	switch {
	case s.URL == "":
		s.URL = unset
	case cfg.NatsURL.Redacted() != s.URL:
		s.URL = urlVariable
	}
	return s
}

// natsLine is natscli.Line, in which a shell puts the variable's value.
func natsLine(command []string) string {
	return strings.ReplaceAll(natscli.Line(command), "'"+urlVariable+"'", `"`+urlVariable+`"`)
}
