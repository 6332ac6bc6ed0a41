package main

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// natsServerRole is nats-server with its defaults and JetStream on file, as the binary would run it.
func natsServerRole(_ context.Context, cfg childConfig) (*role, error) {
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: cfg.Store, NoLog: true, NoSigs: true,
	})
	if err != nil {
		return nil, err
	}
	s.Start()
	if !s.ReadyForConnections(20 * time.Second) {
		return nil, errors.New("nats-server does not get ready")
	}
	return &role{ready: s.ClientURL(), close: func() { s.Shutdown(); s.WaitForShutdown() }}, nil
}
