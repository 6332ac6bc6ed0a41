package config

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

var update = flag.Bool("update", false, "rewrite docs/configuration.md")

const (
	databaseURL = "postgres://app:s3cret@127.0.0.1:5432/shop"
	natsURL     = "nats://127.0.0.1:4222"
)

// setenv gives the process this TASKRELAY_ environment and no other; names have no prefix.
func setenv(t *testing.T, vars map[string]string) {
	t.Helper()
	for _, kv := range os.Environ() {
		if k, _, _ := strings.Cut(kv, "="); strings.HasPrefix(k, Prefix) {
			t.Setenv(k, "") // so that it comes back
			os.Unsetenv(k)
		}
	}
	for k, v := range vars {
		t.Setenv(Prefix+k, v)
	}
}

func with(vars ...string) map[string]string {
	m := map[string]string{"DATABASE_URL": databaseURL, "NATS_URL": natsURL}
	for i := 0; i < len(vars); i += 2 {
		m[vars[i]] = vars[i+1]
	}
	return m
}

func TestDefaultsAreTheContract(t *testing.T) {
	setenv(t, with())
	got, err := LoadRelay()
	if err != nil {
		t.Fatal(err)
	}
	want := Relay{
		Servers: Servers{databaseURL, natsURL},
		Common:  Common{Schema: "taskrelay", LogLevel: "info"},
		Process: Process{AdminAddr: "127.0.0.1:9090", Migrate: "check"},
		Stream:  Stream{StreamReplicas: 1, StreamMaxPerSubject: 10000},
		RelayOptions: RelayOptions{RelayEnabled: true, RelayReconcile: 30 * time.Second, RelayBatch: 500,
			RelayPollMin: 5 * time.Millisecond, RelayPollMax: 20 * time.Millisecond},
		Retain: Retain{
			RetainSucceeded: Retention{true, 30 * 24 * time.Hour},
			RetainCancelled: Retention{true, 30 * 24 * time.Hour},
			RetainAttempts:  Retention{true, 90 * 24 * time.Hour},
			RetainAudit:     Retention{true, 365 * 24 * time.Hour},
		},
		Notify: Notify{NotifyChatTemplate: "slack", NotifyDefault: "log"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}

	setenv(t, with("BIZ_TYPES", "ORDER_PAYMENT , user-register", "BIZ_ORDER_PAYMENT_TARGET", "noop:",
		"BIZ_USER_REGISTER_TARGET", "log:", "BIZ_USER_REGISTER_STRATEGY", "fixed"))
	w, err := LoadWorker()
	if err != nil {
		t.Fatal(err)
	}
	wantOptions := WorkerOptions{WorkerConcurrency: 50, WorkerLease: 30 * time.Second, WorkerGrace: 25 * time.Second,
		WorkerNakMax: 30 * time.Second, BizTypes: List{"ORDER_PAYMENT", "user-register"}}
	if !reflect.DeepEqual(w.WorkerOptions, wantOptions) {
		t.Errorf("got %+v, want %+v", w.WorkerOptions, wantOptions)
	}
	wantTypes := []BizType{{
		Name: "ORDER_PAYMENT", Target: "noop:", Strategy: "exponential", MaxAttempts: 10, BaseDelay: 5 * time.Second,
		MaxDelay: time.Hour, Jitter: 0.2, Timeout: time.Minute, Priority: "low",
		Retry: retry.Exponential{Base: 5 * time.Second, Max: time.Hour, Jitter: 0.2},
	}, {
		Name: "user-register", Target: "log:", Strategy: "fixed", MaxAttempts: 10, BaseDelay: time.Minute,
		MaxDelay: time.Hour, Jitter: 0.2, Timeout: time.Minute, Priority: "low",
		Retry: retry.Fixed{Base: time.Minute, Jitter: 0.2},
	}}
	if !reflect.DeepEqual(w.Types, wantTypes) {
		t.Errorf("got  %+v\nwant %+v", w.Types, wantTypes)
	}
}

// C-029, C-034, C-021: what is wrong stops the start, and the text names the variable and the expected form.
func TestBadValueIsRefusedByName(t *testing.T) {
	worker := func(vars ...string) map[string]string {
		return with(append([]string{"BIZ_TYPES", "A", "BIZ_A_TARGET", "noop:"}, vars...)...)
	}
	biz := func(key, value string) map[string]string { return worker("BIZ_A_"+key, value) }
	for _, c := range []struct {
		env  map[string]string
		want string // words that must be in the text; "": accepted
	}{
		{worker("WORKER_LEASE", "60s"), ""},
		{worker("WORKER_LEASE", "1h30m", "WORKER_GRACE", "1h30m"), "WORKER_LEASE a duration from 1s to 1h"},
		{worker("WORKER_LEASE", "59m30s"), ""},
		{worker("WORKER_LEASE", "60"), `WORKER_LEASE "60" such as 500ms, 30s`},
		{worker("WORKER_LEASE", "1d"), `WORKER_LEASE "1d" such as 500ms, 30s`},
		{worker("WORKER_LEASE", " 30s "), `WORKER_LEASE " 30s " such as 500ms, 30s`},
		{worker("WORKER_LEASE", ""), "WORKER_LEASE set but empty"},
		{worker("WORKER_LEASE", " "), "WORKER_LEASE set but empty"},
		{worker("WORKER_LEASE", "0"), "WORKER_LEASE a duration from 1s"},
		{worker("WORKER_LEASE", "-5s"), "WORKER_LEASE a duration from 1s"},
		{worker("WORKER_LEASE", "999ms"), "WORKER_LEASE a duration from 1s"},
		{worker("WORKER_NAK_MAX", "0s"), "WORKER_NAK_MAX a duration from 1ms to 1h"},
		{worker("WORKER_GRACE", "25"), "WORKER_GRACE duration"},
		{worker("WORKER_CONCURRENCY", "0"), "WORKER_CONCURRENCY whole number from 1 to 10000"},
		{worker("WORKER_CONCURRENCY", "ten"), `WORKER_CONCURRENCY "ten" whole number`},
		{worker("WORKER_CONCURRENCY", "010"), `WORKER_CONCURRENCY "010" whole number`},
		{worker("WORKER_CONCURRENCY", "5.5"), `WORKER_CONCURRENCY whole number`},
		{worker("DATABASE_URL", ""), "DATABASE_URL set but empty"},
		{worker("NATS_URL", ""), "NATS_URL set but empty"},
		{worker("NATS_URL", "127.0.0.1:4222"), "NATS_URL nats://host:4222"},
		{worker("NATS_URL", "nats://a:4222, nats://b:4222"), ""},
		{worker("DATABASE_URL", "mysql://x/y"), "DATABASE_URL postgres://"},
		{worker("DATABASE_URL", "host=127.0.0.1 user=app password=x dbname=shop"), ""},
		{map[string]string{"NATS_URL": natsURL}, "DATABASE_URL required and not set"},
		{map[string]string{"DATABASE_URL": databaseURL}, "NATS_URL required and not set"},
		{with("BIZ_TYPES", ""), "BIZ_TYPES set but empty"},
		{with("BIZ_TYPES", "A,,B"), `BIZ_TYPES "A,,B" without empty items`},
		{with("BIZ_TYPES", "A,"), `BIZ_TYPES without empty items`},
		{with("BIZ_TYPES", "A,A", "BIZ_A_TARGET", "noop:"), `BIZ_TYPES "A" once`},
		{with("BIZ_TYPES", "A.B", "BIZ_A_TARGET", "noop:"), `BIZ_A_TARGET no type of TASKRELAY_BIZ_TYPES`},
		{with("BIZ_TYPES", "_A"), `BIZ_TYPES "_A" letters, digits`},
		{with("BIZ_TYPES", strings.Repeat("x", 64)), `BIZ_TYPES 1 to 63`},
		{with("BIZ_TYPES", "B-2,b_2", "BIZ_B_2_TARGET", "noop:"), `BIZ_TYPES B-2 and b_2 both map to TASKRELAY_BIZ_B_2_`},
		{with("BIZ_TYPES", "A"), `BIZ_A_TARGET required and not set`},
		{with(), `BIZ_TYPES required by the stock worker`},
		{worker("LOG_LEVEL", "verbose"), `LOG_LEVEL "verbose" debug, info`},
		{worker("LOG_FORMAT", "xml"), `LOG_FORMAT console, json`},
		{worker("SCHEMA", "Task"), `SCHEMA lower-case`},
		{worker("SCHEMA", "task; drop table x"), `SCHEMA lower-case`},
		{worker("SCHEMA", "pg_tasks"), `SCHEMA lower-case`},
		{worker("NAMESPACE", "EU"), `NAMESPACE lower-case`},
		{worker("NAMESPACE", "eu.west"), `NAMESPACE lower-case`},
		{worker("NAMESPACE", "tasks"), `NAMESPACE not tasks`},
		{worker("NAMESPACE", "eu-west"), ""},
		{worker("ADMIN_ADDR", "9090"), `ADMIN_ADDR host:port`},
		{worker("ADMIN_ADDR", "127.0.0.1:99999"), `ADMIN_ADDR host:port`},
		{worker("ADMIN_ADDR", ":0"), ""},
		{worker("MIGRATE", "yes"), `MIGRATE check, auto`},
		{worker("MIGRATE_DATABASE_URL", "x://"), `MIGRATE_DATABASE_URL postgres://`},
		{worker("NATS_CREDS", "/does/not/exist"), `NATS_CREDS no such file`},
		{worker("NATS_NKEY", "/does/not/exist"), `NATS_NKEY no such file`},
		{worker("NATS_NKEY", "config_test.go"), `NATS_NKEY "config_test.go" seed`},
		{worker("NATS_CREDS", "config_test.go", "NATS_NKEY", "config_test.go"), `NATS_NKEY TASKRELAY_NATS_CREDS one of them`},
		{worker("NATS_CA", "/does/not/exist"), `NATS_CA no such file`},
		{worker("NATS_CA", "config_test.go"), `NATS_CA "config_test.go" PEM`},
		{worker("NATS_CERT", "config_test.go"), `NATS_CERT TASKRELAY_NATS_KEY`},
		{worker("NATS_KEY", "config_test.go"), `NATS_KEY TASKRELAY_NATS_CERT`},
		{worker("NATS_CERT", "config_test.go", "NATS_KEY", "config_test.go"), `NATS_CERT "config_test.go" PEM`},

		{biz("TARGET", ""), "BIZ_A_TARGET set but empty"},
		{biz("TARGET", "ftp://host/x"), "BIZ_A_TARGET http://host/path"},
		{biz("TARGET", "https:///x"), "BIZ_A_TARGET http://host/path"},
		{biz("TARGET", "host:8443/x"), "BIZ_A_TARGET http://host/path"},
		{biz("TARGET", "https://h:8443/x?a=b,c"), ""},
		{biz("TARGET", "nats://billing.charge"), ""},
		{biz("TARGET", "nats://127.0.0.1:4222/billing"), "BIZ_A_TARGET subject"},
		{biz("TARGET", "nats://billing.*"), "BIZ_A_TARGET subject"},
		{biz("TARGET", "nats://$JS.API.STREAM.DELETE.TASKS"), "BIZ_A_TARGET subject"},
		{biz("TARGET", "nats://tasks.A.low"), "BIZ_A_TARGET own streams"},
		{biz("COMPENSATE", "nats://dead.A.1"), "BIZ_A_COMPENSATE own streams"},
		{worker("BIZ_A_TARGET", "nats://eu.events.A.x", "NAMESPACE", "eu"), "BIZ_A_TARGET own streams"},
		{worker("BIZ_A_TARGET", "nats://tasks.A.low", "NAMESPACE", "eu"), ""},
		{biz("TARGET", "nats://tasks.charge"), ""},
		{biz("TARGET", "HTTP://host/x"), "BIZ_A_TARGET http://host/path"},
		{biz("TARGET", "http://host:99999/x"), "BIZ_A_TARGET port 99999"},
		{biz("COMPENSATE", "log"), "BIZ_A_COMPENSATE http://host/path"},
		{biz("COMPENSATE", "https://h/undo"), ""},
		{biz("STRATEGY", "linear"), "BIZ_A_STRATEGY linear fixed, exponential, random"},
		{biz("MAX_ATTEMPTS", "0"), "BIZ_A_MAX_ATTEMPTS from 1 to 1000"},
		{biz("MAX_ATTEMPTS", "-1"), "BIZ_A_MAX_ATTEMPTS from 1 to 1000"},
		{biz("MAX_ATTEMPTS", "1001"), "BIZ_A_MAX_ATTEMPTS from 1 to 1000"},
		{biz("BASE_DELAY", "0"), "BIZ_A_BASE_DELAY duration from"},
		{biz("BASE_DELAY", "-2s"), "BIZ_A_BASE_DELAY duration from"},
		{biz("BASE_DELAY", "2h"), "BIZ_A_MAX_DELAY BASE_DELAY"},
		{biz("MAX_DELAY", "0s"), "BIZ_A_MAX_DELAY duration from"},
		{biz("MAX_DELAY", "1s"), "BIZ_A_MAX_DELAY BASE_DELAY"},
		{biz("MAX_DELAY", "99999h"), "BIZ_A_MAX_DELAY duration from"},
		{biz("JITTER", "1.5"), "BIZ_A_JITTER from 0 to 1"},
		{biz("JITTER", "-0.1"), "BIZ_A_JITTER from 0 to 1"},
		{biz("JITTER", "NaN"), "BIZ_A_JITTER from 0 to 1"},
		{biz("JITTER", "20%"), `BIZ_A_JITTER "20%" a number`},
		{biz("JITTER", "0"), ""},
		{biz("TIMEOUT", "0"), "BIZ_A_TIMEOUT duration from"},
		{biz("TIMEOUT", "60"), "BIZ_A_TIMEOUT duration with a unit"},
		{biz("CONCURRENCY", "0"), "BIZ_A_CONCURRENCY from 1"},
		{biz("RATE", "0"), "BIZ_A_RATE starts per second"},
		{biz("RATE", "+Inf"), "BIZ_A_RATE starts per second"},
		{biz("RATE", "0.5"), ""},
		{biz("PRIORITY", "H"), "BIZ_A_PRIORITY high, low"},
		{biz("NOTIFIER", "sms"), "BIZ_A_NOTIFIER log, webhook"},
		{biz("SECRET", "whsec_###"), "BIZ_A_SECRET base64"},
		{biz("TARGTE", "noop:"), "BIZ_A_TARGTE unknown did you mean TASKRELAY_BIZ_A_TARGET?"},
		{with("BIZ_TYPES", "A", "BIZ_A_TARGET", "noop:", "BIZ_B_TARGET", "noop:"), "BIZ_B_TARGET no type of TASKRELAY_BIZ_TYPES (A)"},
	} {
		t.Run(fmt.Sprint(c.env), func(t *testing.T) {
			setenv(t, c.env)
			_, err := LoadWorker()
			checkError(t, err, c.want)
		})
	}
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		{with("RELAY_ENABLED", "TRUE"), ""},
		{with("RELAY_ENABLED", "1"), ""},
		{with("RELAY_ENABLED", "yes"), `RELAY_ENABLED "yes" true or false`},
		{with("RELAY_ENABLED", "on"), `RELAY_ENABLED "on" true or false`},
		{with("RELAY_ENABLED", "2"), `RELAY_ENABLED "2" true or false`},
		{with("RELAY_BIZ_TYPES", "a,,b"), "RELAY_BIZ_TYPES without empty items"},
		{with("RELAY_BIZ_TYPES", " a , b "), ""},
		{with("RELAY_BATCH", "0"), "RELAY_BATCH from 1"},
		{with("RELAY_POLL_MIN", "1s"), "RELAY_POLL_MAX less than TASKRELAY_RELAY_POLL_MIN"},
		{with("RELAY_POLL_MAX", "0"), "RELAY_POLL_MAX duration"},
		{with("RELAY_RECONCILE", "1"), "RELAY_RECONCILE duration"},
		{with("STREAM_REPLICAS", "0"), "STREAM_REPLICAS from 1 to 5"},
		{with("STREAM_REPLICAS", "6"), "STREAM_REPLICAS from 1 to 5"},
		{with("STREAM_MAX_PER_SUBJECT", "0"), "STREAM_MAX_PER_SUBJECT at least 1"},
		{with("RETAIN_SUCCEEDED", "0"), ""},
		{with("RETAIN_SUCCEEDED", "7d"), ""},
		{with("RETAIN_SUCCEEDED", "12h"), ""},
		{with("RETAIN_SUCCEEDED", "7"), "RETAIN_SUCCEEDED 30d or 12h"},
		{with("RETAIN_SUCCEEDED", "-7d"), "RETAIN_SUCCEEDED 30d or 12h"},
		{with("RETAIN_DEAD", "999999999d"), "RETAIN_DEAD 30d or 12h"},
		{with("RETAIN_DEAD", ""), "RETAIN_DEAD set but empty"},
		{with("NOTIFY_WEBHOOK_URL", "hooks.example.com"), "NOTIFY_WEBHOOK_URL http:// or https://"},
		{with("NOTIFY_SMTP_URL", "https://x"), "NOTIFY_SMTP_URL smtp://"},
		{with("NOTIFY_SMTP_URL", "smtp://x"), "NOTIFY_SMTP_URL NOTIFY_EMAIL_TO"},
		{with("NOTIFY_DEFAULT", "pager"), "NOTIFY_DEFAULT pager"},
		{with("NOTIFY_DEFAULT", "webhook"), "NOTIFY_DEFAULT NOTIFY_WEBHOOK_URL"},
		{with("NOTIFY_EMAIL_TO", "ops@example.com, nobody"), "NOTIFY_EMAIL_TO nobody email address"},
		{with("DATABSE_URL", "x"), "TASKRELAY_DATABSE_URL unknown did you mean TASKRELAY_DATABASE_URL?"},
		{with("WORKER_LEASES", "x"), "TASKRELAY_WORKER_LEASES did you mean TASKRELAY_WORKER_LEASE?"},
		// One environment file for all binaries.
		{with("BIZ_TYPES", "A", "BIZ_A_TARGET", "noop:", "WORKER_LEASE", "10s"), ""},
		{with("BIZ_A_TARGET", "noop:"), ""},
		{with("BIZ_A_TARGET", ""), "BIZ_A_TARGET set but empty"},
		{with("BIZ_TYPES", "A", "BIZ_B_RATE", "1"), "BIZ_B_RATE no type of TASKRELAY_BIZ_TYPES (A)"},
		// Kubernetes, for Services named taskrelay and taskrelay-worker.
		{with("SERVICE_HOST", "10.0.0.1", "SERVICE_PORT", "9090", "SERVICE_PORT_ADMIN", "9090", "PORT", "tcp://10.0.0.1:9090",
			"PORT_9090_TCP", "tcp://10.0.0.1:9090", "PORT_9090_TCP_PROTO", "tcp", "PORT_9090_TCP_PORT", "9090", "PORT_9090_TCP_ADDR", "10.0.0.1",
			"WORKER_SERVICE_HOST", "10.0.0.1", "WORKER_SERVICE_PORT_ADMIN", "9090", "WORKER_PORT_53_UDP", "udp://10.0.0.1:53"), ""},
	} {
		t.Run("relay "+fmt.Sprint(c.env), func(t *testing.T) {
			setenv(t, c.env)
			_, err := LoadRelay()
			checkError(t, err, c.want)
		})
	}
}

// checkError wants an *Error whose text holds each word of want; "" wants no error.
func checkError(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	if err == nil {
		t.Fatalf("accepted, want an error with %q", want)
	}
	if _, ok := errors.AsType[*Error](err); !ok {
		t.Errorf("%T is no *Error", err)
	}
	for word := range strings.FieldsSeq(want) {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("got %q, want it to contain %q", err, word)
		}
	}
}

func TestAllThatIsWrongIsReportedAtOnce(t *testing.T) {
	setenv(t, with("LOG_LEVEL", "loud", "WORKER_LEASE", "1ms", "BIZ_TYPES", "A", "BIZ_A_TARGET", "noop:"))
	_, err := LoadWorker()
	checkError(t, err, "LOG_LEVEL WORKER_LEASE")
}

func TestUnprefixedVariableIsNotRead(t *testing.T) {
	setenv(t, with())
	t.Setenv("LOG_LEVEL", "trace")
	t.Setenv("DATABASE_URL", "postgres://elsewhere/x")
	c, err := LoadRelay()
	if err != nil || c.LogLevel != "info" || c.DatabaseURL != databaseURL {
		t.Errorf("got %v, %q, %q", err, c.LogLevel, c.DatabaseURL)
	}
}

func TestNoSecretIsEverPrinted(t *testing.T) {
	const secret = "hunter2"
	env := with("DATABASE_URL", "postgres://app:hunter2@db:5432/shop?sslpassword=hunter2",
		"NATS_URL", "nats://hunter2@a:4222,nats://u:hunter2@b:4222", "MIGRATE_DATABASE_URL", "host=db password=hunter2",
		"BIZ_TYPES", "A", "BIZ_A_TARGET", "https://u:hunter2@h/x?token=hunter2", "BIZ_A_SECRET", secret,
		"NOTIFY_WEBHOOK_SECRET", secret, "NOTIFY_DINGTALK_SECRET", secret,
		"NOTIFY_DINGTALK_URL", "https://oapi.dingtalk.com/robot/send?access_token=hunter2", "NOTIFY_SMTP_URL", "smtp://u:hunter2@mail:587",
		"NOTIFY_EMAIL_FROM", "a@example.com", "NOTIFY_EMAIL_TO", "b@example.com", "NOTIFY_CHAT_URL", "https://hooks.slack.com/services/hunter2?t=hunter2")
	setenv(t, env)
	relay, err := LoadRelay()
	if err != nil {
		t.Fatal(err)
	}
	worker, err := LoadWorker()
	if err != nil {
		t.Fatal(err)
	}
	if got := string(worker.Types[0].Secret); got != secret {
		t.Errorf("the secret itself was read as %q", got)
	}
	for _, c := range []any{relay, worker, &relay, &worker, worker.Types} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x"} {
			if s := fmt.Sprintf(verb, c); strings.Contains(s, secret) || strings.Contains(s, "68756e74657232") {
				t.Errorf("%s prints the secret: %s", verb, s)
			}
		}
		if b, err := json.Marshal(c); err != nil || strings.Contains(string(b), secret) {
			t.Errorf("JSON: %v %s", err, b)
		}
	}
	if got, want := worker.DatabaseURL.Redacted(), "postgres://xxxxx@db:5432/shop"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}

	// Nor by an error, whichever part is wrong.
	for _, c := range [][2]string{
		{"DATABASE_URL", "postgres://app:hunter2@db:port/shop"},
		{"DATABASE_URL", "postgres://app:hunter2%zz@db/shop"},
		{"DATABASE_URL", "host=db password=hunter2 sslmode=bogus"},
		{"DATABASE_URL", "app:hunter2@db/shop"},
		{"NATS_URL", "nats://u:hunter2@[::1"},
		{"NATS_URL", "u:hunter2@host"},
		{"MIGRATE_DATABASE_URL", "postgres://app:hunter2@db:port/shop"},
		{"BIZ_A_TARGET", "https://u:hunter2@h:x/"},
		{"BIZ_A_TARGET", "nats://u:hunter2@h"},
		{"BIZ_A_TARGET", "ftp://u:hunter2@h"},
		{"BIZ_A_COMPENSATE", "https://h/%zz?hunter2"},
		{"BIZ_A_SECRET", "whsec_hunter2"},
	} {
		env := with("BIZ_TYPES", "A", "BIZ_A_TARGET", "noop:")
		env[c[0]] = c[1]
		setenv(t, env)
		_, err := LoadWorker()
		checkError(t, err, Prefix+c[0])
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("%s=%s: the error prints the secret: %v", c[0], c[1], err)
		}
	}
}

func TestCLINeedsServersOnlyWhenAsked(t *testing.T) {
	setenv(t, nil)
	c, err := LoadCLI()
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Database()
	checkError(t, err, "TASKRELAY_DATABASE_URL needed not set postgres://")
	_, err = c.Nats()
	checkError(t, err, "TASKRELAY_NATS_URL needed not set nats://")
}

// K6: what -h prints is what the tags say, and every tag is complete.
func TestTableEqualsTheTags(t *testing.T) {
	for name, c := range map[string]struct {
		spec any
		list []Variable
	}{
		"relay":  {Relay{}, RelayVariables()},
		"worker": {Worker{}, WorkerVariables()},
		"cli":    {CLI{}, CLIVariables()},
		"biz":    {BizType{}, BizTypeVariables()},
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			if err := Table(&b, c.list); err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSpace(b.String()), "\n")[1:]
			tags := tags(reflect.TypeOf(c.spec))
			if len(lines) != len(tags) {
				t.Fatalf("%d lines, %d fields", len(lines), len(tags))
			}
			for i, tag := range tags {
				line, v := lines[i], c.list[i]
				if !strings.HasPrefix(v.Name, Prefix) || !strings.HasPrefix(line, v.Name+" ") {
					t.Errorf("line %q, variable %q", line, v.Name)
				}
				if tag.Get("desc") == "" || !strings.HasSuffix(line, tag.Get("desc")) {
					t.Errorf("line %q, desc %q", line, tag.Get("desc"))
				}
				if d := tag.Get("default"); !strings.Contains(line, d) {
					t.Errorf("line %q, default %q", line, d)
				}
				if required := tag.Get("required") == "true"; v.Required != required || required && !strings.Contains(line, " yes ") {
					t.Errorf("line %q, required %t", line, required)
				}
			}
		})
	}
}

func tags(t reflect.Type) []reflect.StructTag {
	var list []reflect.StructTag
	for i := range t.NumField() {
		f := t.Field(i)
		switch {
		case f.Tag.Get("ignored") == "true":
		case f.Anonymous:
			list = append(list, tags(f.Type)...)
		default:
			list = append(list, f.Tag)
		}
	}
	return list
}

// The names of DESIGN section 6.
func TestEveryVariableOfTheContractExists(t *testing.T) {
	known := knownNames()
	for name := range strings.FieldsSeq(`DATABASE_URL NATS_URL NATS_CREDS SCHEMA NAMESPACE STREAM_REPLICAS
		STREAM_MAX_PER_SUBJECT ADMIN_ADDR LOG_LEVEL LOG_FORMAT MIGRATE MIGRATE_DATABASE_URL RETAIN_SUCCEEDED
		RETAIN_CANCELLED RETAIN_ATTEMPTS RETAIN_DEAD NOTIFY_WEBHOOK_URL NOTIFY_WEBHOOK_SECRET NOTIFY_SMTP_URL
		NOTIFY_EMAIL_FROM NOTIFY_EMAIL_TO NOTIFY_DINGTALK_URL NOTIFY_DINGTALK_SECRET RELAY_ENABLED RELAY_BIZ_TYPES
		RELAY_RECONCILE RELAY_BATCH RELAY_POLL_MIN RELAY_POLL_MAX WORKER_CONCURRENCY WORKER_LEASE WORKER_GRACE
		WORKER_NAK_MAX BIZ_TYPES`) {
		if !known[Prefix+name] {
			t.Errorf("%s%s is in no struct", Prefix, name)
		}
		delete(known, Prefix+name)
	}
	// What came later: docs/decisions.md says why.
	for name := range strings.FieldsSeq(`NATS_API_PREFIX NATS_NKEY NATS_CA NATS_CERT NATS_KEY PPROF_ADDR RETAIN_AUDIT WORKER_CHILD_SPANS RELAY_OPS NOTIFY_DEFAULT NOTIFY_CHAT_URL
		NOTIFY_CHAT_TEMPLATE`) {
		delete(known, Prefix+name)
	}
	if len(known) > 0 {
		t.Errorf("not in the contract: %v", known)
	}
	want := strings.Fields("TARGET COMPENSATE STRATEGY MAX_ATTEMPTS BASE_DELAY MAX_DELAY JITTER TIMEOUT CONCURRENCY RATE PRIORITY NOTIFIER SECRET")
	if got := bizKeys(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestConfigurationPage(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "configuration.md")
	want := Markdown()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Error("docs/configuration.md is not what the tags say: run go test ./internal/config -run TestConfigurationPage -update")
	}
}
