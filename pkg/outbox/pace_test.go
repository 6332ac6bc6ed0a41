package outbox

import (
	"testing"
	"time"
)

func TestPaceGoesByTheQuickestOfTheLastPolls(t *testing.T) {
	var p pace
	if got := p.cost(); got != 0 {
		t.Errorf("before the first poll: got %v, want 0", got)
	}
	p.note(2 * time.Millisecond)
	p.note(80 * time.Millisecond)
	if got, want := p.cost(), 2*time.Millisecond; got != want {
		t.Errorf("after one slow poll: got %v, want %v", got, want)
	}
	for range 8 {
		p.note(80 * time.Millisecond)
	}
	if got, want := p.cost(), 80*time.Millisecond; got != want {
		t.Errorf("when all are slow: got %v, want %v", got, want)
	}
	for range 8 {
		p.note(time.Minute)
	}
	if got, want := p.cost(), 250*time.Millisecond; got != want {
		t.Errorf("bound: got %v, want %v", got, want)
	}
}
