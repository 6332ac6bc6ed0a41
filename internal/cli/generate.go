package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/deploy"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

var generateKinds = map[string]string{
	"alerts":  "alert rules for Prometheus",
	"compose": "compose.yaml, and what its profile observability mounts",
	"grafana": "the dashboard",
	"k8s":     "Kubernetes manifests, for kubectl apply -f, or -k with --dir",
	"nats":    "a configuration of nats-server, and who may do what in it",
	"sql":     "the schema as plain SQL, as taskrelay migrate sql",
	"systemd": "units for relay and worker",
}

func (a *app) generateCommand() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:   "generate",
		Short: "Print files to deploy taskrelay with",
		Long: `generate prints files that fit this version. It needs no server. Of several files one can be named; with --dir they are
written into a directory, where a file that is there already and differs is left, and named.`,
		Example: `  taskrelay generate k8s | kubectl apply -f -
  taskrelay generate nats --namespace eu --dir /etc/nats
  taskrelay generate systemd taskrelay-worker.service`,
	}
	group(c)
	for _, kind := range append(deploy.Kinds(), "sql") {
		one := &cobra.Command{
			Use:     kind + " [FILE]",
			Short:   "Print " + generateKinds[kind],
			Example: "  taskrelay generate " + kind + "\n  taskrelay generate " + kind + " --dir deploy",
			Args:    args(cobra.MaximumNArgs(1)),
			RunE: func(c *cobra.Command, args []string) error {
				files, err := a.generated(c, kind)
				if err != nil {
					return err
				}
				if len(args) == 1 {
					if files, err = only(files, args[0]); err != nil {
						return err
					}
				}
				if dir != "" {
					return a.writeFiles(dir, files)
				}
				return a.printFiles(kind, files)
			},
		}
		one.Flags().StringVar(&dir, "dir", "", "write the files into this directory")
		c.AddCommand(one)
	}
	return c
}

func (a *app) generated(c *cobra.Command, kind string) ([]deploy.File, error) {
	if kind != "nats" && kind != "sql" { // these depend on nothing
		return deploy.Files(kind, outbox.Names{}), nil
	}
	cfg, err := a.config(c)
	if err != nil {
		return nil, err
	}
	if kind == "nats" {
		return deploy.Files(kind, outbox.Names{Namespace: cfg.Namespace, APIPrefix: cfg.NatsAPIPrefix}), nil
	}
	sql, err := schema.SQL(schema.Options{Schema: cfg.Schema})
	return []deploy.File{{Path: "taskrelay.sql", Text: sql}}, err
}

func only(files []deploy.File, name string) ([]deploy.File, error) {
	var names []string
	for _, f := range files {
		if f.Path == name {
			return []deploy.File{f}, nil
		}
		names = append(names, f.Path)
	}
	return nil, usage("no file %q: expected one of %s", name, strings.Join(names, ", "))
}

// printFiles prints one file as it is. Several of YAML are documents of one stream, without what only -k understands;
// others are told apart by a line with their path.
func (a *app) printFiles(kind string, files []deploy.File) error {
	for i, f := range files {
		switch {
		case len(files) == 1:
		case kind == "k8s":
			if f.Path == "kustomization.yaml" {
				continue
			}
			if _, err := fmt.Fprintf(a.out, "---\n"); err != nil {
				return err
			}
		default:
			if _, err := fmt.Fprintf(a.out, "%s# --- %s\n", map[bool]string{true: "\n"}[i > 0], f.Path); err != nil {
				return err
			}
		}
		if _, err := fmt.Fprint(a.out, f.Text); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) writeFiles(dir string, files []deploy.File) error {
	var differs []string
	for _, f := range files {
		path := filepath.Join(dir, filepath.FromSlash(f.Path))
		have, err := os.ReadFile(path)
		switch {
		case err == nil && string(have) == f.Text:
			fmt.Fprintln(a.err, "is there:", path)
			continue
		case err == nil:
			differs = append(differs, path)
			continue
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(f.Text), 0o644); err != nil {
			return err
		}
		fmt.Fprintln(a.err, "written: ", path)
	}
	if len(differs) > 0 {
		return &exitError{exitRefused, fmt.Errorf("these files are there and differ, and were left: %s: move them away, or compare", strings.Join(differs, ", "))}
	}
	return nil
}
