package config

import (
	"fmt"
	"io"
	"reflect"
	"strings"
	"text/tabwriter"
	"text/template"

	"github.com/kelseyhightower/envconfig"
)

// Variable is one row of the table.
type Variable struct {
	Name     string // with its prefix
	Default  string // "" if there is none
	Required bool
	Desc     string // meaning and unit

	field reflect.Value
}

// variables lists what envconfig reads into spec, by envconfig's own walk: so the table cannot drift from it.
func variables(prefix string, spec any) []Variable {
	var list []Variable
	add := func(key string, tag reflect.StructTag, field reflect.Value) string {
		shown := tag.Get("default")
		if s, ok := tag.Lookup("shown"); ok {
			shown = s
		}
		list = append(list, Variable{
			Name: key, Default: shown, Required: tag.Get("required") == "true", Desc: tag.Get("desc"), field: field,
		})
		return ""
	}
	t := template.Must(template.New("").Funcs(template.FuncMap{"add": add}).
		Parse(`{{range .}}{{add .Key .Tags .Field}}{{end}}`))
	if err := envconfig.Usaget(prefix, spec, io.Discard, t); err != nil {
		panic(err) // spec is no pointer to a struct: a mistake in this package
	}
	return list
}

// RelayVariables lists the variables of cmd/relay.
func RelayVariables() []Variable { return top(new(Relay)) }

// WorkerVariables lists the variables of cmd/worker, those of one biz type excepted.
func WorkerVariables() []Variable { return top(new(Worker)) }

// CLIVariables lists the variables of cmd/taskrelay.
func CLIVariables() []Variable { return top(new(CLI)) }

// BizTypeVariables lists the variables of one biz type, under the prefix TASKRELAY_BIZ_<TYPE>_.
func BizTypeVariables() []Variable {
	list := variables(bizPrefix+"<TYPE>", new(BizType))
	return list
}

func top(spec any) []Variable { return variables(strings.TrimSuffix(Prefix, "_"), spec) }

// Table prints variables for -h.
func Table(w io.Writer, list []Variable) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "VARIABLE\tDEFAULT\tREQUIRED\tMEANING")
	for _, v := range list {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", v.Name, dash(v.Default), yes(v.Required), v.Desc)
	}
	return tw.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "-"
}

const markdownHead = `# Configuration

<!-- Made by go test ./internal/config -run TestConfigurationPage -update. Do not edit. -->

The binaries read environment variables and nothing else. One environment file serves all of them: a process accepts
the variables of the others. These stop the start, with the name of the variable: one that is unknown (the nearest
known one is named; what Kubernetes injects for a Service is accepted), one that is set but empty (leave it unset to
get the default), one that does not parse or is out of range. Durations are written with a unit: ` + "`500ms`, `30s`, `5m`, `1h30m`" + `.
Secrets are never printed. ` + "`relay -h` and `worker -h`" + ` print these tables.

`

const markdownBiz = `
## One biz type of the stock worker

` + "`TASKRELAY_BIZ_TYPES=ORDER_PAYMENT,USER_REGISTER`" + ` names the types; ` + "`<TYPE>`" + ` is the name in upper case, with ` + "`-`" + ` as ` + "`_`" + `:
` + "`TASKRELAY_BIZ_ORDER_PAYMENT_TARGET=https://pay.internal/tasks`" + `. Two types that map to the same ` + "`<TYPE>`" + ` are refused.
Targets come from here only, never from a row, so they may be internal addresses. Redirects are not followed and proxy
variables (` + "`HTTP_PROXY`" + `) are not read.

`

// Markdown is the page docs/configuration.md.
func Markdown() string {
	var b strings.Builder
	b.WriteString(markdownHead)
	b.WriteString("## Binaries\n\n| variable | default | read by | meaning |\n|---|---|---|---|\n")
	var all []Variable
	readBy := map[string][]string{}
	for _, binary := range []struct {
		name string
		list []Variable
	}{{"relay", RelayVariables()}, {"worker", WorkerVariables()}, {"taskrelay", CLIVariables()}} {
		for _, v := range binary.list {
			if readBy[v.Name] == nil {
				all = append(all, v)
			}
			readBy[v.Name] = append(readBy[v.Name], binary.name)
		}
	}
	for _, v := range all {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", v.Name, markdownDefault(v), strings.Join(readBy[v.Name], ", "), markdownText(v.Desc))
	}
	b.WriteString(markdownBiz)
	b.WriteString("| variable | default | meaning |\n|---|---|---|\n")
	for _, v := range BizTypeVariables() {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", v.Name, markdownDefault(v), markdownText(v.Desc))
	}
	b.WriteString(markdownTargets)
	return b.String()
}

const markdownTargets = `
## What a target gets and answers

An attempt is one call. The body is the payload byte for byte. Headers: ` + "`Task-Installation`, `Task-Id`, `Task-Biz-Type`, `Task-Biz-Id`," + `
` + "`Task-Generation`, `Task-Phase`, `Task-Priority`, `Task-Created-At` (µs), `Task-Attempt`, `Task-Max-Attempts`, `Idempotency-Key`" + ` (the
same for every attempt), and the row's own headers, but for those that frame a message, choose a host or carry
credentials (` + "`Content-*`, `Transfer-Encoding`, `Connection`, `Host`, `Authorization`, `Cookie`" + ` and the like). A compensation has
` + "`Task-Phase: compensate`, `Task-Error`" + ` and a key of its own. With a secret the headers ` + "`webhook-id`, `webhook-timestamp` and" + `
` + "`webhook-signature`" + ` are those of Standard Webhooks 1.0.0. Credentials for HTTP go into the address: ` + "`https://user:password@host/path`" + `.

| answer | outcome |
|---|---|
| 2xx | done; a JSON body of up to 64 KiB is kept as the result, any other body is not |
| 408, 409, 425, 429, 5xx, no answer | tried again. ` + "`Retry-After`" + ` (seconds or a date) lengthens the delay, up to 24h, and never shortens it |
| anything else, redirects too | no further attempt: compensation, dead letter |

A NATS service gets the same headers and answers with ` + "`Task-Status`" + ` and such a code; an empty answer without one is done, a body
without one is tried again, because it may mean either. ` + "`Nats-Service-Error-Code`" + ` is read in the same way. No responder: tried again.
`

func markdownDefault(v Variable) string {
	switch {
	case v.Required:
		return "required"
	case v.Default == "":
		return ""
	}
	return "`" + v.Default + "`"
}

func markdownText(s string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", ">", "&gt;").Replace(s)
}
