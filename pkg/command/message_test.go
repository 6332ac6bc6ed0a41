package command

import (
	"testing"

	"github.com/nats-io/nats.go"
)

func TestDeliverySequenceOfAckSubjects(t *testing.T) {
	for reply, want := range map[string]uint64{
		"$JS.ACK.TASKS.ORDER_PAYMENT-low.1.17.42.1700000000000000000.5":               42,
		"$JS.ACK.hub.AccHash.TASKS.ORDER_PAYMENT-low.1.17.42.1700000000000000000.5":   42,
		"$JS.ACK._.AccHash.TASKS.ORDER_PAYMENT-low.1.17.42.1700000000000000000.5.tok": 42,
		"$JS.ACK.TASKS.ORDER_PAYMENT-low.1.17.x.1700000000000000000.5":                0,
		"$JS.ACK.TASKS": 0,
		"":              0,
	} {
		if got := deliverySequence(reply); got != want {
			t.Errorf("%s: got %d, want %d", reply, got, want)
		}
	}
}

// Deliveries that are counted from the start again mean another consumer under the same name.
func TestConsumerMadeAnewIsNoticedByItsDeliveries(t *testing.T) {
	l := &lane{d: &dispatcher{}, kicks: make(chan struct{}, 1)}
	for _, n := range []string{"5", "6", "9"} {
		l.noteDelivery("$JS.ACK.TASKS.A-low.1.1." + n + ".1.0")
	}
	if l.problem != nil {
		t.Fatalf("deliveries in order: got %v", l.problem)
	}
	l.noteDelivery("$JS.ACK.TASKS.A-low.1.1.1.1.0")
	if l.problem != errLimitChanged {
		t.Errorf("deliveries from the start: got %v, want the consumer to be looked up", l.problem)
	}
}

func TestLargePayloadsAreNotFetchedFarAhead(t *testing.T) {
	d := &dispatcher{slots: 50, mean: 1}
	for range 100 {
		d.noteSize(&nats.Msg{Data: make([]byte, 200)})
	}
	if got := d.allowance(); got != 50+maxPrefetch {
		t.Errorf("small ones: got %d, want %d", got, 50+maxPrefetch)
	}
	for range 100 {
		d.noteSize(&nats.Msg{Data: make([]byte, 512<<10)})
	}
	if got := d.allowance(); got < 50 || got > 50+2*prefetchBytes/(512<<10) {
		t.Errorf("large ones: got %d, want about %d", got, 50+prefetchBytes/(512<<10))
	}
}
