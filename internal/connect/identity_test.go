package connect

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func natsServer(t *testing.T, change func(*server.Options)) *server.Server {
	t.Helper()
	opts := &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true}
	change(opts)
	s, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("nats-server does not get ready")
	}
	return s
}

type lockedLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// comesIn wants a connection of this identity, or a log that says why there is none.
func comesIn(t *testing.T, what, url string, id Identity, reason string) {
	t.Helper()
	var log lockedLog
	nc, err := NATS(url, id, "relay", zerolog.New(&log))
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer nc.Close()
	testenv.Eventually(t, 20*time.Second, func() error {
		if reason == "" && !nc.IsConnected() || reason != "" && !strings.Contains(log.String(), reason) {
			return fmt.Errorf("%s: connected %v, want the reason %q in the log: %s", what, nc.IsConnected(), reason, log.String())
		}
		return nil
	})
	if reason != "" && nc.IsConnected() {
		t.Errorf("%s: came in", what)
	}
}

func write(t *testing.T, name string, text []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func newKey(t *testing.T, make func() (nkeys.KeyPair, error)) (kp nkeys.KeyPair, public string, seed []byte) {
	t.Helper()
	kp, err := make()
	if err != nil {
		t.Fatal(err)
	}
	if public, err = kp.PublicKey(); err != nil {
		t.Fatal(err)
	}
	if seed, err = kp.Seed(); err != nil {
		t.Fatal(err)
	}
	return kp, public, seed
}

func TestNATSByNKey(t *testing.T) {
	t.Parallel()
	_, public, seed := newKey(t, nkeys.CreateUser)
	_, _, other := newKey(t, nkeys.CreateUser)
	s := natsServer(t, func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: public}} })
	comesIn(t, "its key", s.ClientURL(), Identity{NKey: write(t, "relay.nk", seed)}, "")
	comesIn(t, "another key", s.ClientURL(), Identity{NKey: write(t, "relay.nk", other)}, "Authorization Violation")
	comesIn(t, "no key", s.ClientURL(), Identity{}, "Authorization Violation")
	if _, err := NATS(s.ClientURL(), Identity{NKey: "a", Creds: "b"}, "relay", zerolog.Nop()); err == nil || !strings.Contains(err.Error(), "one of them") {
		t.Errorf("key and credentials: %v", err)
	}
}

// A credentials file is read again at a reconnect: it can be changed under a running process.
func TestNATSByCredentialsFile(t *testing.T) {
	t.Parallel()
	operator, operatorPublic, _ := newKey(t, nkeys.CreateOperator)
	account, accountPublic, _ := newKey(t, nkeys.CreateAccount)
	operatorJWT, err := jwt.NewOperatorClaims(operatorPublic).Encode(operator)
	if err != nil {
		t.Fatal(err)
	}
	trusted, err := jwt.DecodeOperatorClaims(operatorJWT)
	if err != nil {
		t.Fatal(err)
	}
	accountJWT, err := jwt.NewAccountClaims(accountPublic).Encode(operator)
	if err != nil {
		t.Fatal(err)
	}
	resolver := &server.MemAccResolver{}
	if err := resolver.Store(accountPublic, accountJWT); err != nil {
		t.Fatal(err)
	}
	s := natsServer(t, func(o *server.Options) {
		o.TrustedOperators, o.AccountResolver = []*jwt.OperatorClaims{trusted}, resolver
	})
	creds := func(life time.Duration) []byte {
		_, public, seed := newKey(t, nkeys.CreateUser)
		claims := jwt.NewUserClaims(public)
		claims.Expires = time.Now().Add(life).Unix()
		token, err := claims.Encode(account)
		if err != nil {
			t.Fatal(err)
		}
		text, err := jwt.FormatUserConfig(token, seed)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	file := write(t, "relay.creds", creds(-time.Minute))
	comesIn(t, "expired", s.ClientURL(), Identity{Creds: file}, "Authorization Violation")

	nc, err := NATS(s.ClientURL(), Identity{Creds: file}, "relay", zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := os.WriteFile(file, creds(time.Hour), 0o600); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		if !nc.IsConnected() {
			return fmt.Errorf("not in with the new file: %v", nc.LastError())
		}
		return nil
	})
}

func TestNATSByTLS(t *testing.T) {
	t.Parallel()
	ca, other := testenv.NewCA(t), testenv.NewCA(t)
	cert, key := ca.Issue(t, "nats")
	client, clientKey := ca.Issue(t, "relay")
	stranger, strangerKey := other.Issue(t, "relay")
	s := natsServer(t, func(o *server.Options) {
		c, err := server.GenTLSConfig(&server.TLSConfigOpts{CertFile: cert, KeyFile: key, CaFile: ca.File, Verify: true})
		if err != nil {
			t.Fatal(err)
		}
		o.TLS, o.TLSVerify, o.TLSConfig, o.TLSTimeout = true, true, c, 5
	})
	plain := natsServer(t, func(*server.Options) {})
	url := s.ClientURL()
	byName := strings.Replace(url, "127.0.0.1", "localhost", 1)
	comesIn(t, "both certificates good", url, Identity{CA: ca.File, Cert: client, Key: clientKey}, "")
	comesIn(t, "server of another authority", url, Identity{CA: other.File, Cert: client, Key: clientKey}, "unknown authority")
	comesIn(t, "server by the system's list", url, Identity{Cert: client, Key: clientKey}, "unknown authority")
	comesIn(t, "another host", byName, Identity{CA: ca.File, Cert: client, Key: clientKey}, "not valid for any names")
	comesIn(t, "client of another authority", url, Identity{CA: ca.File, Cert: stranger, Key: strangerKey}, "waiting")
	comesIn(t, "client without a certificate", url, Identity{CA: ca.File}, "waiting")
	// Somebody between us and the server cannot talk us out of TLS.
	comesIn(t, "a server without TLS", plain.ClientURL(), Identity{CA: ca.File}, nats.ErrSecureConnWanted.Error())
}

func TestMain(m *testing.M) { testenv.Main(m) }
