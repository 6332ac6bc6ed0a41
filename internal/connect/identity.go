package connect

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
)

// Identity is how we show ourselves to NATS, and by what we know the server. All are paths of files, which are read again
// at each reconnect, so that they can be changed under a running process. The zero value trusts what the system trusts and
// shows what the address holds.
type Identity struct {
	Creds string // a credentials file: JWT and seed
	NKey  string // a file with the seed of an nkey
	CA    string // PEM: who may vouch for the server. With it nothing is sent without TLS
	Cert  string // PEM: our certificate …
	Key   string // … and its key
}

// Options are the same for nats.go.
func (i Identity) Options() ([]nats.Option, error) {
	var opts []nats.Option
	if i.Creds != "" && i.NKey != "" {
		return nil, errors.New("a credentials file and an nkey: give one of them")
	}
	if i.Creds != "" {
		opts = append(opts, nats.UserCredentials(i.Creds))
	}
	if i.NKey != "" {
		o, err := nats.NkeyOptionFromSeed(i.NKey)
		if err != nil {
			return nil, fmt.Errorf("nkey: %w", err)
		}
		opts = append(opts, o)
	}
	if i.CA != "" {
		opts = append(opts, nats.RootCAs(i.CA))
	}
	if i.Cert != "" {
		opts = append(opts, nats.ClientCert(i.Cert, i.Key))
	}
	return opts, nil
}
