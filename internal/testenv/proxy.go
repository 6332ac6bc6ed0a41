package testenv

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// Proxy is a TCP link in front of a server.
type Proxy struct {
	Addr string

	mu    sync.Mutex
	links []*proxyLink
}

type proxyLink struct {
	deaf           atomic.Bool
	client, server net.Conn
}

// NewProxy listens for connections to the server at upstream until the test ends.
func NewProxy(t testing.TB, upstream string) *Proxy {
	t.Helper()
	l := must[net.Listener](t, "listen")(net.Listen("tcp", "127.0.0.1:0"))
	p := &Proxy{Addr: l.Addr().String()}
	var conns sync.Map
	var all sync.WaitGroup
	all.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", upstream)
			if err != nil {
				_ = client.Close()
				continue
			}
			conns.Store(client, nil)
			conns.Store(server, nil)
			k := &proxyLink{client: client, server: server}
			p.mu.Lock()
			p.links = append(p.links, k)
			p.mu.Unlock()
			all.Go(func() { k.pump(server, client, false) })
			all.Go(func() { k.pump(client, server, true) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		conns.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
		all.Wait()
	})
	return p
}

// Deafen swallows all that the server answers on the connections there are, which stay open. New ones work.
func (p *Proxy) Deafen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.links {
		k.deaf.Store(true)
	}
}

// Cut ends the connections there are. The server notices when it next reads or writes. New ones work.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.links {
		_ = k.client.Close()
		_ = k.server.Close()
	}
	p.links = nil
}

func (k *proxyLink) pump(to, from net.Conn, answers bool) {
	defer to.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && !(answers && k.deaf.Load()) {
			if _, werr := to.Write(buf[:n]); werr != nil {
				_, _ = io.Copy(io.Discard, from)
				return
			}
		}
		if err != nil {
			return
		}
	}
}
