package check

import (
	"encoding/json"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
)

const (
	folder = "../observability"
	docs   = "../../docs"
)

func rules(t *testing.T) map[string]rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(filepath.Join(folder, "alerts.yaml"), false, model.UTF8Validation,
		parser.NewParser(parser.Options{}), slog.Default())
	for _, err := range errs {
		t.Error(err)
	}
	if t.Failed() {
		t.FailNow()
	}
	all := map[string]rulefmt.Rule{}
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			all[r.Alert] = r
		}
	}
	if len(all) < 10 {
		t.Fatalf("got %d rules", len(all))
	}
	return all
}

// The test file is promtool's: promtool test rules alerts_test.yaml says the same.
func TestAlertsFireWhenTheyShould(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(folder, "alerts_test.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Tests []struct {
			Name     string         `yaml:"name"`
			Interval model.Duration `yaml:"interval"`
			Input    []inputSeries  `yaml:"input_series"`
			Alerts   []struct {
				EvalTime  model.Duration `yaml:"eval_time"`
				Alertname string         `yaml:"alertname"`
				Want      []alert        `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		} `yaml:"tests"`
		Files    []string       `yaml:"rule_files"`
		Interval model.Duration `yaml:"evaluation_interval"`
	}
	d := yaml.NewDecoder(strings.NewReader(string(raw)))
	d.KnownFields(true)
	if err := d.Decode(&file); err != nil {
		t.Fatal(err)
	}
	all, engine := rules(t), engine()
	fired, quiet := map[string]bool{}, map[string]bool{}
	for _, test := range file.Tests {
		t.Run(test.Name, func(t *testing.T) {
			m, err := load(test.Input, time.Duration(test.Interval))
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range test.Alerts {
				r, ok := all[a.Alertname]
				if !ok {
					t.Errorf("no alert %s", a.Alertname)
					continue
				}
				got, err := firing(t.Context(), engine, m, r, time.Duration(file.Interval), time.Duration(a.EvalTime))
				if err != nil {
					t.Errorf("%s: %v", a.Alertname, err)
					continue
				}
				if len(a.Want) == 0 {
					quiet[a.Alertname] = true
				} else {
					fired[a.Alertname] = true
				}
				lines := func(list []alert) string {
					var s []string
					for _, a := range list {
						s = append(s, a.String())
					}
					slices.Sort(s)
					return strings.Join(s, "\n")
				}
				if g, w := lines(got), lines(a.Want); g != w {
					t.Errorf("%s after %v: got\n%s\nwant\n%s", a.Alertname, a.EvalTime, g, w)
				}
			}
		})
	}
	for name := range all {
		if !fired[name] {
			t.Errorf("no test lets %s fire", name)
		}
		if !quiet[name] {
			t.Errorf("no test keeps %s quiet", name)
		}
	}
}

// metrics are those that tests/metrics_binaries_test.go has seen.
func metrics(t *testing.T) map[string]string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(folder, "metrics.txt"))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for line := range strings.Lines(string(raw)) {
		if name, kind, ok := strings.Cut(strings.TrimSpace(line), " "); ok && !strings.HasPrefix(line, "#") {
			kind, _, _ = strings.Cut(kind, " ")
			all[name] = kind
		}
	}
	if len(all) < 20 {
		t.Fatalf("got %d metrics", len(all))
	}
	return all
}

// checkQuery reports what is wrong with a query: it does not parse, names no metric that there is, or the part of a
// histogram of something else.
func checkQuery(t *testing.T, where, query string, known map[string]string) {
	t.Helper()
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(query)
	if err != nil {
		t.Errorf("%s: %s: %v", where, query, err)
		return
	}
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		v, ok := n.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		name := v.Name
		for _, m := range v.LabelMatchers {
			if m.Name == labels.MetricName && m.Type == labels.MatchEqual {
				name = m.Value
			}
		}
		if known[name] != "" && known[name] != "histogram" || strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || name == "up" {
			return nil
		}
		for _, suffix := range []string{"_bucket", "_count", "_sum"} {
			if base, ok := strings.CutSuffix(name, suffix); ok && known[base] == "histogram" {
				return nil
			}
		}
		if optional := regexp.MustCompile(`^(jetstream|gnatsd|nats)_`); optional.MatchString(name) {
			return nil // of prometheus-nats-exporter, in an optional row
		}
		t.Errorf("%s: %s: no metric %q in metrics.txt", where, query, name)
		return nil
	})
}

func TestQueriesOfAlertsNameMetricsThatThereAre(t *testing.T) {
	known := metrics(t)
	for name, r := range rules(t) {
		checkQuery(t, name, r.Expr, known)
		if s := r.Labels["severity"]; s != "page" && s != "ticket" {
			t.Errorf("%s: severity %q, want page or ticket", name, s)
		}
		if r.Annotations["summary"] == "" {
			t.Errorf("%s has no summary", name)
		}
	}
}

func TestEveryAlertHasARunbookAndEveryRunbookAnAlert(t *testing.T) {
	all := rules(t)
	for name, r := range all {
		want := "docs/runbooks/" + name + ".md"
		if r.Annotations["runbook"] != want {
			t.Errorf("%s: runbook %q, want %q", name, r.Annotations["runbook"], want)
		}
		page, err := os.ReadFile(filepath.Join(docs, "runbooks", name+".md"))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, part := range []string{"# " + name, "## What it means", "## Look", "## Do"} {
			if !strings.Contains(string(page), part+"\n") {
				t.Errorf("%s.md has no line %q", name, part)
			}
		}
		if !strings.Contains(string(page), "```") {
			t.Errorf("%s.md has no command to run", name)
		}
	}
	pages, err := filepath.Glob(filepath.Join(docs, "runbooks", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if name := strings.TrimSuffix(filepath.Base(page), ".md"); all[name].Alert == "" {
			t.Errorf("%s: there is no such alert", page)
		}
	}
}

func TestQueriesOfTheDashboardNameMetricsThatThereAre(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(folder, "grafana-dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	type panel struct {
		ID      int    `json:"id"`
		Title   string `json:"title"`
		Type    string `json:"type"`
		Targets []struct {
			Expr string `json:"expr"`
		} `json:"targets"`
		Panels []json.RawMessage `json:"panels"`
	}
	var board struct {
		UID        string            `json:"uid"`
		Title      string            `json:"title"`
		Panels     []json.RawMessage `json:"panels"`
		Templating struct {
			List []struct {
				Name  string `json:"name"`
				Query any    `json:"query"`
			} `json:"list"`
		} `json:"templating"`
	}
	if err := json.Unmarshal(raw, &board); err != nil {
		t.Fatal(err)
	}
	if board.UID != "taskrelay" {
		t.Errorf("uid %q: links to the dashboard need one that stays", board.UID)
	}
	known, ids, queries := metrics(t), map[int]string{}, 0
	// Grafana puts its variables in before Prometheus sees the query.
	variables := strings.NewReplacer("$__rate_interval", "5m", "$biz_type", "ORDER_PAYMENT", "$namespace", "prod")
	var walk func(list []json.RawMessage)
	walk = func(list []json.RawMessage) {
		for _, raw := range list {
			var p panel
			if err := json.Unmarshal(raw, &p); err != nil {
				t.Fatal(err)
			}
			if other, ok := ids[p.ID]; ok {
				t.Errorf("panels %q and %q have the same id", other, p.Title)
			}
			ids[p.ID] = p.Title
			if p.Type != "row" && len(p.Targets) == 0 {
				t.Errorf("panel %q has no query", p.Title)
			}
			for _, target := range p.Targets {
				queries++
				checkQuery(t, p.Title, variables.Replace(target.Expr), known)
			}
			walk(p.Panels)
		}
	}
	walk(board.Panels)
	if queries < 15 {
		t.Errorf("got %d queries", queries)
	}
	for _, v := range board.Templating.List {
		q, ok := v.Query.(string)
		if !ok {
			continue
		}
		if m := regexp.MustCompile(`^label_values\((\w+)`).FindStringSubmatch(q); m != nil && known[m[1]] == "" {
			t.Errorf("variable %s: no metric %q", v.Name, m[1])
		}
	}
}

// docs/observability.md lists every metric, and no other.
func TestThePageListsEveryMetric(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(docs, "observability.md"))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(taskrelay_\\w+)`").FindAllStringSubmatch(string(page), -1) {
		listed[m[1]] = true
	}
	known := metrics(t)
	for _, name := range slices.Sorted(maps.Keys(known)) {
		if strings.HasPrefix(name, "taskrelay_") && !listed[name] {
			t.Errorf("docs/observability.md does not list %s", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(listed)) {
		if known[name] == "" {
			t.Errorf("docs/observability.md lists %s, which no process has shown", name)
		}
	}
}
