package retry_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"pgregory.net/rapid"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

func TestExponentialDoublesUpToMax(t *testing.T) {
	s := func(secs ...int) (ds []time.Duration) {
		for _, x := range secs {
			ds = append(ds, time.Duration(x)*time.Second)
		}
		return ds
	}
	for _, c := range []struct {
		policy retry.Exponential
		want   []time.Duration
	}{
		{retry.Exponential{Base: 2 * time.Second}, s(2, 4, 8, 16)},
		{retry.Exponential{}, s(5, 10, 20, 40)},
		{retry.Exponential{Base: 5 * time.Second, Max: 30 * time.Second}, s(5, 10, 20, 30, 30)},
		{retry.Exponential{Base: 5 * time.Second, Max: 4 * time.Second}, s(4, 4)},
		{retry.Exponential{Base: 5 * time.Second, Jitter: math.NaN()}, s(5, 10)},
	} {
		var got []time.Duration
		for n := range c.want {
			got = append(got, c.policy.Delay(n+1))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v: got %v, want %v", c.policy, got, c.want)
		}
	}
}

// Field case C-017: 1s << 34 is negative, 1s << 62 is 0.
func TestDelaysOfManyAttemptsNeverOverflow(t *testing.T) {
	p := retry.Exponential{Base: time.Second, Max: time.Hour}
	prev := time.Duration(0)
	for n := 1; n <= 1000; n++ {
		d := p.Delay(n)
		if d <= 0 || d > time.Hour || d < prev {
			t.Fatalf("after %d failures: %v, before that %v", n, d, prev)
		}
		prev = d
	}
	unbounded := retry.Exponential{Base: time.Second, Max: math.MaxInt64}
	for _, n := range []int{33, 34, 61, 62, 63, 64, 65, 310, 999, math.MaxInt32, math.MaxInt} {
		if d := unbounded.Delay(n); d < time.Second<<32 {
			t.Errorf("after %d failures: %v", n, d)
		}
	}
}

func anyCount() *rapid.Generator[int] {
	return rapid.OneOf(rapid.Int(), rapid.IntRange(-3, 80), rapid.SampledFrom([]int{math.MinInt, 0, 1, math.MaxInt}))
}

func anyDuration() *rapid.Generator[time.Duration] {
	return rapid.Custom(func(t *rapid.T) time.Duration {
		return time.Duration(rapid.OneOf(rapid.Int64Range(1, math.MaxInt64),
			rapid.Int64Range(1, int64(time.Hour)), rapid.SampledFrom([]int64{1, 2, math.MaxInt64})).Draw(t, "ns"))
	})
}

// Field cases C-017 and C-018: within bounds for any number, any setting, jitter included.
func TestDelaysStayWithinBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, base, limit := anyCount().Draw(t, "n"), anyDuration().Draw(t, "base"), anyDuration().Draw(t, "max")
		j := rapid.OneOf(rapid.Float64Range(0, 1), rapid.SampledFrom([]float64{0, 1, math.Nextafter(1, 0)})).Draw(t, "jitter")
		lowest := func(d time.Duration) time.Duration {
			// Above 2^53 ns (104 days) a float64 is exact to within 512 ns.
			return max(0, time.Duration(math.Floor((1-j)*float64(d)))-1024)
		}

		full := retry.Exponential{Base: base, Max: limit}.Delay(n)
		if full < min(base, limit) || full > limit {
			t.Fatalf("exponential without jitter: %v", full)
		}
		if d := (retry.Exponential{Base: base, Max: limit, Jitter: j}).Delay(n); d < lowest(full) || d > full {
			t.Fatalf("exponential: %v, want in [%v, %v]", d, lowest(full), full)
		}
		if d := (retry.Fixed{Base: base, Jitter: j}).Delay(n); d < lowest(base) || d > base {
			t.Fatalf("fixed: %v, want in [%v, %v]", d, lowest(base), base)
		}
		if d := (retry.Random{Min: base, Max: limit}).Delay(n); d < min(base, limit) || d > limit {
			t.Fatalf("random: %v, want in [%v, %v]", d, min(base, limit), limit)
		}
	})
}

func TestDelaysNeverShrinkWithMoreFailures(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := retry.Exponential{Base: anyDuration().Draw(t, "base"), Max: anyDuration().Draw(t, "max")}
		n := rapid.IntRange(1, math.MaxInt-1).Draw(t, "n")
		if a, b := p.Delay(n), p.Delay(n+1); b < a {
			t.Fatalf("after %d failures %v, after one more %v", n, a, b)
		}
	})
}

func TestSettingsOutOfRangeStillGiveABoundedDelay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := anyCount().Draw(t, "n")
		base, limit := time.Duration(rapid.Int64().Draw(t, "base")), time.Duration(rapid.Int64().Draw(t, "max"))
		j := rapid.OneOf(rapid.Float64(), rapid.Just(math.NaN()), rapid.Just(math.Inf(1)), rapid.Just(math.Inf(-1))).Draw(t, "jitter")
		for _, p := range []retry.Policy{
			retry.Exponential{Base: base, Max: limit, Jitter: j}, retry.Fixed{Base: base, Jitter: j},
			retry.Random{Min: base, Max: limit}, retry.PolicyFunc(func(int) time.Duration { return base }),
		} {
			if d := p.Delay(n); d < 0 {
				t.Fatalf("%T: %v", p, d)
			}
		}
		if d := retry.Jitter(base, j); d < 0 || d > max(0, base) {
			t.Fatalf("Jitter(%v, %v) = %v", base, j, d)
		}
	})
}

// Field case C-026: what fails together does not come back together.
func TestJitterSpreadsOverTheDocumentedShare(t *testing.T) {
	const tasks, tenths = 2000, 10
	p := retry.Exponential{Base: 10 * time.Second, Jitter: 0.2}
	lo, hi := 8*time.Second, 10*time.Second
	var histogram [tenths]int
	for range tasks {
		d := p.Delay(1)
		if d < lo || d > hi {
			t.Fatalf("delay %v, want in [%v, %v]", d, lo, hi)
		}
		histogram[min(tenths-1, int((d-lo)*tenths/(hi-lo)))]++
	}
	for i, got := range histogram {
		// 200 in each tenth, a standard deviation of 13: 100 is more than seven of them away.
		if got < tasks/tenths/2 {
			t.Errorf("only %d of %d delays in tenth %d: %v", got, tasks, i, histogram)
		}
	}
}

func TestPolicyFuncIsAskedFromOneOnward(t *testing.T) {
	p := retry.PolicyFunc(func(n int) time.Duration { return time.Duration(n) * 30 * time.Second })
	for n, want := range map[int]time.Duration{-7: 30 * time.Second, 0: 30 * time.Second, 1: 30 * time.Second, 4: 2 * time.Minute} {
		if got := p.Delay(n); got != want {
			t.Errorf("after %d failures: %v, want %v", n, got, want)
		}
	}
}

func TestFromBackOff(t *testing.T) {
	doubling := func() backoff.BackOff {
		return backoff.NewExponentialBackOff(backoff.WithInitialInterval(time.Second), backoff.WithMultiplier(2),
			backoff.WithRandomizationFactor(0), backoff.WithMaxInterval(10*time.Second))
	}
	for _, c := range []struct {
		name string
		new  func() backoff.BackOff
		want map[int]time.Duration
	}{
		{"exponential", doubling, map[int]time.Duration{
			0: time.Second, 1: time.Second, 2: 2 * time.Second, 4: 8 * time.Second, 5: 10 * time.Second, math.MaxInt: 10 * time.Second}},
		{"stop keeps the last delay", func() backoff.BackOff { return backoff.WithMaxRetries(doubling(), 3) }, map[int]time.Duration{
			1: time.Second, 3: 4 * time.Second, 4: 4 * time.Second, 900: 4 * time.Second}},
		{"stop at once", func() backoff.BackOff { return &backoff.StopBackOff{} }, map[int]time.Duration{
			1: 5 * time.Second, 2: 10 * time.Second, math.MaxInt: time.Hour}},
		{"constant", func() backoff.BackOff { return backoff.NewConstantBackOff(time.Minute) }, map[int]time.Duration{
			1: time.Minute, 1000: time.Minute}},
		// backoff/v4 gives up when the next delay would end after 15 minutes: a policy never does.
		{"elapsed time", func() backoff.BackOff {
			return backoff.NewExponentialBackOff(backoff.WithInitialInterval(10*time.Minute), backoff.WithMultiplier(2),
				backoff.WithRandomizationFactor(0), backoff.WithMaxInterval(time.Hour))
		}, map[int]time.Duration{1: 10 * time.Minute, 2: 10 * time.Minute, 50: 10 * time.Minute}},
	} {
		p := retry.FromBackOff(c.new)
		for n, want := range c.want {
			if got := p.Delay(n); got != want {
				t.Errorf("%s, after %d failures: %v, want %v", c.name, n, got, want)
			}
		}
	}
}

// Field case C-018: backoff/v4 adds its random part after the cap.
func TestFromBackOffKeepsTheMaximum(t *testing.T) {
	p := retry.FromBackOff(func() backoff.BackOff {
		return backoff.NewExponentialBackOff(backoff.WithMaxInterval(time.Minute), backoff.WithMaxElapsedTime(0))
	})
	for n := range 300 {
		if d := p.Delay(n); d < 0 || d > time.Minute {
			t.Fatalf("after %d failures: %v", n, d)
		}
	}
}
