// Package admin serves the health of a process over HTTP.
//
//	/livez   200 while the main loop makes progress; says nothing about Postgres or NATS, so that an outage of theirs
//	         does not restart every process.
//	/metrics what [Server.Metrics] was given, 503 before.
//	/readyz  200 while what the process depends on answers, 503 with the reasons otherwise; ?verbose lists each check.
//
// Nothing here changes anything, and there is nothing else. Profiles are served apart: see [Profiles].
package admin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// checkTimeout bounds one check. Probes of Kubernetes wait a second by default.
const checkTimeout = 900 * time.Millisecond

// Check is one thing that a process depends on.
type Check struct {
	Name string
	Err  func(ctx context.Context) error // nil: fine
}

// Server is the admin server. Until [Server.Serving] it is alive and not ready.
type Server struct {
	listener net.Listener
	http     *http.Server
	logger   zerolog.Logger

	mu      sync.Mutex
	live    func() error
	checks  []Check
	waiting string // why not ready, before Serving and after Stopping
	metrics http.Handler
}

// Listen opens addr, such as 127.0.0.1:9090. With port 0 a free one is taken, and the log names it.
func Listen(addr string, logger zerolog.Logger) (*Server, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("admin server: %w: set TASKRELAY_ADMIN_ADDR to a free address, such as 127.0.0.1:0", err)
	}
	s := &Server{listener: l, logger: logger.With().Str("component", "admin").Logger(), waiting: "starting"}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", s.livez)
	mux.HandleFunc("GET /readyz", s.readyz)
	mux.HandleFunc("GET /metrics", s.serveMetrics)
	s.http = &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      15 * time.Second, // a scrape may wait for Postgres and NATS
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    8 << 10,
	}
	s.logger.Info().Str("address", s.Addr()).Msg("admin server listens")
	if !loopback(l.Addr()) {
		s.logger.Warn().Str("address", s.Addr()).
			Msg("metrics and health can be read from other machines, without a password: keep the port inside your network, or set TASKRELAY_ADMIN_ADDR to 127.0.0.1:9090")
	}
	return s, nil
}

func loopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// Addr is the address it listens at, with the real port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("admin server: %w", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := s.http.Shutdown(stop); err != nil {
		_ = s.http.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("admin server: %w", err)
	}
	return nil
}

// Serving says that the process is up: from now on live and checks decide.
func (s *Server) Serving(live func() error, checks ...Check) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live, s.checks, s.waiting = live, checks, ""
}

// Stopping says that the process takes no new work: alive, but not ready.
func (s *Server) Stopping() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live, s.waiting = nil, "stopping"
}

// Metrics says what /metrics serves.
func (s *Server) Metrics(h http.Handler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metrics = h
}

func (s *Server) serveMetrics(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	h := s.metrics
	s.mu.Unlock()
	if h == nil {
		answer(w, http.StatusServiceUnavailable, "no metrics yet: starting\n")
		return
	}
	h.ServeHTTP(w, r)
}

func (s *Server) livez(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	live := s.live
	s.mu.Unlock()
	if live != nil {
		if err := live(); err != nil {
			answer(w, http.StatusServiceUnavailable, "not alive: "+err.Error()+"\n")
			return
		}
	}
	answer(w, http.StatusOK, "ok\n")
}

func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	checks, waiting := s.checks, s.waiting
	s.mu.Unlock()
	if waiting != "" {
		answer(w, http.StatusServiceUnavailable, "not ready: "+waiting+"\n")
		return
	}
	errs := run(r.Context(), checks)
	var failed, lines []string
	for i, c := range checks {
		if errs[i] == nil {
			lines = append(lines, "[+] "+c.Name+" ok")
			continue
		}
		for reason := range strings.SplitSeq(errs[i].Error(), "\n") { // of several joined errors, each on its own line
			lines = append(lines, "[-] "+c.Name+": "+reason)
			failed = append(failed, c.Name+": "+reason)
		}
	}
	code, text := http.StatusOK, "ok\n"
	if len(failed) > 0 {
		code, text = http.StatusServiceUnavailable, "not ready: "+strings.Join(failed, "; ")+"\n"
	}
	if r.URL.Query().Has("verbose") {
		text = strings.Join(lines, "\n") + "\n" + text
	}
	answer(w, code, text)
}

// run asks all checks at once, so that one that hangs does not hide the others.
func run(ctx context.Context, checks []Check) []error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	errs := make([]error, len(checks))
	var wg sync.WaitGroup
	for i, c := range checks {
		wg.Go(func() { errs[i] = c.Err(ctx) })
	}
	wg.Wait()
	return errs
}

func answer(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(text))
}
