package delay

import (
	"testing"
	"time"
)

func TestDelaysDoubleUpToTheCap(t *testing.T) {
	t.Parallel()
	p := Policy{Initial: time.Second, Max: time.Minute}
	for _, tt := range []struct {
		attempt int
		want    time.Duration
	}{
		{-1, time.Second},
		{0, time.Second},
		{1, time.Second},
		{2, 2 * time.Second},
		{3, 4 * time.Second},
		{6, 32 * time.Second},
		{7, time.Minute},
		{8, time.Minute},
		{1 << 30, time.Minute},
	} {
		for range 100 {
			got := p.After(tt.attempt)
			if got < tt.want*9/10 || got > tt.want*11/10 || got > p.Max {
				t.Fatalf("After(%d) = %v, want %v within a tenth and at most %v", tt.attempt, got, tt.want, p.Max)
			}
		}
	}
}
