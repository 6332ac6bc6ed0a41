package retry_test

import (
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

func ExampleExponential() {
	p := retry.Exponential{Base: 5 * time.Second, Max: time.Minute}
	for n := 1; n <= 5; n++ {
		fmt.Println(p.Delay(n))
	}
	// Output:
	// 5s
	// 10s
	// 20s
	// 40s
	// 1m0s
}

// A policy of your own: attempt × 30 s, as some banks ask for.
func ExamplePolicyFunc() {
	p := retry.PolicyFunc(func(n int) time.Duration {
		return time.Duration(n) * 30 * time.Second
	})
	fmt.Println(p.Delay(1), p.Delay(2), p.Delay(3))
	// Output: 30s 1m0s 1m30s
}

func ExampleFromBackOff() {
	p := retry.FromBackOff(func() backoff.BackOff {
		return backoff.NewExponentialBackOff(
			backoff.WithInitialInterval(time.Second),
			backoff.WithMultiplier(3),
			backoff.WithRandomizationFactor(0),
			backoff.WithMaxInterval(time.Minute),
			backoff.WithMaxElapsedTime(0),
		)
	})
	fmt.Println(p.Delay(1), p.Delay(2), p.Delay(3), p.Delay(9))
	// Output: 1s 3s 9s 1m0s
}

func ExampleParse() {
	_, err := retry.Parse("quadratic", 5*time.Second, time.Hour, 0.2)
	fmt.Println("TASKRELAY_BIZ_ORDER_PAYMENT_" + err.Error())
	// Output: TASKRELAY_BIZ_ORDER_PAYMENT_STRATEGY "quadratic": want one of fixed, exponential, random
}

func ExamplePermanent() {
	errClosed := errors.New("account closed")
	err := fmt.Errorf("credit account 7: %w", retry.Permanent(errClosed))
	fmt.Println(err, retry.IsPermanent(err), errors.Is(err, errClosed))
	// Output: credit account 7: account closed true true
}

func ExampleAfter() {
	err := retry.After(7*time.Second, errors.New("bank answered 429"))
	d, ok := retry.AfterDelay(err)
	fmt.Println(err, d, ok)
	// Output: bank answered 429 7s true
}
