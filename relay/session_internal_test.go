package relay

import (
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// A lease is renewed well before its end, and beside others often enough that a
// shard one of them leaves is not without a relay for long.
func TestLeaseIsRenewedMoreOftenBesideOthers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		lease time.Duration
		peers int
		want  time.Duration
	}{
		{9 * time.Second, 0, 3 * time.Second},
		{10 * time.Second, 1, time.Second},
		{10 * time.Second, 7, time.Second},
		{600 * time.Millisecond, 1, 100 * time.Millisecond},
		{150 * time.Millisecond, 1, 50 * time.Millisecond},
		{150 * time.Millisecond, 0, 50 * time.Millisecond},
	} {
		s := &session{Relay: &Relay{cfg: Config{Lease: tt.lease}}}
		if got := s.renewEvery(jetbox.Lease{Peers: tt.peers}); got != tt.want {
			t.Errorf("lease of %v with %d peers is renewed every %v, want %v", tt.lease, tt.peers, got, tt.want)
		}
	}
}
