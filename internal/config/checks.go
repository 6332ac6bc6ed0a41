package config

import (
	"net"
	"net/mail"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// checks collects what is wrong, so that one start shows it all.
type checks []error

func (c *checks) add(err error) { *c = append(*c, err) }

func (c *checks) between(name string, got, low, high int) {
	if got < low || got > high {
		c.add(Invalid(name, "%d: expected a whole number from %d to %d", got, low, high))
	}
}

func (c *checks) duration(name string, got, low, high time.Duration) {
	if got < low || got > high {
		c.add(Invalid(name, "%s: expected a duration from %s to %s, such as 500ms, 30s or 5m", got, short(low), short(high)))
	}
}

// short drops the zero parts of 1h0m0s.
func short(d time.Duration) string {
	s := d.String()
	s = strings.TrimSuffix(s, "m0s") + map[bool]string{true: "m"}[strings.HasSuffix(s, "m0s")]
	return strings.TrimSuffix(s, "h0m") + map[bool]string{true: "h"}[strings.HasSuffix(s, "h0m")]
}

func (c *checks) oneOf(name, got string, choices ...string) {
	if !slices.Contains(choices, got) {
		c.add(Invalid(name, "%q: expected one of %s", got, strings.Join(choices, ", ")))
	}
}

func (c *checks) bizTypes(name string, list List) {
	for _, item := range list {
		if outbox.ValidateBizType(item) != nil {
			c.add(Invalid(name, "%q: expected %s", item, bizTypeForm))
		}
	}
}

const (
	databaseForm = "a Postgres URL such as postgres://user:password@host:5432/database"
	natsForm     = "NATS URLs such as nats://host:4222"
)

func (c *checks) database(name string, u URL) {
	if u == "" {
		return
	}
	// pgx's error repeats the string and can hide a password by guess only, so it is not shown.
	if _, err := pgxpool.ParseConfig(string(u)); err != nil {
		c.add(Invalid(name, "expected %s", databaseForm))
	}
}

func (c *checks) nats(name string, u URL) {
	if u == "" {
		return
	}
	for part := range strings.SplitSeq(string(u), ",") {
		p, err := url.Parse(strings.TrimSpace(part))
		if err != nil || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, p.Scheme) || p.Hostname() == "" {
			c.add(Invalid(name, "expected %s, comma separated", natsForm))
			return
		}
	}
}

func (c *checks) web(name string, u URL, schemes ...string) {
	if u == "" {
		return
	}
	p, err := url.Parse(string(u))
	if err != nil || !slices.Contains(schemes, p.Scheme) || p.Hostname() == "" {
		c.add(Invalid(name, "expected an address that begins with %s://", strings.Join(schemes, ":// or ")))
	}
}

func (c *checks) email(name, address string) {
	if _, err := mail.ParseAddress(address); err != nil {
		c.add(Invalid(name, "%q: expected an email address", address))
	}
}

var (
	schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,40}$`)
	// With these the subjects would lie among those of an installation without a namespace.
	reserved = []string{"tasks", "dead", "events", "taskrelay"}
)

func (s *Common) check(c *checks) {
	if !schemaName.MatchString(s.Schema) || strings.HasPrefix(s.Schema, "pg_") {
		c.add(Invalid("SCHEMA", "%q: expected lower-case letters, digits and _, at most 41, not beginning with a digit or pg_", s.Schema))
	}
	if (outbox.Names{Namespace: s.Namespace}).Validate() != nil {
		c.add(Invalid("NAMESPACE", "%q: expected lower-case letters, digits and -, at most 32, beginning with a letter; not %s", s.Namespace, strings.Join(reserved, ", ")))
	}
	if (outbox.Names{APIPrefix: s.NatsAPIPrefix}).Validate() != nil {
		c.add(Invalid("NATS_API_PREFIX", "%q: expected a subject without wildcards, such as $JS.hub.API for domain hub", s.NatsAPIPrefix))
	}
	c.oneOf("LOG_LEVEL", s.LogLevel, "trace", "debug", "info", "warn", "error", zerolog.Disabled.String())
	if s.LogFormat != "" {
		c.oneOf("LOG_FORMAT", s.LogFormat, "console", "json")
	}
	s.checkNats(c)
	c.database("MIGRATE_DATABASE_URL", s.MigrateDatabaseURL)
}

func (s *Servers) check(c *checks) {
	c.database("DATABASE_URL", s.DatabaseURL)
	c.nats("NATS_URL", s.NatsURL)
}

func (s *Process) check(c *checks) {
	_, port, err := net.SplitHostPort(s.AdminAddr)
	if n, perr := strconv.Atoi(port); err != nil || perr != nil || n < 0 || n > 65535 {
		c.add(Invalid("ADMIN_ADDR", "%q: expected host:port, such as 127.0.0.1:9090 or :9090", s.AdminAddr))
	}
	if s.PprofAddr != "" {
		_, port, err := net.SplitHostPort(s.PprofAddr)
		if n, perr := strconv.Atoi(port); err != nil || perr != nil || n < 0 || n > 65535 {
			c.add(Invalid("PPROF_ADDR", "%q: expected host:port, such as 127.0.0.1:6060", s.PprofAddr))
		}
	}
	c.oneOf("MIGRATE", s.Migrate, "check", "auto")
}

func (s *Stream) check(c *checks) {
	c.between("STREAM_REPLICAS", s.StreamReplicas, 1, 5)
	if s.StreamMaxPerSubject < 1 {
		c.add(Invalid("STREAM_MAX_PER_SUBJECT", "%d: expected a whole number of at least 1", s.StreamMaxPerSubject))
	}
}

func (s *RelayOptions) check(c *checks) {
	c.bizTypes("RELAY_BIZ_TYPES", s.RelayBizTypes)
	c.duration("RELAY_RECONCILE", s.RelayReconcile, time.Second, 24*time.Hour)
	c.between("RELAY_BATCH", s.RelayBatch, 1, 10000)
	c.duration("RELAY_POLL_MIN", s.RelayPollMin, time.Millisecond, time.Minute)
	c.duration("RELAY_POLL_MAX", s.RelayPollMax, time.Millisecond, time.Minute)
	if s.RelayPollMin > s.RelayPollMax {
		c.add(Invalid("RELAY_POLL_MAX", "%s is less than TASKRELAY_RELAY_POLL_MIN, %s", s.RelayPollMax, s.RelayPollMin))
	}
}

// notifiers are those of the stock relay.
var notifiers = []string{"log", "webhook", "email", "dingtalk", "chat"}

func (s *Notify) check(c *checks) {
	c.web("NOTIFY_WEBHOOK_URL", s.NotifyWebhookURL, "http", "https")
	c.secret("NOTIFY_WEBHOOK_SECRET", s.NotifyWebhookSecret)
	c.web("NOTIFY_SMTP_URL", s.NotifySmtpURL, "smtp", "smtps")
	if s.NotifyEmailFrom != "" {
		c.email("NOTIFY_EMAIL_FROM", s.NotifyEmailFrom)
	}
	for _, to := range s.NotifyEmailTo {
		c.email("NOTIFY_EMAIL_TO", to)
	}
	c.web("NOTIFY_DINGTALK_URL", s.NotifyDingtalkURL, "http", "https")
	c.web("NOTIFY_CHAT_URL", URL(s.NotifyChatURL), "http", "https")
	if s.NotifySmtpURL != "" && (s.NotifyEmailFrom == "" || len(s.NotifyEmailTo) == 0) {
		c.add(Invalid("NOTIFY_SMTP_URL", "set without TASKRELAY_NOTIFY_EMAIL_FROM and TASKRELAY_NOTIFY_EMAIL_TO"))
	}
	c.oneOf("NOTIFY_DEFAULT", s.NotifyDefault, notifiers...)
	for _, n := range []struct {
		name, needs string
		url         URL
	}{
		{"webhook", "NOTIFY_WEBHOOK_URL", s.NotifyWebhookURL}, {"email", "NOTIFY_SMTP_URL", s.NotifySmtpURL},
		{"dingtalk", "NOTIFY_DINGTALK_URL", s.NotifyDingtalkURL}, {"chat", "NOTIFY_CHAT_URL", URL(s.NotifyChatURL)},
	} {
		if s.NotifyDefault == n.name && n.url == "" {
			c.add(Invalid("NOTIFY_DEFAULT", "%q needs %s%s", n.name, Prefix, n.needs))
		}
	}
}

func (s *WorkerOptions) check(c *checks) {
	c.between("WORKER_CONCURRENCY", s.WorkerConcurrency, 1, 10000)
	c.duration("WORKER_LEASE", s.WorkerLease, time.Second, time.Hour)
	c.duration("WORKER_GRACE", s.WorkerGrace, time.Millisecond, time.Hour)
	c.duration("WORKER_NAK_MAX", s.WorkerNakMax, time.Millisecond, time.Hour)
	c.bizTypes("BIZ_TYPES", s.BizTypes)
}

func (s *Relay) check(c *checks) {
	s.Servers.check(c)
	s.Common.check(c)
	s.Process.check(c)
	s.Stream.check(c)
	s.RelayOptions.check(c)
	s.Notify.check(c)
}

func (s *Worker) check(c *checks) {
	s.Servers.check(c)
	s.Common.check(c)
	s.Process.check(c)
	s.WorkerOptions.check(c)
	if len(s.BizTypes) == 0 {
		c.add(Invalid("BIZ_TYPES", "required by the stock worker: it runs the types that are named here and no others, such as TASKRELAY_BIZ_TYPES=ORDER_PAYMENT with TASKRELAY_BIZ_ORDER_PAYMENT_TARGET=https://host/path"))
	}
}

func (s *CLI) check(c *checks) {
	c.database("DATABASE_URL", s.DatabaseURL)
	c.nats("NATS_URL", s.NatsURL)
	s.Common.check(c)
	s.Stream.check(c)
	s.RelayOptions.check(c)
}
