package dev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// NATS is a nats-server with JetStream inside this process, on a real port of 127.0.0.1.
type NATS struct {
	server *server.Server
	lock   *os.File
}

// StartNATS starts a server whose streams live in dir/jetstream. Port 0 takes a free one. A second server on the
// same directory is refused.
func StartNATS(dir string, port int) (*NATS, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	if port == 0 {
		port = server.RANDOM_PORT
	}
	s, err := server.NewServer(&server.Options{
		ServerName: "taskrelay-dev",
		Host:       "127.0.0.1",
		Port:       port,
		JetStream:  true,
		StoreDir:   filepath.Join(dir, "jetstream"),
		// Without limits the server would reserve three quarters of memory and disk.
		JetStreamMaxMemory: 64 << 20,
		JetStreamMaxStore:  2 << 30,
		NoLog:              true,
		NoSigs:             true, // signals belong to the program
	})
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("start nats-server: %w", err)
	}
	s.Start()
	n := &NATS{server: s, lock: lock}
	if !s.ReadyForConnections(10 * time.Second) {
		n.Stop()
		if port > 0 {
			return nil, fmt.Errorf("nats-server is not ready: is port %d of 127.0.0.1 taken? Leave out --nats-port for a free one", port)
		}
		return nil, errors.New("nats-server was not ready within 10s")
	}
	if !s.JetStreamEnabled() {
		n.Stop()
		return nil, fmt.Errorf("nats-server could not start JetStream in %s", dir)
	}
	return n, nil
}

// URL is where clients connect.
func (n *NATS) URL() string { return n.server.ClientURL() }

// Version of the embedded server.
func (n *NATS) Version() string { return server.VERSION }

// Stop ends the server and lets go of its directory. Close the clients first: they would try to reconnect.
func (n *NATS) Stop() {
	n.server.Shutdown()
	n.server.WaitForShutdown()
	n.lock.Close()
}
