// Package dev runs a whole taskrelay in one process: an embedded nats-server with JetStream, a throw-away
// Postgres found on the machine, the relay and a worker.
//
// It is for trying things out and for demonstrations, not for production: Postgres does not fsync and JetStream
// fsyncs now and then. Both listen on 127.0.0.1 only, so that psql and the nats CLI can look inside.
package dev
