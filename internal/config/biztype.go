package config

import (
	"encoding/base64"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

const bizPrefix = Prefix + "BIZ_"

// BizType is one type of the stock worker: what runs its tasks, and how.
type BizType struct {
	Name string `ignored:"true"`

	Target      URL           `split_words:"true" required:"true" desc:"what runs a task: http://… or https://… (POST), nats://subject (request), log: or noop:"`
	Compensate  URL           `split_words:"true" desc:"what undoes a task whose attempts are used up, written as TARGET; by default nothing"`
	Strategy    string        `split_words:"true" default:"exponential" desc:"delays between attempts: fixed, exponential or random"`
	MaxAttempts int           `split_words:"true" default:"10" desc:"attempts, the first one included, 1 to 1000; the row's and the type's own limit win"`
	BaseDelay   time.Duration `split_words:"true" default:"5s" shown:"5s (fixed: 60s)" desc:"first delay; for random the shortest"`
	MaxDelay    time.Duration `split_words:"true" default:"1h" desc:"longest delay, up to 8760h; not used by fixed"`
	Jitter      float64       `split_words:"true" default:"0.2" desc:"share of a delay that chance may take off, 0 to 1; not used by random"`
	Timeout     time.Duration `split_words:"true" default:"60s" desc:"longest time of one attempt, 1ms to 24h"`
	Concurrency int           `split_words:"true" shown:"TASKRELAY_WORKER_CONCURRENCY" desc:"attempts of this type that run at once in this process, 1 to 10000"`
	Rate        float64       `split_words:"true" desc:"starts per second in this process; by default no limit"`
	Priority    string        `split_words:"true" default:"low" desc:"priority of tasks enqueued without one, high or low; written to table biz_type where it has none"`
	Notifier    string        `split_words:"true" shown:"TASKRELAY_NOTIFY_DEFAULT" desc:"who is told of dead tasks: log, webhook, email, dingtalk or chat; written to table biz_type where it has none"`
	Secret      Secret        `split_words:"true" desc:"signs requests to TARGET and COMPENSATE (Standard Webhooks; whsec_<base64> or plain text)"`

	Retry retry.Policy `ignored:"true"` // from Strategy, BaseDelay, MaxDelay and Jitter
}

// The pattern of DESIGN section 2: one subject token.
const bizTypeForm = "a biz type: 1 to 63 letters, digits, _ and -, beginning with a letter or digit"

// bizTypePrefix is the beginning of a type's variables, without the last underscore.
func bizTypePrefix(name string) string {
	return bizPrefix + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}

func loadBizTypes(names List) ([]BizType, error) {
	var types []BizType
	var errs []error
	byPrefix := map[string]string{}
	for _, name := range names {
		prefix := bizTypePrefix(name)
		if other, taken := byPrefix[prefix]; taken {
			errs = append(errs, Invalid("BIZ_TYPES", "%s and %s both map to %s_: rename one of them", other, name, prefix))
			continue
		}
		byPrefix[prefix] = name
		t, err := loadBizType(name, prefix)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		types = append(types, t)
	}
	return types, joined(errs)
}

func loadBizType(name, prefix string) (BizType, error) {
	t := BizType{Name: name}
	if err := process(prefix, &t); err != nil {
		return t, err
	}
	key := func(k string) string { return strings.TrimPrefix(prefix, Prefix) + "_" + k }
	if _, set := os.LookupEnv(prefix + "_BASE_DELAY"); !set && t.Strategy == "fixed" {
		t.BaseDelay = time.Minute
	}

	var c checks
	c.target(key("TARGET"), t.Target)
	if t.Compensate != "" {
		c.target(key("COMPENSATE"), t.Compensate)
	}
	c.between(key("MAX_ATTEMPTS"), t.MaxAttempts, 1, 1000)
	c.duration(key("BASE_DELAY"), t.BaseDelay, time.Millisecond, maxDelay)
	c.duration(key("MAX_DELAY"), t.MaxDelay, time.Millisecond, maxDelay)
	c.duration(key("TIMEOUT"), t.Timeout, time.Millisecond, 24*time.Hour)
	if _, set := os.LookupEnv(prefix + "_CONCURRENCY"); set {
		c.between(key("CONCURRENCY"), t.Concurrency, 1, 10000)
	}
	if _, set := os.LookupEnv(prefix + "_RATE"); set && !(t.Rate > 0 && t.Rate <= 1e6) {
		c.add(Invalid(key("RATE"), "%v: expected starts per second, more than 0 and up to 1000000", t.Rate))
	}
	c.oneOf(key("PRIORITY"), t.Priority, "high", "low")
	if t.Notifier != "" {
		c.oneOf(key("NOTIFIER"), t.Notifier, notifiers...)
	}
	c.secret(key("SECRET"), t.Secret)
	if len(c) > 0 {
		return t, joined(c)
	}
	policy, err := retry.Parse(t.Strategy, t.BaseDelay, t.MaxDelay, t.Jitter)
	if err != nil {
		return t, &Error{fmt.Errorf("%s_%w", prefix, err)} // it begins with the setting that is wrong
	}
	t.Retry = policy
	return t, nil
}

const maxDelay = 365 * 24 * time.Hour

var natsSubject = regexp.MustCompile(`^[^\s.*>]+(\.[^\s.*>]+)*$`)

func (c *checks) target(name string, target URL) {
	const form = "expected http://host/path, https://host/path, nats://subject, log: or noop:"
	s := string(target)
	switch {
	case s == "log:" || s == "noop:":
		return
	case strings.HasPrefix(s, "nats://"):
		// Such as nats://billing.charge: the connection is the worker's, so there is no host here.
		if subject := strings.TrimPrefix(s, "nats://"); !natsSubject.MatchString(subject) || strings.ContainsAny(subject, "/@:?") || strings.HasPrefix(subject, "$") {
			c.add(Invalid(name, "nats:// is followed by the subject of the service, such as nats://billing.charge (the connection is the worker's own)"))
		}
		return
	}
	// The text of url.Parse's error repeats the whole address, so it is not shown: it may hold a token.
	u, err := url.Parse(s)
	if err != nil || !strings.HasPrefix(s, "http://") && !strings.HasPrefix(s, "https://") || u.Hostname() == "" {
		c.add(Invalid(name, form))
		return
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			c.add(Invalid(name, "port %s: expected 1 to 65535", port))
		}
	}
	if u.Fragment != "" {
		c.add(Invalid(name, "an address with a # part: it would not be sent"))
	}
}

// ownSubject refuses a NATS target among the subjects of our own streams: the server would store the request as a
// message of the task itself and answer it, so each attempt would add one and none would be done.
func (c *checks) ownSubject(name string, target URL, namespace string) {
	subject, ok := strings.CutPrefix(string(target), "nats://")
	if namespace != "" && ok {
		subject, ok = strings.CutPrefix(subject, namespace+".")
	}
	tokens := strings.Split(subject, ".")
	if ok && len(tokens) == 3 && (tokens[0] == "tasks" || tokens[0] == "dead" || tokens[0] == "events") {
		c.add(Invalid(name, "%s is a subject of taskrelay's own streams: name the subject of the service", strings.TrimPrefix(string(target), "nats://")))
	}
}

// secret checks the form of Standard Webhooks; any other text is the key itself.
func (c *checks) secret(name string, s Secret) {
	b64, ok := strings.CutPrefix(string(s), "whsec_")
	if !ok {
		return
	}
	if key, err := base64.StdEncoding.DecodeString(b64); err != nil || len(key) == 0 {
		c.add(Invalid(name, "expected whsec_ and the key in base64, or plain text"))
	}
}
