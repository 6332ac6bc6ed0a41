package admin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/rs/zerolog"
)

// Profiles serves net/http/pprof at an address of its own, so that it can be kept from whoever may read /metrics: a heap
// profile shows what is in memory, and a CPU profile costs time. It serves until ctx ends.
type Profiles struct {
	listener net.Listener
	http     *http.Server
}

// ListenProfiles opens addr.
func ListenProfiles(addr string, logger zerolog.Logger) (*Profiles, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("profiles: %w: set TASKRELAY_PPROF_ADDR to a free address, such as 127.0.0.1:6060, or leave it out", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	logger.Warn().Str("component", "admin").Str("address", l.Addr().String()).Msg("profiles are served (TASKRELAY_PPROF_ADDR)")
	// No write timeout: a profile takes as long as it is asked to. The command line is not served: it may hold secrets.
	return &Profiles{l, &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 8 << 10}}, nil
}

// Addr is the address it listens at, with the real port.
func (p *Profiles) Addr() string { return p.listener.Addr().String() }

// Run serves until ctx ends; a profile that is being taken then is cut off.
func (p *Profiles) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = p.http.Close() })()
	if err := p.http.Serve(p.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("profiles: %w", err)
	}
	return nil
}
