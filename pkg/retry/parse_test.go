package retry_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		strategy    string
		base, limit time.Duration
		jitter      float64
		want        retry.Policy
	}{
		{"fixed", time.Minute, time.Second, 0.1, retry.Fixed{Base: time.Minute, Jitter: 0.1}},
		{"exponential", 5 * time.Second, time.Hour, 0.2, retry.Exponential{Base: 5 * time.Second, Max: time.Hour, Jitter: 0.2}},
		{"exponential", time.Second, time.Second, 1, retry.Exponential{Base: time.Second, Max: time.Second, Jitter: 1}},
		{"random", time.Second, time.Minute, 0, retry.Random{Min: time.Second, Max: time.Minute}},
	} {
		got, err := retry.Parse(c.strategy, c.base, c.limit, c.jitter)
		if err != nil || got != c.want {
			t.Errorf("%s: got %+v, %v, want %+v", c.strategy, got, err, c.want)
		}
	}
}

// Field case C-021: zero and negative settings are refused at the start, never a spinning loop.
func TestParseRefusesWhatIsOutOfRange(t *testing.T) {
	for _, c := range []struct {
		strategy    string
		base, limit time.Duration
		jitter      float64
		want        []string
	}{
		{"nonsense", time.Second, time.Hour, 0, []string{"STRATEGY", `"nonsense"`, "fixed, exponential, random"}},
		{"", time.Second, time.Hour, 0, []string{"STRATEGY", "fixed, exponential, random"}},
		{"Exponential", time.Second, time.Hour, 0, []string{"STRATEGY", "exponential"}},
		{"exponential", 0, time.Hour, 0, []string{"BASE_DELAY", "0s", "above 0", "5s"}},
		{"fixed", -time.Second, time.Hour, 0, []string{"BASE_DELAY", "-1s", "above 0"}},
		{"random", 0, 0, 0, []string{"BASE_DELAY"}},
		{"exponential", time.Minute, 0, 0, []string{"MAX_DELAY", "0s", "1m0s"}},
		{"exponential", time.Minute, time.Second, 0, []string{"MAX_DELAY", "1s", "1m0s"}},
		{"random", time.Minute, time.Second, 0, []string{"MAX_DELAY"}},
		{"exponential", time.Second, time.Hour, -0.1, []string{"JITTER", "-0.1", "0 to 1"}},
		{"fixed", time.Second, time.Hour, 1.01, []string{"JITTER", "1.01"}},
		{"exponential", time.Second, time.Hour, math.NaN(), []string{"JITTER", "NaN"}},
		{"exponential", time.Second, time.Hour, math.Inf(1), []string{"JITTER"}},
	} {
		p, err := retry.Parse(c.strategy, c.base, c.limit, c.jitter)
		if err == nil {
			t.Errorf("%+v: got %+v, want an error", c, p)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%+v: %q does not say %q", c, err, want)
			}
		}
	}
}
