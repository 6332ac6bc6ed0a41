// Package natscli writes and runs the commands of the nats CLI with which people look at dead letters. They are those
// of natscli v0.5.
package natscli

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Server is where the commands go, and as whom. What is empty they take from the person's own context.
type Server struct {
	URL                  string
	Creds, NKey          string // paths of files
	CA, Cert, ClientsKey string
}

// Command is a command that reaches the streams of an installation.
func (s Server) Command(names outbox.Names, args ...string) []string {
	command := []string{"nats"}
	for _, flag := range [...][2]string{
		{"--server", s.URL}, {"--creds", s.Creds}, {"--nkey", s.NKey}, {"--tlsca", s.CA}, {"--tlscert", s.Cert}, {"--tlskey", s.ClientsKey},
		{"--js-api-prefix", strings.TrimSuffix(names.APIPrefix, ".")},
	} {
		if flag[1] != "" {
			command = append(command, flag[:]...)
		}
	}
	return append(command, args...)
}

// DeadLetters are the commands that look at dead letters. Each reads only. With subject, that of one letter, the first
// one shows this letter.
func DeadLetters(server Server, names outbox.Names, subject string) [][]string {
	with := func(args ...string) []string { return server.Command(names, args...) }
	allLetters := strings.TrimSuffix(names.DeadSubject("x", 0), "x.0") + ">"
	var all [][]string
	if subject != "" {
		all = append(all, with("stream", "get", names.DeadStream(), "--last-for", subject))
	}
	return append(all,
		with("stream", "report"),
		with("stream", "subjects", names.DeadStream()),
		with("sub", "--stream", names.DeadStream(), allLetters, "--all", "-T"),
	)
}

// Line writes a command so that it can be pasted.
func Line(args []string) string {
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = a
		if strings.ContainsAny(a, " >*$'\"") {
			quoted[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
	}
	return strings.Join(quoted, " ")
}

// Find looks for the nats CLI in PATH and where "go install" puts it. It returns "" when there is none.
func Find() string {
	if path, err := exec.LookPath("nats"); err == nil || errors.Is(err, exec.ErrDot) {
		return path
	}
	dirs := []string{os.Getenv("GOBIN")}
	for _, p := range filepath.SplitList(os.Getenv("GOPATH")) {
		dirs = append(dirs, filepath.Join(p, "bin"))
	}
	if home, err := os.UserHomeDir(); err == nil {
		dirs = append(dirs, filepath.Join(home, "go", "bin"))
	}
	for _, dir := range dirs {
		if dir == "" {
			continue
		}
		if path, err := exec.LookPath(filepath.Join(dir, "nats")); err == nil {
			return path
		}
	}
	return ""
}

// Run runs one of the commands above with the program at path and returns what it printed. Contexts and variables of
// the person at the terminal are hidden from it: the command names its server.
func Run(ctx context.Context, path string, args []string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	home, err := os.MkdirTemp("", "taskrelay-nats-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(home)
	cmd := exec.CommandContext(ctx, path, args[1:]...)
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "NATS_") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.Env = append(cmd.Env, "XDG_CONFIG_HOME="+home)
	out, err := cmd.CombinedOutput()
	return strings.TrimRight(string(out), "\n"), err
}
