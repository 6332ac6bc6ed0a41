package cli

import (
	"strings"
	"testing"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// What was not counted to its end is not shown as if it had been.
func TestCountsThatAreNotAll(t *testing.T) {
	n := func(n int64) *int64 { return &n }
	for _, tt := range []struct {
		bulk outbox.Bulk
		want string
		not  string
	}{
		{outbox.Bulk{Expected: n(200), Done: 50, Passed: 0.25, Rate: 50}, ": 50 of 200 (25 %), 0 changed, 3s left", "least"},
		{outbox.Bulk{Expected: n(200), AtLeast: true, Done: 50, Passed: 0.25, Rate: 50}, ": 50 of at least 200 (25 %)", "left"},
		{outbox.Bulk{Expected: n(200), AtLeast: true, Done: 300, Passed: 0.99, Rate: 50}, ": 300 of at least 300 (99 %)", "left"},
		{outbox.Bulk{Done: 50, Passed: 0.5, Rate: 50}, ": 50 (50 %)", "of"},
	} {
		if got := bulkProgress(tt.bulk); !strings.Contains(got, tt.want) || strings.Contains(got, tt.not) {
			t.Errorf("got %q; want %q, and not %q", got, tt.want, tt.not)
		}
	}
	for want, p := range map[string]outbox.BulkPreview{
		"1 task": {Found: 1}, "2 tasks": {Found: 2}, "1 or more tasks": {Found: 1, More: true}, "none while it counted": {More: true}, "0 tasks": {},
	} {
		if got := taskCount(p); !strings.Contains(got, want) {
			t.Errorf("%+v: got %q, want %q", p, got, want)
		}
	}
}
