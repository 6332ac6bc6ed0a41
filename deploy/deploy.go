// Package deploy holds the files that an installation is made of, as taskrelay generate prints them. They are the files of
// this folder, byte for byte; compose.yaml is the one in the repository's root.
//
// It is for the command line. Its Go names may change with any version.
package deploy

import (
	"embed"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

//go:embed compose.yaml nats kubernetes systemd
//go:embed observability/alerts.yaml observability/prometheus.yml observability/grafana-dashboard.json
//go:embed observability/grafana-dashboards.yaml observability/grafana-datasources.yaml
var files embed.FS

// A File is one of a kind. Its path is where it belongs, beside or below the others.
type File struct {
	Path string
	Text string
}

// kinds are the files of each kind, or the folder that holds them.
var kinds = map[string][]string{
	"compose": {"compose.yaml", "observability/alerts.yaml", "observability/prometheus.yml", "observability/grafana-dashboard.json",
		"observability/grafana-dashboards.yaml", "observability/grafana-datasources.yaml"},
	"k8s":     {"kubernetes"},
	"systemd": {"systemd"},
	"grafana": {"observability/grafana-dashboard.json"},
	"alerts":  {"observability/alerts.yaml"},
	"nats":    {"nats"},
}

// Kinds are what [Files] knows, in order.
func Kinds() []string { return []string{"alerts", "compose", "grafana", "k8s", "nats", "systemd"} }

// Files are those of a kind, in the order of their paths; nil for an unknown kind. Only what is of kind nats depends on
// names.
func Files(kind string, names outbox.Names) []File {
	var list []File
	for _, root := range kinds[kind] {
		err := fs.WalkDir(files, root, func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := files.ReadFile(name)
			if err != nil {
				return err
			}
			f := File{Path: name, Text: string(text)}
			switch {
			case kind == "compose" && name != "compose.yaml":
				f.Path = path.Join("deploy", name) // where compose.yaml mounts it from
			case len(kinds[kind]) == 1:
				f.Path = strings.TrimPrefix(strings.TrimPrefix(name, root), "/")
				if f.Path == "" {
					f.Path = path.Base(name)
				}
			}
			if kind == "nats" {
				f.Text = renamed(f.Text, names)
			}
			list = append(list, f)
			return nil
		})
		if err != nil {
			panic(err) // the files are part of the program
		}
	}
	slices.SortFunc(list, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return list
}

var (
	streams  = regexp.MustCompile(`\bTASKS(_DEAD|_EVENTS)?\b`)
	subjects = regexp.MustCompile(`(["*.])((?:tasks|dead|events)\.[*>]|taskrelay\.(?:wake|ops))`)
	api      = regexp.MustCompile(`\$JS\.API\.`)
)

// renamed is a permission list with the streams and subjects of an installation that has a namespace, and the prefix of
// JetStream's API.
func renamed(text string, names outbox.Names) string {
	if names.Namespace != "" {
		text = streams.ReplaceAllStringFunc(text, func(s string) string {
			return strings.Replace(s, "TASKS", names.Stream(), 1)
		})
		text = subjects.ReplaceAllString(text, "${1}"+names.Namespace+".${2}")
	}
	return api.ReplaceAllLiteralString(text, names.API())
}
