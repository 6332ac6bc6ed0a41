package testenv

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Env is what most tests need: a migrated database and an empty nats-server.
type Env struct {
	*Database
	NATS *NATSServer

	t testing.TB
}

// New makes an Env. The functions may change the options of the embedded nats-server.
func New(t testing.TB, change ...func(*server.Options)) *Env {
	t.Helper()
	return &Env{Database: DB(t), NATS: NATS(t, change...), t: t}
}

// NewEnv makes an Env of given servers.
func NewEnv(t testing.TB, db *Database, n *NATSServer) *Env { return &Env{Database: db, NATS: n, t: t} }

// Vars returns the variables that the binaries need, with the given ones added or put in their place.
func (e *Env) Vars(kv ...string) []string {
	vars := []string{
		"TASKRELAY_DATABASE_URL=" + e.URL,
		"TASKRELAY_NATS_URL=" + e.NATS.URL,
		"TASKRELAY_ADMIN_ADDR=127.0.0.1:0",
		"TASKRELAY_LOG_FORMAT=json",
	}
	for _, v := range kv {
		name, _, _ := strings.Cut(v, "=")
		vars = slices.DeleteFunc(vars, func(old string) bool { return strings.HasPrefix(old, name+"=") })
		vars = append(vars, v)
	}
	return vars
}

// StartRelay starts cmd/relay on this environment.
func (e *Env) StartRelay(kv ...string) *Process {
	e.t.Helper()
	return Start(e.t, "relay", nil, e.Vars(kv...)...)
}

// StartWorker starts cmd/worker on this environment. Its leases are short, so that a kill shows soon.
func (e *Env) StartWorker(kv ...string) *Process {
	e.t.Helper()
	return Start(e.t, "worker", nil, e.Vars(append([]string{"TASKRELAY_WORKER_LEASE=3s"}, kv...)...)...)
}

// CLI runs cmd/taskrelay to its end and returns both outputs and the exit code.
func (e *Env) CLI(args ...string) (output string, code int) {
	e.t.Helper()
	p := Start(e.t, "taskrelay", args, "TASKRELAY_DATABASE_URL="+e.URL, "TASKRELAY_NATS_URL="+e.NATS.URL)
	code = p.Wait(e.t, 60*time.Second)
	return p.Logs(), code
}

// HTTPType returns the worker's variables for one type that is sent to a target, with short delays.
// More settings follow as pairs, such as "MAX_ATTEMPTS", "3".
func HTTPType(bizType, target string, settings ...string) []string {
	prefix := "TASKRELAY_BIZ_" + strings.ToUpper(strings.ReplaceAll(bizType, "-", "_")) + "_"
	all := map[string]string{"TARGET": target, "BASE_DELAY": "100ms", "MAX_DELAY": "10s", "JITTER": "0", "TIMEOUT": "20s"}
	for i := 0; i+1 < len(settings); i += 2 {
		all[settings[i]] = settings[i+1]
	}
	vars := []string{"TASKRELAY_BIZ_TYPES=" + bizType}
	for k, v := range all {
		vars = append(vars, prefix+k+"="+v)
	}
	return vars
}

// Types joins the variables of several HTTPType calls: the lists of types become one.
func Types(each ...[]string) []string {
	const list = "TASKRELAY_BIZ_TYPES="
	var names, vars []string
	for _, one := range each {
		for _, v := range one {
			if name, ok := strings.CutPrefix(v, list); ok {
				names = append(names, name)
				continue
			}
			vars = append(vars, v)
		}
	}
	return append(vars, list+strings.Join(names, ","))
}
