package config

import (
	"errors"
	"os"
	"reflect"
	"strings"

	"github.com/kelseyhightower/envconfig"
)

// LoadRelay reads the environment of cmd/relay.
func LoadRelay() (Relay, error) {
	var c Relay
	err := load(&c)
	return c, err
}

// LoadWorker reads the environment of cmd/worker, and the variables of each of its biz types.
func LoadWorker() (Worker, error) {
	var c Worker
	if err := load(&c); err != nil {
		return c, err
	}
	types, err := loadBizTypes(c.BizTypes)
	if err != nil {
		return c, err
	}
	c.Types = types
	var own checks
	for _, t := range types {
		prefix := strings.TrimPrefix(bizTypePrefix(t.Name), Prefix)
		own.ownSubject(prefix+"_TARGET", t.Target, c.Namespace)
		own.ownSubject(prefix+"_COMPENSATE", t.Compensate, c.Namespace)
	}
	return c, joined(own)
}

// LoadCLI reads the environment of cmd/taskrelay.
func LoadCLI() (CLI, error) {
	var c CLI
	err := load(&c)
	return c, err
}

func load(spec interface{ check(*checks) }) error {
	env := environment()
	if err := checkNames(env); err != nil {
		return err
	}
	if err := process(strings.TrimSuffix(Prefix, "_"), spec); err != nil {
		return err
	}
	var c checks
	spec.check(&c)
	return joined(c)
}

// environment is what is set under our prefix.
func environment() map[string]string {
	env := map[string]string{}
	for _, kv := range os.Environ() {
		if k, v, _ := strings.Cut(kv, "="); strings.HasPrefix(k, Prefix) {
			env[k] = v
		}
	}
	return env
}

// process is envconfig.Process without its traps: it takes a required variable that is empty for given, reads 010
// as 8, and prints the value that it could not parse.
func process(prefix string, spec any) error {
	var errs []error
	for _, v := range variables(prefix, spec) {
		name := strings.TrimPrefix(v.Name, Prefix)
		value, ok := os.LookupEnv(v.Name)
		if !ok {
			if v.Required {
				errs = append(errs, Invalid(name, "required and not set: %s", v.Desc))
			}
			continue
		}
		if v.field.CanInt() && !isDuration(v.field) && len(strings.TrimLeft(value, "-")) > 1 && strings.TrimLeft(value, "-")[0] == '0' {
			errs = append(errs, Invalid(name, "%q: expected a whole number such as 10", value))
		}
	}
	if err := joined(errs); err != nil {
		return err
	}
	err := envconfig.Process(prefix, spec)
	if parse, ok := errors.AsType[*envconfig.ParseError](err); ok {
		return unparsable(parse)
	}
	if err != nil {
		return &Error{err}
	}
	return nil
}

func unparsable(e *envconfig.ParseError) error {
	name := strings.TrimPrefix(e.KeyName, Prefix)
	if form, ok := errors.AsType[expectedError](e.Err); ok {
		return Invalid(name, "%q: %w", e.Value, form)
	}
	var form string
	switch e.TypeName {
	case "time.Duration":
		form = "a duration with a unit, such as 500ms, 30s, 5m or 1h30m"
	case "bool":
		form = "true or false"
	case "int", "int64":
		form = "a whole number such as 10"
	case "float64":
		form = "a number such as 0.2"
	default:
		return Invalid(name, "expected a %s", e.TypeName)
	}
	return Invalid(name, "%q: expected %s", e.Value, form)
}

func isDuration(v reflect.Value) bool { return v.Type().String() == "time.Duration" }
