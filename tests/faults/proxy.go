package faults

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// A proxy is one TCP link that can be broken: from one process to Postgres or to NATS.
type proxy struct {
	listener net.Listener
	upstream string
	wg       sync.WaitGroup

	mu     sync.Mutex
	change sync.Cond
	conns  map[*link]bool
	refuse bool          // new connections are closed at once
	stall  bool          // nothing moves, and nothing is lost: what a network does while it drops packets
	delay  time.Duration // of each chunk, in each direction
	closed bool
}

// A link is one connection through the proxy.
type link struct {
	client, server net.Conn
	deaf           [2]bool // by direction: bytes are taken and never arrive, as after a firewall forgot the connection
}

const (
	towardsServer = iota
	towardsClient
)

func newProxy(t testing.TB, upstream string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, upstream: upstream, conns: make(map[*link]bool)}
	p.change.L = &p.mu
	p.wg.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

func (p *proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(c) })
	}
}

func (p *proxy) serve(client net.Conn) {
	defer client.Close()
	p.mu.Lock()
	refuse := p.refuse
	p.mu.Unlock()
	if refuse {
		return
	}
	server, err := net.DialTimeout("tcp", p.upstream, 5*time.Second)
	if err != nil {
		return
	}
	defer server.Close()
	k := &link{client: client, server: server}
	p.mu.Lock()
	if p.closed || p.refuse {
		p.mu.Unlock()
		return
	}
	p.conns[k] = true
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { p.pump(k, server, client, towardsServer) })
	both.Go(func() { p.pump(k, client, server, towardsClient) })
	both.Wait()
	p.mu.Lock()
	delete(p.conns, k)
	p.mu.Unlock()
}

// pump moves bytes one way until one side ends.
func (p *proxy) pump(k *link, to io.Writer, from io.Reader, way int) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		delay, deaf := p.gate(k, way)
		if delay > 0 {
			time.Sleep(delay)
		}
		if n > 0 && !deaf {
			if _, werr := to.Write(buf[:n]); werr != nil {
				err = werr
			}
		}
		if err != nil {
			if deaf {
				return // the other side never learns of it
			}
			_ = k.client.Close()
			_ = k.server.Close()
			return
		}
	}
}

// gate holds a chunk while the link is stalled.
func (p *proxy) gate(k *link, way int) (delay time.Duration, deaf bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.stall && p.conns[k] && !p.closed {
		p.change.Wait()
	}
	return p.delay, k.deaf[way]
}

// cut ends all connections and refuses new ones.
func (p *proxy) cut() {
	p.mu.Lock()
	p.refuse = true
	p.mu.Unlock()
	p.reset()
}

// reset ends all connections.
func (p *proxy) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.conns {
		p.end(k)
	}
	p.change.Broadcast()
}

func (p *proxy) end(k *link) {
	_ = k.client.Close()
	_ = k.server.Close()
	delete(p.conns, k)
}

// slow delays each chunk.
func (p *proxy) slow(d time.Duration) {
	p.mu.Lock()
	p.delay = d
	p.mu.Unlock()
}

// hold lets nothing through until heal.
func (p *proxy) hold() {
	p.mu.Lock()
	p.stall = true
	p.mu.Unlock()
}

// halfOpen makes the present connections deaf, in the given directions. New ones work.
func (p *proxy) halfOpen(ways ...int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.conns {
		for _, w := range ways {
			k.deaf[w] = true
		}
	}
}

// heal makes the link whole. What was swallowed is gone, so connections that are deaf end.
func (p *proxy) heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse, p.stall, p.delay = false, false, 0
	for k := range p.conns {
		if k.deaf[0] || k.deaf[1] {
			p.end(k)
		}
	}
	p.change.Broadcast()
}

func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.listener.Close()
	p.reset()
	p.wg.Wait()
}
