package demo

import (
	"encoding/binary"
	"hash/fnv"
	"net/http"
	"sync/atomic"
)

// Customers whose tasks go wrong, each in its own way.
const (
	closedCard = "Ken (card closed)"   // a refund to his card is refused for good
	frozen     = "Ida (frozen)"        // her account can be neither opened nor cancelled
	withdrawn  = "Lou (changed mind)"  // does not want the account any more
	noItems    = "Zoe (order of none)" // meets a bug in the handler
)

// world is everyone the business talks to.
type world struct {
	gateway, card, wallet, transfer, bank *service

	seed     uint64
	bankDown atomic.Bool
}

func startWorld(seed uint64) (*world, error) {
	w := &world{seed: seed}
	for _, s := range []struct {
		to     **service
		name   string
		script func(call) verdict
	}{
		{&w.gateway, "gateway", w.gatewayScript},
		{&w.card, "card", w.cardScript},
		{&w.wallet, "wallet", w.walletScript},
		{&w.transfer, "transfer", w.transferScript},
		{&w.bank, "bank", w.bankScript},
	} {
		var err error
		if *s.to, err = startService(s.name, s.script); err != nil {
			w.stop()
			return nil, err
		}
	}
	return w, nil
}

func (w *world) stop() {
	for _, s := range w.services() {
		if s != nil {
			s.stop()
		}
	}
}

func (w *world) services() []*service {
	return []*service{w.gateway, w.card, w.wallet, w.transfer, w.bank}
}

// roll is the script's dice: a number in [0, 1) that depends on the call alone, so that a run can be repeated.
func (w *world) roll(c call) float64 {
	h := fnv.New64a()
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], w.seed)
	binary.LittleEndian.PutUint64(b[8:], uint64(c.Nth))
	h.Write(b[:])
	h.Write([]byte(c.Operation + c.Ref))
	x := h.Sum64()
	// FNV mixes the last bytes badly into the high bits; one multiply and shift mends that.
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	return float64(x>>11) / (1 << 53)
}

// The gateway hardly ever fails.
func (w *world) gatewayScript(c call) verdict {
	if c.Nth == 0 && w.roll(c) < 0.03 {
		return verdict{status: http.StatusServiceUnavailable, text: "too busy"}
	}
	return booked
}

// The card network is quick to say a final no.
func (w *world) cardScript(c call) verdict {
	if c.Customer == closedCard {
		return verdict{status: http.StatusUnprocessableEntity, text: "the card is closed"}
	}
	return booked
}

// The wallet is flaky: two calls in five fail, some of them after the money has moved.
func (w *world) walletScript(c call) verdict {
	switch x := w.roll(c); {
	case c.Nth >= 6 || x >= 0.4:
		return booked
	case x < 0.1:
		return verdict{status: http.StatusBadGateway, book: true, text: "the answer was lost on the way"}
	default:
		return verdict{status: http.StatusServiceUnavailable, text: "wallet is overloaded"}
	}
}

// A bank transfer sometimes hangs: the money has moved, and no answer comes.
func (w *world) transferScript(c call) verdict {
	if c.Nth == 0 && w.roll(c) < 0.25 {
		return verdict{status: 0, book: true}
	}
	return booked
}

// The bank is down for a while, and then half of what it refuses is in its books all the same.
func (w *world) bankScript(c call) verdict {
	switch {
	case c.Customer == frozen && c.Operation == "cancel":
		return verdict{status: http.StatusConflict, text: "the account is frozen, call the branch"}
	case c.Customer == frozen:
		return verdict{status: http.StatusInternalServerError, book: true, text: "core banking failed"}
	case c.Customer == withdrawn:
		return verdict{status: http.StatusGone, text: "the customer withdrew"}
	case w.bankDown.Load():
		return verdict{status: http.StatusServiceUnavailable, book: c.Operation == "open" && w.roll(c) < 0.5, text: "the bank is down"}
	default:
		return booked
	}
}
