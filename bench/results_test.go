package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestMedianAndPercentile(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 3, 2}, 2.5},
	} {
		if got := median(c.values); got != c.want {
			t.Errorf("median of %v: got %v, want %v", c.values, got, c.want)
		}
	}
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for _, c := range []struct{ p, want float64 }{{50, 50}, {95, 95}, {99, 99}, {100, 100}, {0, 1}} {
		if got := percentile(hundred, c.p); got != c.want {
			t.Errorf("percentile %v of 1 to 100: got %v, want %v", c.p, got, c.want)
		}
	}
}

func TestMinAndMaxAreOfTheMainFigure(t *testing.T) {
	for _, c := range []struct {
		name     string
		runs     []row
		min, max float64
	}{
		{"drain", []row{{Scenario: "drain", Rate: 5}, {Scenario: "drain", Rate: 2}, {Scenario: "drain", Rate: 3}}, 2, 5},
		{"latency", []row{{Scenario: "latency", Rate: 500, P50: 7}, {Scenario: "latency", Rate: 501, P50: 9}}, 7, 9},
		{"steady", []row{{Scenario: "steady", Rate: 500, P50: 7}, {Scenario: "steady", Rate: 600, P50: 9}}, 500, 600},
		{"enqueue", []row{{Scenario: "enqueue", Rate: 900, Slowdown: 1.3}, {Scenario: "enqueue", Rate: 800, Slowdown: 1.5}}, 1.3, 1.5},
	} {
		r := medianRow(c.runs)
		if r.Min != c.min || r.Max != c.max {
			t.Errorf("%s: got min %v and max %v, want %v and %v", c.name, r.Min, r.Max, c.min, c.max)
		}
	}
}

// The table compares each scenario of ours with River's, also where ours has another name.
func TestTableComparesWithRiver(t *testing.T) {
	rows := []row{
		{Scenario: "floor-copy", System: "machine", Rate: 1},
		{Scenario: "drain", System: "taskrelay", Rate: 300}, {Scenario: "drain", System: "river", Rate: 200},
		{Scenario: "enqueue-function", System: "taskrelay", Rate: 9, Slowdown: 1.5}, {Scenario: "enqueue", System: "river", Rate: 8, Slowdown: 2},
		{Scenario: "types", System: "taskrelay", Rate: 9},
	}
	want := []string{"-", "1.50", "-", "0.75", "-", "-"}
	for i, r := range rows {
		if got := ratioToRiver(rows, r); got != want[i] {
			t.Errorf("%s of %s: got %s, want %s", r.Scenario, r.System, got, want[i])
		}
	}
	var out bytes.Buffer
	printTable(&out, rows)
	if got := strings.Count(out.String(), "taskrelay"); got != 3 {
		t.Errorf("got %d rows of taskrelay, want 3:\n%s", got, out.String())
	}
}
