package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// CA is an authority of one test. File is its certificate, for clients and servers that trust it.
type CA struct {
	File string

	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewCA makes an authority.
func NewCA(t testing.TB) *CA {
	t.Helper()
	ca := &CA{dir: tempDir(t), key: must[*ecdsa.PrivateKey](t, "make a key")(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))}
	if err := os.Chmod(ca.dir, 0o755); err != nil { // a Postgres that runs as another user reads its files there
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(ca.dir), 0o755); err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "CA of a test"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der := must[[]byte](t, "make a CA")(x509.CreateCertificate(rand.Reader, template, template, &ca.key.PublicKey, ca.key))
	ca.cert = must[*x509.Certificate](t, "read the CA")(x509.ParseCertificate(der))
	ca.File = ca.write(t, "ca.pem", 0o644, "CERTIFICATE", der)
	return ca
}

// Issue makes a certificate for 127.0.0.1, and no host name, which is good for a server and for a client.
func (ca *CA) Issue(t testing.TB, name string) (cert, key string) {
	t.Helper()
	own := must[*ecdsa.PrivateKey](t, "make a key")(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der := must[[]byte](t, "issue a certificate")(x509.CreateCertificate(rand.Reader, template, ca.cert, &own.PublicKey, ca.key))
	cert = ca.write(t, name+".pem", 0o644, "CERTIFICATE", der)
	key = ca.write(t, name+"-key.pem", 0o600, "PRIVATE KEY", must[[]byte](t, "write the key")(x509.MarshalPKCS8PrivateKey(own)))
	return cert, key
}

// ForPostgres gives a file to the user that a throw-away Postgres runs as: it takes no key that others may read.
func (ca *CA) ForPostgres(t testing.TB, file string) {
	t.Helper()
	if os.Geteuid() != 0 {
		return
	}
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			uid := must[int](t, "uid")(strconv.Atoi(u.Uid))
			if err := os.Chown(file, uid, -1); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatal("neither user postgres nor user nobody exists")
}

func (ca *CA) write(t testing.TB, name string, mode os.FileMode, kind string, der []byte) string {
	t.Helper()
	path := filepath.Join(ca.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode); err != nil {
		t.Fatal(err)
	}
	return path
}
