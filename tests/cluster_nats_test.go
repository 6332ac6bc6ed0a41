package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Issue 3, part 4; C-106: three nats-servers with replicated streams, under load. A leader dies, a majority dies, all are
// replaced one by one: each task is called exactly once, and nobody has to help.
func TestReplicatedStreamsSurviveTheirServers(t *testing.T) {
	t.Parallel()
	c := testenv.StartNATSCluster(t)
	e := testenv.NewEnv(t, testenv.DB(t), &c.NATSServer)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 20 * time.Millisecond})
	// No lease may end here: then a second call would be nobody's fault.
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=15s", "TASKRELAY_STREAM_REPLICAS=3")
	var all []*testenv.Process
	for range 2 {
		all = append(all, e.StartRelay(vars...), e.StartWorker(vars...))
	}
	l := startLoad(t, e, sink, "ORDER_PAYMENT", 20*time.Millisecond)
	l.warmUp(50)
	for _, name := range []string{"TASKS", "TASKS_DEAD", "TASKS_EVENTS"} {
		s, err := e.NATS.JS.Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "replicas of "+name, s.CachedInfo().Config.Replicas, 3)
	}
	consumer, err := e.NATS.JS.Consumer(t.Context(), "TASKS", "ORDER_PAYMENT-low")
	if err != nil {
		t.Fatal(err)
	}
	if info := consumer.CachedInfo(); info.Cluster == nil || len(info.Cluster.Replicas) != 2 {
		t.Errorf("consumer has cluster %+v, want the replicas of its stream", info.Cluster)
	}

	c.WaitReplicated(t, "TASKS")
	leader, _ := c.Leader(t, "TASKS")
	leader.Kill9(t)
	// An election is called after 4 to 9 s without a leader. [nats-server's own limits]
	l.recovery("leader killed, from its death", time.Now(), 30*time.Second)
	c.Start(t, leader)

	if *soak {
		c.WaitReplicated(t, "TASKS")
		leader, others := c.Leader(t, "TASKS")
		leader.Kill9(t)
		others[0].Kill9(t)
		committed := time.Now()
		testenv.Eventually(t, soon, func() error { // without a majority nothing is stored: tasks gather in the table
			if waiting, _ := l.counts(time.Now()); waiting < 100 {
				return errorf("%d tasks wait", waiting)
			}
			return nil
		})
		c.Start(t, leader, others[0])
		back := time.Now()
		t.Logf("without a majority for %v", back.Sub(committed).Round(time.Second))
		_, _ = c.Leader(t, "TASKS")
		t.Logf("%-60s %v", "two of three killed: a new leader after", time.Since(back))
		l.recovery("two of three killed, from the new leader", time.Now(), 15*time.Second)
		c.WaitReplicated(t, "TASKS")

		for _, n := range c.Nodes {
			n.Stop(t)
			c.Start(t, n)
			l.recovery("rolling restart, "+n.Name+" is back", time.Now(), 15*time.Second)
			for _, name := range []string{"TASKS", "TASKS_DEAD", "TASKS_EVENTS"} {
				c.WaitReplicated(t, name)
			}
		}
		for _, n := range c.Nodes { // as an upgrade in a hurry does it: the next one goes before the last has caught up
			n.Kill9(t)
			c.Start(t, n)
		}
		_, _ = c.Leader(t, "TASKS")
		l.recovery("all three killed one after another, from the new leader", time.Now(), 15*time.Second)
		for _, n := range c.Nodes {
			n.Kill9(t)
		}
		time.Sleep(45 * time.Second) // long enough for every pause between two tries to have grown to its longest
		c.Start(t, c.Nodes...)
		_, _ = c.Leader(t, "TASKS")
		l.recovery("all three away for 45 s, from the new leader", time.Now(), 10*time.Second)
		for range 3 {
			stepDown(t, e, "TASKS", "ORDER_PAYMENT-low")
			l.recovery("stream and consumer leaders step down", time.Now(), 15*time.Second)
		}
	}
	l.verdict(1)
	stillRunning(t, all...)
	for _, p := range all {
		if strings.Contains(p.Logs(), "stream has lost messages") {
			t.Errorf("%s takes a change of leaders for a loss", p.Name)
		}
	}
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left in the stream", n)
		}
		return nil
	})
}

// stepDown makes the leaders of a stream and of one of its consumers hand over, as an operator would.
func stepDown(t *testing.T, e *testenv.Env, stream, consumer string) {
	t.Helper()
	for _, subject := range []string{"$JS.API.CONSUMER.LEADER.STEPDOWN." + stream + "." + consumer, "$JS.API.STREAM.LEADER.STEPDOWN." + stream} {
		testenv.Eventually(t, soon, func() error {
			m, err := e.NATS.Conn.Request(subject, nil, 2*time.Second)
			if err == nil && strings.Contains(string(m.Data), `"error"`) {
				err = errorf("%s: %s", subject, m.Data)
			}
			return err
		})
	}
}
