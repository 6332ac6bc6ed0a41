package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// NATSCluster is three nats-servers that replicate streams among them. Its URL names them all.
type NATSCluster struct {
	NATSServer
	Nodes []*NATSNode
}

// NATSNode is one server of a cluster: the real binary.
type NATSNode struct {
	Name string
	URL  string

	bin, config string
	proc        *Process
}

// StartNATSCluster starts three nats-servers with empty stores and waits until JetStream has a leader.
func StartNATSCluster(t testing.TB) *NATSCluster {
	t.Helper()
	const size = 3
	c := &NATSCluster{}
	var urls, routes []string
	var clients, peers [size]int
	for i := range size {
		clients[i], peers[i] = freePort(t), freePort(t)
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", clients[i]))
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", peers[i]))
	}
	for i := range size {
		dir := tempDir(t)
		n := &NATSNode{Name: fmt.Sprintf("n%d", i+1), URL: urls[i], bin: natsServerBinary(t), config: filepath.Join(dir, "nats.conf")}
		config := fmt.Sprintf(`server_name: %s
listen: "127.0.0.1:%d"
jetstream { store_dir: %q, max_file_store: 1GB, max_memory_store: 64MB }
cluster { name: test, listen: "127.0.0.1:%d", pool_size: 1, routes: [%s] }
`, n.Name, clients[i], filepath.Join(dir, "store"), peers[i], strings.Join(routes, ", "))
		if err := os.WriteFile(n.config, []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		c.Nodes = append(c.Nodes, n)
	}
	c.URL = strings.Join(urls, ",")
	c.Start(t, c.Nodes...)
	c.connect(t)
	Eventually(t, 60*time.Second, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.JS.AccountInfo(ctx)
		return err
	})
	return c
}

// Start starts nodes that do not run, and waits until they take connections: a single one cannot do more.
func (c *NATSCluster) Start(t testing.TB, nodes ...*NATSNode) {
	t.Helper()
	for _, n := range nodes {
		n.proc = startProcess(t, "nats-server "+n.Name, n.bin, []string{"-c", n.config}, nil)
	}
	for _, n := range nodes {
		Eventually(t, 30*time.Second, func() error {
			select {
			case <-n.proc.done:
				return fmt.Errorf("nats-server %s ended: %s", n.Name, n.proc.Logs())
			default:
			}
			nc, err := nats.Connect(n.URL, nats.Timeout(time.Second))
			if err == nil {
				nc.Close()
			}
			return err
		})
	}
}

// Kill9 kills the node.
func (n *NATSNode) Kill9(t testing.TB) { t.Helper(); n.proc.Kill9(t) }

// Stop ends the node in order: it hands over what it leads.
func (n *NATSNode) Stop(t testing.TB) { t.Helper(); n.proc.Stop(t, 30*time.Second) }

// Leader waits until a stream has a leader and returns it, and the other nodes.
func (c *NATSCluster) Leader(t testing.TB, stream string) (leader *NATSNode, others []*NATSNode) {
	t.Helper()
	Eventually(t, 60*time.Second, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		s, err := c.JS.Stream(ctx, stream)
		if err != nil {
			return err
		}
		if s.CachedInfo().Cluster == nil || s.CachedInfo().Cluster.Leader == "" {
			return errors.New("stream " + stream + " has no leader")
		}
		leader, others = nil, nil
		for _, n := range c.Nodes {
			if n.Name == s.CachedInfo().Cluster.Leader {
				leader = n
			} else {
				others = append(others, n)
			}
		}
		if leader == nil {
			return fmt.Errorf("stream %s is led by %s, which is none of ours", stream, s.CachedInfo().Cluster.Leader)
		}
		return nil
	})
	return leader, others
}

// WaitReplicated waits until every replica of a stream has all of it.
func (c *NATSCluster) WaitReplicated(t testing.TB, stream string) {
	t.Helper()
	Eventually(t, 60*time.Second, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		s, err := c.JS.Stream(ctx, stream)
		if err != nil {
			return err
		}
		cl := s.CachedInfo().Cluster
		if cl == nil || cl.Leader == "" || len(cl.Replicas) != len(c.Nodes)-1 {
			return fmt.Errorf("stream %s is not replicated: %+v", stream, cl)
		}
		for _, r := range cl.Replicas {
			if !r.Current || r.Offline {
				return fmt.Errorf("replica %s of stream %s is behind by %d (offline: %t)", r.Name, stream, r.Lag, r.Offline)
			}
		}
		return nil
	})
}
