// Package connect makes the connections and the logger of the binaries.
//
// Properties:
//   - An outage is waited for, however long it lasts, and its reason is in the log every few seconds.
//   - What waiting cannot mend (wrong password, no such database) is returned as an error.
//   - A pooler is noticed, and no statement is prepared that it would forget.
//   - No password is in any error or log line.
package connect

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/pause"
)

const (
	// minConns: a worker claims, settles and sends heartbeats at the same time. pgx's default of 4 on a small
	// machine would let a slow settle hold up the heartbeats.
	minConns = 10

	// idleTime: a server with few connections to give lets several processes share them only when each gives back what
	// a burst made it open. pgx keeps them half an hour by default.
	idleTime = 5 * time.Second

	// deafTimeout: a connection that was idle is asked for a sign of life before it is used. On a link that brings no
	// answers each idle one would else take the whole time of the statement that gets it.
	deafTimeout = 2 * time.Second

	pingTimeout = 5 * time.Second
	logEvery    = 5 * time.Second
)

// Postgres returns a pool that has answered. name shows as application_name where the URL gives none. It waits until
// Postgres answers or ctx ends, and returns at once what waiting does not mend.
func Postgres(ctx context.Context, url, name string, logger zerolog.Logger) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, errors.New("no Postgres URL: expected postgres://user:password@host:5432/database") // err repeats it
	}
	if cfg.ConnConfig.RuntimeParams["application_name"] == "" {
		cfg.ConnConfig.RuntimeParams["application_name"] = name
	}
	if !strings.Contains(url, "pool_max_conns") {
		cfg.MaxConns = max(cfg.MaxConns, minConns)
	}
	if !strings.Contains(url, "pool_max_conn_idle_time") {
		cfg.MaxConnIdleTime = idleTime
	}
	if !strings.Contains(url, "pool_health_check_period") {
		cfg.HealthCheckPeriod = idleTime
	}
	if cfg.PingTimeout == 0 {
		cfg.PingTimeout = deafTimeout
	}
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = 10 * time.Second
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg) // does not connect
	if err != nil {
		return nil, err
	}

	address := net.JoinHostPort(cfg.ConnConfig.Host, strconv.Itoa(int(cfg.ConnConfig.Port))) + "/" + cfg.ConnConfig.Database
	notice := every{interval: logEvery}
	var pooled bool
	try := func() (err error) {
		pctx, cancel := context.WithTimeout(ctx, pingTimeout)
		defer cancel()
		pooled, err = ping(pctx, pool)
		if err != nil && !waitingHelps(err) {
			return backoff.Permanent(err)
		}
		return err
	}
	var last error
	err = backoff.RetryNotify(try, backoff.WithContext(pause.Growing(100*time.Millisecond, 2*time.Second), ctx), func(err error, d time.Duration) {
		last = err
		if notice.due() {
			logger.Warn().Str("component", "postgres").Str("address", address).AnErr("error", Reason(err)).Dur("delay", d).
				Msg("Postgres does not answer, waiting")
		}
	})
	if err != nil {
		pool.Close()
		if last != nil && ctx.Err() != nil {
			err = last // what it was waiting for says more than "context canceled"
		}
		return nil, fmt.Errorf("connect to Postgres at %s: %w", address, Reason(err))
	}
	logger.Info().Str("component", "postgres").Str("address", address).Msg("connected")
	if !pooled || strings.Contains(url, "default_query_exec_mode") { // there the operator has decided
		return pool, nil
	}
	logger.Info().Str("component", "postgres").Str("address", address).
		Msg("a pooler answers: no statement is prepared ahead (default_query_exec_mode=cache_describe)")
	pool.Close()
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	return pgxpool.NewWithConfig(ctx, cfg)
}

// waitingHelps is false for a wrong user, password or database name. Everything else may be a server that starts.
func waitingHelps(err error) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return !ok || !strings.HasPrefix(e.Code, "28") && e.Code != "3D000"
}

// Reason is the cause of a failed connect in one line, without pgx's list of connection parameters. pgx tries each
// address with and without TLS, so the same cause may come several times.
func Reason(err error) error {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e
	}
	e, ok := errors.AsType[*pgconn.ConnectError](err)
	if !ok || e.Unwrap() == nil {
		return err
	}
	var lines []string
	for line := range strings.SplitSeq(e.Unwrap().Error(), "\n") {
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return oneLine{strings.Join(lines, "; "), e.Unwrap()}
}

type oneLine struct {
	text string
	error
}

func (e oneLine) Error() string { return e.text }
func (e oneLine) Unwrap() error { return e.error }
