package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// A fault breaks something. begin returns how to mend it again, or nil when it could not be done now.
type fault struct {
	name    string
	touches string // two faults at once touch different things
	begin   func(c *run) (heal func())
	// How long it is held, drawn between these.
	least, most time.Duration
	// fromBegin: recovery does not wait for the end of the fault, another process takes over.
	fromBegin bool
	// unseen: messages are taken away in a way that the relay cannot tell from acknowledgements. Rows on the work list are
	// then looked at after ten minutes; recovery is that of all others.
	unseen bool
}

// allFaults lists what may happen. The names are the rows of the table.
func allFaults() []fault {
	const moment = 1500 * time.Millisecond
	faults := []fault{
		{name: "relay killed", touches: "relay", begin: killed("relay", 1), most: 2 * moment, fromBegin: true},
		{name: "both relays killed", touches: "relay", begin: killed("relay", relays), most: moment},
		{name: "relay paused longer than its lanes' lease", touches: "relay", begin: paused("relay"), least: laneLease + time.Second, most: laneLease + 2*time.Second, fromBegin: true},
		{name: "relay replaced in order", touches: "relay", begin: replaced("relay"), fromBegin: true},
		{name: "worker killed", touches: "worker", begin: killed("worker", 1), most: 2 * moment, fromBegin: true},
		{name: "all workers killed", touches: "worker", begin: killed("worker", workers), most: moment},
		{name: "worker paused longer than its lease", touches: "worker", begin: paused("worker"), least: lease + 500*time.Millisecond, most: 2 * lease, fromBegin: true},
		{name: "worker replaced in order", touches: "worker", begin: replaced("worker"), fromBegin: true},

		{name: "Postgres killed", touches: "postgres", begin: (*run).killPostgres, most: moment},
		{name: "one backend of Postgres killed", touches: "postgres", begin: (*run).killBackend},
		{name: "nats-server killed", touches: "nats", begin: (*run).killNATS, most: moment},
		{name: "JetStream store wiped", touches: "nats", begin: (*run).wipeStore, most: moment / 2},
		{name: "JetStream store put back to an older copy", touches: "nats", begin: (*run).olderStore, least: moment, most: 3 * moment},

		{name: "stream deleted", touches: "stream", begin: (*run).deleteStream},
		{name: "stream deleted and made anew by hand", touches: "stream", begin: (*run).remakeStream},
		{name: "stream purged", touches: "stream", begin: (*run).purgeStream, unseen: true},
		{name: "consumer deleted", touches: "stream", begin: (*run).deleteConsumer},
		{name: "stream takes 20 messages", touches: "stream", begin: (*run).smallStream, least: moment, most: 2 * moment, unseen: true},
		{name: "duplicate window of 100 ms", touches: "stream", begin: (*run).shortWindow, least: moment, most: 2 * moment},
	}
	for _, role := range []string{"relay", "worker"} {
		for _, server := range []string{"Postgres", "NATS"} {
			name := role + "–" + server + " "
			for _, f := range []fault{
				{name: name + "cut", begin: broken(role, server, (*proxy).cut), least: moment, most: 2 * moment},
				{name: name + "reset", begin: broken(role, server, (*proxy).reset)},
				{name: name + "slow", begin: broken(role, server, func(p *proxy) { p.slow(200 * time.Millisecond) }), least: moment, most: 2 * moment},
				{name: name + "stalled", begin: broken(role, server, (*proxy).hold), least: lease, most: 3 * lease},
				{name: name + "half open", begin: broken(role, server, func(p *proxy) { p.halfOpen(towardsServer, towardsClient) }), least: lease, most: 5 * lease, fromBegin: true},
				{name: name + "deaf", begin: broken(role, server, func(p *proxy) { p.halfOpen(towardsClient) }), least: lease, most: 5 * lease, fromBegin: true},
			} {
				f.touches = "link of a " + role
				faults = append(faults, f)
			}
		}
	}
	return faults
}

// bag deals faults so that each comes once before any comes twice.
type bag struct {
	rand *rand.Rand
	all  []fault
	left []int
}

// next takes the first one in the bag that does not touch what another fault is at.
func (b *bag) next(but string) *fault {
	for i := 0; ; i++ {
		if i >= len(b.left) {
			b.left = append(b.left, b.rand.Perm(len(b.all))...)
		}
		f := &b.all[b.left[i]]
		if but != "" && (f.touches == but || strings.HasSuffix(f.touches, but) || strings.HasSuffix(but, f.touches)) {
			if i > 2*len(b.all) {
				return nil
			}
			continue
		}
		b.left = append(b.left[:i:i], b.left[i+1:]...)
		return f
	}
}

// breakThings injects faults until the time is over, now and then two at once, and waits after each until what was due
// has been begun.
func (c *run) breakThings() {
	all := allFaults()
	b := &bag{rand: c.rand}
	for _, f := range all {
		if c.o.only.MatchString(f.name) {
			b.all = append(b.all, f)
		}
	}
	if len(b.all) == 0 {
		c.t.Fatalf("no fault has %v in its name", c.o.only)
	}
	for end := time.Now().Add(c.o.duration); time.Now().Before(end); {
		first := b.next("")
		var second *fault
		if len(b.all) > 1 && c.rand.Float64() < c.o.pairs {
			second = b.next(first.touches)
		}
		c.inject(first, second)
	}
}

// inject begins a fault, holds it, mends it, and measures how long it takes until the work goes on. Where another process
// has to take over, that is measured while the fault lasts.
func (c *run) inject(f, second *fault) {
	begun := time.Now()
	heal := f.begin(c)
	if heal == nil {
		time.Sleep(200 * time.Millisecond) // what it needs is being made anew
		return
	}
	name, hold, unseen := f.name, f.draw(c.rand), f.unseen
	if second != nil {
		if h := second.begin(c); h != nil {
			first := heal
			heal = func() { first(); h() }
			name += ", and " + second.name
			hold = max(hold, second.draw(c.rand))
			unseen = unseen || second.unseen
			f = &fault{name: "two at once"}
		}
	}
	var took time.Duration
	var ok bool
	since, from := begun, "begin"
	if f.fromBegin {
		took, ok = c.recovered(since, !unseen)
	}
	time.Sleep(time.Until(begun.Add(hold))) // how long it lasts was drawn: there is no condition to wait for
	heal()
	held := time.Since(begun)
	if !f.fromBegin {
		since, from = time.Now(), "end"
		took, ok = c.recovered(since, !unseen)
	}
	c.results.add(f, held, took, ok)
	if unseen {
		c.tenMinutesLater() // else the next recovery would be that of this fault
	}
	if !ok {
		c.note("%s: held %.2fs, NOT RECOVERED within %v: %s", name, held.Seconds(), c.o.patience, c.waitingFor(since))
		return
	}
	c.note("%s: held %.2fs, recovered %.2fs after its %s", name, held.Seconds(), took.Seconds(), from)
}

func (f *fault) draw(r *rand.Rand) time.Duration {
	return f.least + time.Duration(r.Int64N(int64(max(f.most-f.least, 0))+1))
}

// pick returns up to n slots of a role, at random, that no other fault is at.
func (c *run) pick(role string, n int) (picked []*slot) {
	for _, i := range c.rand.Perm(len(c.slots)) {
		if s := c.slots[i]; s.role == role && !s.busy && len(picked) < n {
			picked = append(picked, s)
		}
	}
	return picked
}

// killed kills processes at once and starts others in their place when the fault is over.
func killed(role string, n int) func(*run) func() {
	return func(c *run) func() {
		slots := c.pick(role, n)
		if len(slots) < n {
			return nil
		}
		for _, s := range slots {
			s.busy = true
			s.proc.Kill9(c.t)
		}
		return func() {
			for _, s := range slots {
				c.start(s)
				s.busy = false
			}
		}
	}
}

func paused(role string) func(*run) func() {
	return func(c *run) func() {
		slots := c.pick(role, 1)
		if len(slots) == 0 {
			return nil
		}
		s := slots[0]
		s.busy = true
		s.proc.Pause(c.t)
		from := time.Now()
		return func() {
			c.pauses.add(s.proc.Pid(), from, time.Now())
			s.proc.Continue(c.t)
			s.busy = false
		}
	}
}

// replaced is what a rolling deploy does: the new one comes, the old one is asked to stop.
func replaced(role string) func(*run) func() {
	return func(c *run) func() {
		slots := c.pick(role, 1)
		if len(slots) == 0 {
			return nil
		}
		s := slots[0]
		old := s.proc
		c.start(s)
		old.Signal(c.t, syscall.SIGTERM)
		return func() {
			if code := old.Wait(c.t, 60*time.Second); code != 0 {
				c.t.Errorf("%s ended with exit code %d after SIGTERM", role, code)
			}
		}
	}
}

func broken(role, server string, how func(*proxy)) func(*run) func() {
	return func(c *run) func() {
		slots := c.pick(role, 1)
		if len(slots) == 0 {
			return nil
		}
		s := slots[0]
		p := s.pg
		if server == "NATS" {
			p = s.nats
		}
		s.busy = true
		how(p)
		return func() {
			p.heal()
			s.busy = false
		}
	}
}

func (c *run) killPostgres() func() {
	if err := c.pg.Kill9(); err != nil {
		c.t.Fatalf("kill Postgres: %v", err)
	}
	return func() {
		if err := c.pg.Restart(c.t.Context()); err != nil {
			c.t.Fatalf("restart Postgres: %v", err)
		}
	}
}

// killBackend kills one server process of Postgres. All others end with it, and it recovers as after a crash.
func (c *run) killBackend() func() {
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
	defer cancel()
	pid, err := c.backend(ctx, []string{"relay", "worker"}[c.rand.IntN(2)])
	if err != nil || pid == 0 {
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return nil // it has ended by itself meanwhile
	}
	return func() {}
}

func (c *run) killNATS() func() {
	c.nats.Kill9(c.t)
	return func() { c.nats.Start(c.t) }
}

func (c *run) wipeStore() func() {
	c.nats.Kill9(c.t)
	c.replaceStore("")
	return func() { c.nats.Start(c.t) }
}

// olderStore copies the store now and puts the copy back in the end: all that happened between is forgotten.
func (c *run) olderStore() func() {
	c.nats.Kill9(c.t)
	copied := filepath.Join(c.t.TempDir(), "store")
	if err := os.CopyFS(copied, os.DirFS(c.nats.Store())); err != nil {
		c.t.Fatalf("copy the store: %v", err)
	}
	c.nats.Start(c.t)
	return func() {
		c.nats.Kill9(c.t)
		c.replaceStore(copied)
		c.nats.Start(c.t)
	}
}

// replaceStore empties JetStream's directory and fills it with a copy, if any.
func (c *run) replaceStore(from string) {
	err := os.RemoveAll(c.nats.Store())
	if err == nil && from != "" {
		err = os.CopyFS(c.nats.Store(), os.DirFS(from))
	}
	if err != nil {
		c.t.Fatalf("replace the store: %v", err)
	}
}

// stream calls f with the stream of tasks; false when it is not there, or does not answer, just now.
func (c *run) stream(f func(ctx context.Context, s jetstream.Stream) error) bool {
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
	defer cancel()
	s, err := c.nats.JS.Stream(ctx, "TASKS")
	if err == nil {
		err = f(ctx, s)
	}
	return err == nil
}

func done(ok bool) func() {
	if !ok {
		return nil
	}
	return func() {}
}

func (c *run) deleteStream() func() {
	return done(c.stream(func(ctx context.Context, _ jetstream.Stream) error { return c.nats.JS.DeleteStream(ctx, "TASKS") }))
}

func (c *run) remakeStream() func() {
	return done(c.stream(func(ctx context.Context, s jetstream.Stream) error {
		if err := c.nats.JS.DeleteStream(ctx, "TASKS"); err != nil {
			return err
		}
		_, err := c.nats.JS.CreateStream(ctx, s.CachedInfo().Config)
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // a relay was faster
			err = nil
		}
		return err
	}))
}

func (c *run) purgeStream() func() {
	return done(c.stream(func(ctx context.Context, s jetstream.Stream) error { return s.Purge(ctx) }))
}

func (c *run) deleteConsumer() func() {
	name := []string{undoable, plain}[c.rand.IntN(2)] + "-" + []string{"high", "low"}[c.rand.IntN(2)]
	return done(c.stream(func(ctx context.Context, s jetstream.Stream) error { return s.DeleteConsumer(ctx, name) }))
}

// smallStream makes every lane full. The server drops what is too much already.
func (c *run) smallStream() func() {
	return c.changed(func(s *jetstream.StreamConfig) { s.MaxMsgsPerSubject = 20 })
}

func (c *run) shortWindow() func() {
	return c.changed(func(s *jetstream.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
}

// changed changes the stream's settings and puts them back.
func (c *run) changed(change func(*jetstream.StreamConfig)) func() {
	var before jetstream.StreamConfig
	ok := c.stream(func(ctx context.Context, s jetstream.Stream) error {
		before = s.CachedInfo().Config
		after := before
		change(&after)
		_, err := c.nats.JS.UpdateStream(ctx, after)
		return err
	})
	if !ok {
		return nil
	}
	return func() {
		testenv.Eventually(c.t, 30*time.Second, func() error {
			ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Second)
			defer cancel()
			if _, err := c.nats.JS.UpdateStream(ctx, before); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
				return fmt.Errorf("put the stream's settings back: %w", err)
			}
			return nil
		})
	}
}
