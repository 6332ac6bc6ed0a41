package check

import (
	"context"
	"fmt"
	"sort"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/util/annotations"
)

// memory is a storage of a few series, for the engine to query.
type memory []memorySeries

type memorySeries struct {
	labels  labels.Labels
	samples []sample
}

type sample struct {
	t int64
	v float64
}

// inputSeries is a series as a test file of promtool has it.
type inputSeries struct {
	Series string `yaml:"series"`
	Values string `yaml:"values"`
}

func load(input []inputSeries, interval time.Duration) (memory, error) {
	var m memory
	p := parser.NewParser(parser.Options{})
	for _, in := range input {
		ls, values, err := p.ParseSeriesDesc(in.Series + " " + in.Values)
		if err != nil {
			return nil, fmt.Errorf("series %s %s: %w", in.Series, in.Values, err)
		}
		s := memorySeries{labels: ls}
		for i, v := range values {
			if !v.Omitted {
				s.samples = append(s.samples, sample{int64(i) * interval.Milliseconds(), v.Value})
			}
		}
		m = append(m, s)
	}
	return m, nil
}

func (m memory) Querier(mint, maxt int64) (storage.Querier, error) {
	return querier{m, mint, maxt}, nil
}

type querier struct {
	memory
	mint, maxt int64
}

func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	var found []storage.Series
next:
	for _, s := range q.memory {
		for _, m := range matchers {
			if !m.Matches(s.labels.Get(m.Name)) {
				continue next
			}
		}
		var samples []sample
		for _, x := range s.samples {
			if x.t >= q.mint && x.t <= q.maxt {
				samples = append(samples, x)
			}
		}
		found = append(found, &storage.SeriesEntry{Lset: s.labels, SampleIteratorFn: func(chunkenc.Iterator) chunkenc.Iterator {
			return &iterator{samples: samples, at: -1}
		}})
	}
	sort.Slice(found, func(i, j int) bool { return labels.Compare(found[i].Labels(), found[j].Labels()) < 0 })
	return &seriesSet{series: found, at: -1}
}

func (querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) Close() error { return nil }

type seriesSet struct {
	series []storage.Series
	at     int
}

func (s *seriesSet) Next() bool                        { s.at++; return s.at < len(s.series) }
func (s *seriesSet) At() storage.Series                { return s.series[s.at] }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }

type iterator struct {
	samples []sample
	at      int
}

func (i *iterator) Next() chunkenc.ValueType {
	if i.at++; i.at < len(i.samples) {
		return chunkenc.ValFloat
	}
	return chunkenc.ValNone
}

func (i *iterator) Seek(t int64) chunkenc.ValueType {
	i.at = max(i.at, 0)
	for i.at < len(i.samples) && i.samples[i.at].t < t {
		i.at++
	}
	if i.at < len(i.samples) {
		return chunkenc.ValFloat
	}
	return chunkenc.ValNone
}

func (i *iterator) At() (int64, float64) { return i.samples[i.at].t, i.samples[i.at].v }
func (i *iterator) AtT() int64           { return i.samples[i.at].t }
func (i *iterator) AtST() int64          { return 0 }
func (i *iterator) Err() error           { return nil }
func (i *iterator) AtHistogram(*histogram.Histogram) (int64, *histogram.Histogram) {
	panic("no histograms here")
}

func (i *iterator) AtFloatHistogram(*histogram.FloatHistogram) (int64, *histogram.FloatHistogram) {
	panic("no histograms here")
}
