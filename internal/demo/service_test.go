package demo

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/pkg/retry"
)

func TestServiceBooksOncePerKey(t *testing.T) {
	s, err := startService("wallet", func(c call) verdict {
		if c.Nth == 0 {
			return verdict{status: http.StatusBadGateway, book: true, text: "lost"}
		}
		return booked
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.stop()
	if _, err := s.ask(t.Context(), "refund", "k", order{"R-1", "Ada", 250}); err == nil || err.Error() != "wallet answered 502: lost" {
		t.Errorf("first call: got %v", err)
	}
	for range 2 {
		if ref, err := s.ask(t.Context(), "refund", "k", order{"R-1", "Ada", 250}); err != nil || ref != "wallet-00001" {
			t.Errorf("got %q, %v", ref, err)
		}
	}
	if n, cents := s.total("refund"); n != 1 || cents != 250 || s.seen("k") != 3 {
		t.Errorf("booked %d times, %d cents in %d calls; want once, 250, 3", n, cents, s.seen("k"))
	}
}

func TestServiceThatHangsLetsGoWhenTheCallerGivesUp(t *testing.T) {
	s, err := startService("transfer", func(call) verdict { return verdict{book: true} })
	if err != nil {
		t.Fatal(err)
	}
	defer s.stop()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := s.ask(ctx, "refund", "k", order{"R-1", "Ada", 1}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the deadline", err)
	}
	if n, _ := s.total("refund"); n != 1 {
		t.Errorf("booked %d times, want once", n)
	}
}

func TestScriptCanBeRepeated(t *testing.T) {
	a, b, c := &world{seed: 1}, &world{seed: 1}, &world{seed: 2}
	failed, differ := 0, 0
	for i := range 1000 {
		call := call{Operation: "refund", Nth: i % 5, order: order{Ref: "R-" + string(rune('A'+i%26)) + string(rune('A'+i/26))}}
		if a.walletScript(call) != b.walletScript(call) {
			t.Fatal("the same seed gave another verdict")
		}
		if a.walletScript(call) != c.walletScript(call) {
			differ++
		}
		if a.walletScript(call).status >= 300 {
			failed++
		}
	}
	if failed < 330 || failed > 470 {
		t.Errorf("%d of 1000 calls failed, want about 400", failed)
	}
	if differ == 0 {
		t.Error("another seed gave the same verdicts")
	}
}

func TestFinalAnswersArePermanent(t *testing.T) {
	for status, want := range map[int]bool{422: true, 409: true, 500: false, 503: false} {
		if got := retry.IsPermanent(classify(&statusError{status: status})); got != want {
			t.Errorf("%d: permanent is %v, want %v", status, got, want)
		}
	}
	if retry.IsPermanent(classify(errors.New("connection refused"))) {
		t.Error("a transport error is permanent")
	}
}
