package outbox

import "testing"

// The low mark stops before what the next look must come back for, and stays there.
func TestLowMarkStopsBeforeWhatWillBeDue(t *testing.T) {
	id := func(n int64) *int64 { return &n }
	for name, tt := range map[string]struct {
		table       int
		young, open *int64
		want        int64
		marked      bool
	}{
		"all passed":   {0, nil, nil, 100, false},
		"young":        {0, id(40), nil, 39, true},
		"unfinished":   {0, nil, id(30), 29, true},
		"both":         {0, id(40), id(30), 29, true},
		"both, turned": {0, id(20), id(30), 19, true},
		"attempts":     {1, nil, nil, 99, false}, // a page may end within a task's attempts
		"last attempt": {1, id(100), nil, 99, true},
	} {
		s := sweeper{table: tt.table}
		s.mark(100, tt.young, tt.open)
		if got := s.low[tt.table]; got != tt.want || s.marked != tt.marked {
			t.Errorf("%s: got %d, %v; want %d, %v", name, got, s.marked, tt.want, tt.marked)
		}
		if s.mark(200, nil, nil); tt.marked && s.low[tt.table] != tt.want {
			t.Errorf("%s: the next page moved it to %d", name, s.low[tt.table])
		}
	}
}

// An error ends a full pass in the midst of it: it goes on there, with the mark it had found. A usual pass, and one after
// another relay's, begin at what the table says.
func TestFullPassGoesOnWhereAnErrorCutItOff(t *testing.T) {
	young := int64(500)
	cut := func() *sweeper {
		s := &sweeper{}
		s.start([3]int64{1000, 1000, 1000}, true)
		if s.key != 0 {
			t.Fatalf("a full pass begins at %d", s.key)
		}
		s.mark(800, &young, nil)
		s.key = 800
		return s
	}
	s := cut()
	s.start([3]int64{1000, 2000, 2000}, true)
	if s.key != 800 || s.low != [3]int64{499, 2000, 2000} || !s.marked {
		t.Errorf("after an error: key %d, low marks %v, %v", s.key, s.low, s.marked)
	}
	s = cut()
	s.start([3]int64{900, 900, 900}, false) // another relay has come to the end of its own
	if s.key != 900 || s.low[0] != 900 || s.marked {
		t.Errorf("after another relay's full pass: key %d, low marks %v, %v", s.key, s.low, s.marked)
	}
	s = cut()
	s.midway = false // this one, or another relay meanwhile
	s.start([3]int64{900, 900, 900}, true)
	if s.key != 0 || s.low[0] != 900 || s.marked {
		t.Errorf("the next full pass: key %d, low marks %v, %v", s.key, s.low, s.marked)
	}
}
