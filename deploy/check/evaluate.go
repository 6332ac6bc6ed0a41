package check

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/template"
)

// alert is a firing alert, labels and annotations expanded.
type alert struct {
	Labels      map[string]string `yaml:"exp_labels"`
	Annotations map[string]string `yaml:"exp_annotations"`
}

func (a alert) String() string { return text(a.Labels) + " " + text(a.Annotations) }

func text(m map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&b, "%s=%q ", k, m[k])
	}
	return "{" + strings.TrimSpace(b.String()) + "}"
}

func engine() *promql.Engine {
	return promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1_000_000, Timeout: time.Minute, LookbackDelta: 5 * time.Minute,
		EnableAtModifier: true, EnableNegativeOffset: true, Parser: parser.NewParser(parser.Options{}),
	})
}

// firing evaluates a rule every interval from 0 to at, as Prometheus does, and returns what fires then: what the
// expression has given without a gap for at least its "for".
func firing(ctx context.Context, e *promql.Engine, m memory, r rulefmt.Rule, interval, at time.Duration) ([]alert, error) {
	since := map[string]time.Duration{}
	var last promql.Vector
	for now := time.Duration(0); now <= at; now += interval {
		ts := time.Unix(0, 0).Add(now)
		q, err := e.NewInstantQuery(ctx, m, nil, r.Expr, ts)
		if err != nil {
			return nil, err
		}
		result := q.Exec(ctx)
		if result.Err != nil {
			return nil, result.Err
		}
		last, err = result.Vector()
		if err != nil {
			return nil, err
		}
		seen := map[string]bool{}
		for _, s := range last {
			key := s.Metric.String()
			seen[key] = true
			if _, ok := since[key]; !ok {
				since[key] = now
			}
		}
		maps.DeleteFunc(since, func(key string, _ time.Duration) bool { return !seen[key] })
		last = append(promql.Vector(nil), last...)
		q.Close()
	}
	var alerts []alert
	for _, s := range last {
		if at-since[s.Metric.String()] < time.Duration(r.For) {
			continue
		}
		a := alert{Labels: map[string]string{}, Annotations: map[string]string{}}
		s.Metric.Range(func(l labels.Label) {
			if l.Name != labels.MetricName {
				a.Labels[l.Name] = l.Value
			}
		})
		data := template.AlertTemplateData(maps.Clone(a.Labels), nil, "", s)
		expand := func(t string) (string, error) {
			return template.NewTemplateExpander(ctx,
				"{{$labels := .Labels}}{{$value := .Value}}"+t, r.Alert, data, model.Time(at.Milliseconds()), nil, &url.URL{}, nil).Expand()
		}
		for to, from := range map[*map[string]string]map[string]string{&a.Labels: r.Labels, &a.Annotations: r.Annotations} {
			for k, t := range from {
				v, err := expand(t)
				if err != nil {
					return nil, fmt.Errorf("%s: %s: %w", r.Alert, k, err)
				}
				(*to)[k] = v
			}
		}
		alerts = append(alerts, a)
	}
	return alerts, nil
}
