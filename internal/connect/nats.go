package connect

import (
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
)

// NATS returns a connection that connects, and connects again, for as long as it takes; the server need not be there
// yet. role is relay, worker or taskrelay: it names the connection and its private inbox, so that permissions can
// keep one role from reading another's answers.
func NATS(url string, id Identity, role string, logger zerolog.Logger) (*nats.Conn, error) {
	log := logger.With().Str("component", "nats").Logger()
	notice := every{interval: logEvery}
	failed := func(nc *nats.Conn, err error) {
		if notice.due() {
			log.Warn().Err(err).Msg("NATS does not answer, waiting")
		}
	}
	// nats.go reports a server that is not there to ReconnectErrHandler, but of one that refuses us (user, password,
	// certificate) it keeps the reason to itself. So each round of attempts begins with the reason of the last one.
	var conn atomic.Pointer[nats.Conn]
	pause := func(int) time.Duration {
		if nc := conn.Load(); nc != nil {
			if err := nc.LastError(); err != nil {
				failed(nc, err)
			}
		}
		return 500*time.Millisecond + rand.N(250*time.Millisecond)
	}
	host, _ := os.Hostname()
	opts := []nats.Option{
		nats.Name("taskrelay-" + role + "/" + host),
		nats.CustomInboxPrefix("_INBOX_" + role),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.CustomReconnectDelay(pause),
		// A buffered publish would come out after a reconnect, long after its caller gave it up.
		nats.ReconnectBufSize(-1),
		// Notices a peer that is silent for 15 s; the defaults take six minutes. A relay keeps its lanes meanwhile.
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(2),
		// Without it two equal authorization errors close the connection for good.
		nats.IgnoreAuthErrorAbort(),
		nats.PermissionErrOnSubscribe(true),
		nats.ConnectHandler(func(nc *nats.Conn) {
			log.Info().Str("address", nc.ConnectedUrlRedacted()).Msg("connected")
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			log.Info().Str("address", nc.ConnectedUrlRedacted()).Msg("reconnected")
		}),
		nats.ReconnectErrHandler(failed),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil { // nil: closed by us
				log.Warn().Err(err).Msg("disconnected")
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			e := log.Error().Err(err) // such as a permission that is missing: nothing else would say so
			if sub != nil {
				e = e.Str("subject", sub.Subject)
			}
			e.Msg("NATS reported an error")
		}),
	}
	own, err := id.Options()
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	nc, err := nats.Connect(url, append(opts, own...)...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	conn.Store(nc)
	return nc, nil
}
