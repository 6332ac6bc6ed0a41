package faults

import (
	"bufio"
	"io"
	"net"
	"testing"
	"time"
)

// echo answers each line with itself.
func echo(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
		}
	}()
	return l.Addr().String()
}

type peer struct {
	t *testing.T
	net.Conn
	in *bufio.Reader
}

func dial(t *testing.T, p *proxy) *peer {
	t.Helper()
	c, err := net.Dial("tcp", p.addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &peer{t, c, bufio.NewReader(c)}
}

// ask sends a line and waits for it to come back.
func (c *peer) ask(wait time.Duration) error {
	_ = c.SetDeadline(time.Now().Add(wait))
	if _, err := io.WriteString(c, "hello\n"); err != nil {
		return err
	}
	_, err := c.in.ReadString('\n')
	return err
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

const long, short = 10 * time.Second, 100 * time.Millisecond

func TestProxyPassesAndCuts(t *testing.T) {
	p := newProxy(t, echo(t))
	c := dial(t, p)
	if err := c.ask(long); err != nil {
		t.Fatalf("whole link: %v", err)
	}
	p.cut()
	if err := c.ask(long); err == nil || isTimeout(err) {
		t.Errorf("cut link: got %v, want an end at once", err)
	}
	if err := dial(t, p).ask(long); err == nil || isTimeout(err) {
		t.Errorf("new connection over a cut link: got %v, want an end at once", err)
	}
	p.heal()
	if err := dial(t, p).ask(long); err != nil {
		t.Errorf("healed link: %v", err)
	}
}

func TestStalledProxyLosesNothing(t *testing.T) {
	p := newProxy(t, echo(t))
	c := dial(t, p)
	if err := c.ask(long); err != nil {
		t.Fatal(err)
	}
	p.hold()
	if err := c.ask(short); !isTimeout(err) {
		t.Errorf("stalled link: got %v, want silence", err)
	}
	p.heal()
	_ = c.SetDeadline(time.Now().Add(long))
	if line, err := c.in.ReadString('\n'); err != nil || line != "hello\n" {
		t.Errorf("what was held: got %q, %v", line, err)
	}
}

func TestHalfOpenProxySwallows(t *testing.T) {
	for _, ways := range [][]int{{towardsServer}, {towardsClient}, {towardsServer, towardsClient}} {
		p := newProxy(t, echo(t))
		c := dial(t, p)
		if err := c.ask(long); err != nil {
			t.Fatal(err)
		}
		p.halfOpen(ways...)
		if err := c.ask(short); !isTimeout(err) {
			t.Errorf("half-open link %v: got %v, want silence", ways, err)
		}
		if err := dial(t, p).ask(long); err != nil {
			t.Errorf("new connection beside a half-open one: %v", err)
		}
		p.heal()
		if err := c.ask(long); err == nil || isTimeout(err) {
			t.Errorf("half-open connection after the fault: got %v, want its end", err)
		}
	}
}

func TestSlowProxy(t *testing.T) {
	p := newProxy(t, echo(t))
	c := dial(t, p)
	p.slow(short)
	began := time.Now()
	if err := c.ask(long); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < 2*short {
		t.Errorf("there and back took %v, want at least %v", took, 2*short)
	}
}
