package config

import (
	"time"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Prefix begins the name of every variable.
const Prefix = "TASKRELAY_"

// Common is what every binary reads.
type Common struct {
	NatsAPIPrefix string `split_words:"true" desc:"prefix of JetStream's API, where it is not $JS.API: $JS.hub.API for domain hub"`
	NatsCreds     string `split_words:"true" desc:"path of a NATS credentials file, read again at each reconnect"`
	NatsNkey      string `split_words:"true" desc:"path of a file with the seed of an nkey, in place of a credentials file"`
	NatsCA        string `split_words:"true" desc:"path of a PEM file: who may vouch for the NATS server, in place of the system's list. With it only TLS is spoken"`
	NatsCert      string `split_words:"true" desc:"path of a PEM file: the certificate shown to the NATS server, read again at each reconnect"`
	NatsKey       string `split_words:"true" desc:"path of a PEM file: the key of TASKRELAY_NATS_CERT"`
	Schema        string `split_words:"true" default:"taskrelay" desc:"Postgres schema of the installation: lower-case letters, digits and _, at most 41"`
	Namespace     string `split_words:"true" desc:"prefix of all names in NATS: eu gives stream EU_TASKS and subjects eu.tasks.>; lower-case letters, digits and -"`
	LogLevel      string `split_words:"true" default:"info" desc:"trace, debug, info, warn, error or disabled"`
	LogFormat     string `split_words:"true" desc:"console or json; by default console on a terminal, else json"`

	MigrateDatabaseURL URL `split_words:"true" desc:"Postgres URL for migrations, which need a direct connection and the owner's rights; by default TASKRELAY_DATABASE_URL"`
}

// Servers is where Postgres and NATS are.
type Servers struct {
	DatabaseURL URL `split_words:"true" required:"true" desc:"Postgres: postgres://user:password@host:5432/database; through PgBouncer too"`
	NatsURL     URL `split_words:"true" required:"true" desc:"NATS servers, comma separated: nats://host:4222"`
}

// Process is what every long-lived binary reads.
type Process struct {
	AdminAddr string `split_words:"true" default:"127.0.0.1:9090" desc:"address of /livez, /readyz and /metrics; port 0 takes a free one and logs it"`
	PprofAddr string `split_words:"true" desc:"address of /debug/pprof/, such as 127.0.0.1:6060; by default it is off. Profiles show what is in memory: not for a network"`
	Migrate   string `split_words:"true" default:"check" desc:"check refuses to start on an older schema; auto migrates it first"`
}

// Stream is how the relay makes the work queue.
type Stream struct {
	StreamReplicas      int   `split_words:"true" default:"1" desc:"replicas of the streams, 1 to 5"`
	StreamMaxPerSubject int64 `split_words:"true" default:"10000" desc:"messages a lane may hold in the stream; the rest waits in the table"`
}

// RelayOptions is how a relay works.
type RelayOptions struct {
	RelayEnabled   bool          `split_words:"true" default:"true" desc:"false: alive and ready, but publishes nothing"`
	RelayBizTypes  List          `split_words:"true" desc:"comma separated biz types this relay publishes; by default all"`
	RelayReconcile time.Duration `split_words:"true" default:"30s" desc:"how often the table is compared with the stream; at least 1s"`
	RelayBatch     int           `split_words:"true" default:"500" desc:"rows read at once, 1 to 10000"`
	RelayPollMin   time.Duration `split_words:"true" default:"5ms" desc:"pause between polls while tasks come in"`
	RelayPollMax   time.Duration `split_words:"true" default:"20ms" desc:"pause between polls while none come in"`
	RelayOps       bool          `split_words:"true" default:"false" desc:"true: takes operator actions as a NATS service, taskrelay.ops.>; needs role taskrelay_operator in Postgres"`
}

// Retain is how long finished rows are kept.
type Retain struct {
	RetainSucceeded Retention `split_words:"true" default:"30d" desc:"how long succeeded tasks are kept: days (30d) or a duration (12h); 0 deletes at once and frees the idempotency key"`
	RetainCancelled Retention `split_words:"true" default:"30d" desc:"how long cancelled tasks are kept: as above"`
	RetainAttempts  Retention `split_words:"true" default:"90d" desc:"how long the attempt log is kept: as above"`
	RetainDead      Retention `split_words:"true" desc:"how long dead tasks are kept: as above; by default until a person decides"`
	RetainAudit     Retention `split_words:"true" default:"365d" desc:"how long the audit is kept: as above"`
}

// Ages is what the relay is told.
func (r Retain) Ages() outbox.Retention {
	return outbox.Retention{
		Succeeded: r.RetainSucceeded.age(), Cancelled: r.RetainCancelled.age(), Dead: r.RetainDead.age(),
		Attempts: r.RetainAttempts.age(), Audit: r.RetainAudit.age(),
	}
}

// Notify is where notifiers send to.
type Notify struct {
	NotifyWebhookURL     URL    `split_words:"true" desc:"notifier webhook: where to POST, http:// or https://"`
	NotifyWebhookSecret  Secret `split_words:"true" desc:"notifier webhook: signs each POST (Standard Webhooks; whsec_<base64> or plain text)"`
	NotifySmtpURL        URL    `split_words:"true" desc:"notifier email: smtp://user:password@host:587 (STARTTLS; ?starttls=off for a server that has none) or smtps://host:465"`
	NotifyEmailFrom      string `split_words:"true" desc:"notifier email: sender"`
	NotifyEmailTo        List   `split_words:"true" desc:"notifier email: comma separated receivers"`
	NotifyDingtalkURL    URL    `split_words:"true" desc:"notifier dingtalk: the robot's URL with its token"`
	NotifyDingtalkSecret Secret `split_words:"true" desc:"notifier dingtalk: signs each message"`
	NotifyChatURL        Secret `split_words:"true" desc:"notifier chat: the incoming webhook of a chat robot; whoever has it may write there"`
	NotifyChatTemplate   string `split_words:"true" default:"slack" desc:"notifier chat: slack, discord, feishu, wecom, teams, or a Go template of the JSON body, such as {\"text\": {{json .Text}}}"`
	NotifyDefault        string `split_words:"true" default:"log" desc:"who is told of types that name no notifier: log, webhook, email, dingtalk or chat"`
}

// WorkerOptions is how a worker works.
type WorkerOptions struct {
	WorkerConcurrency int           `split_words:"true" default:"50" desc:"attempts of one biz type that run at once in this process, 1 to 10000; TASKRELAY_BIZ_<TYPE>_CONCURRENCY wins"`
	WorkerLease       time.Duration `split_words:"true" default:"30s" desc:"how long a claim lasts without a heartbeat, 1s to 1h; after that the task runs elsewhere"`
	WorkerGrace       time.Duration `split_words:"true" default:"25s" desc:"how long running attempts may finish after SIGTERM"`
	WorkerNakMax      time.Duration `split_words:"true" default:"30s" desc:"longest delay that waits in JetStream, up to 1h; longer ones wait in the table"`
	WorkerChildSpans  bool          `split_words:"true" default:"false" desc:"true: the span of an attempt is a child of the span that made the task; false: it links to it"`
	BizTypes          List          `split_words:"true" desc:"comma separated biz types the stock worker runs, each with its TASKRELAY_BIZ_<TYPE>_ variables"`
}

// Relay is the configuration of cmd/relay.
type Relay struct {
	Servers
	Common
	Process
	Stream
	RelayOptions
	Retain
	Notify
}

// Worker is the configuration of cmd/worker.
type Worker struct {
	Servers
	Common
	Process
	WorkerOptions
	Types []BizType `ignored:"true"` // one for each of BizTypes
}

// CLI is the configuration of cmd/taskrelay. Commands ask for the servers they need: see [CLI.Database] and [CLI.Nats].
type CLI struct {
	DatabaseURL URL `split_words:"true" desc:"Postgres: postgres://user:password@host:5432/database; needed by most commands"`
	NatsURL     URL `split_words:"true" desc:"NATS servers, comma separated: nats://host:4222; needed by relay run-once"`
	Common
	Stream
	RelayOptions
}

// Database is DATABASE_URL, or an error that says that this command needs it.
func (c CLI) Database() (string, error) {
	if c.DatabaseURL == "" {
		return "", Invalid("DATABASE_URL", "needed by this command and not set: expected %s", databaseForm)
	}
	return string(c.DatabaseURL), nil
}

// Nats is NATS_URL, or an error that says that this command needs it.
func (c CLI) Nats() (string, error) {
	if c.NatsURL == "" {
		return "", Invalid("NATS_URL", "needed by this command and not set: expected %s", natsForm)
	}
	return string(c.NatsURL), nil
}

// MigrateDatabase is MIGRATE_DATABASE_URL, by default databaseURL.
func (c Common) MigrateDatabase(databaseURL URL) string {
	if c.MigrateDatabaseURL != "" {
		return string(c.MigrateDatabaseURL)
	}
	return string(databaseURL)
}
