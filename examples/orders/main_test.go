package main

import (
	"bytes"
	"path/filepath"
	"testing"
)

// The example runs, and a second run goes on where the first one stopped: nothing
// is counted twice.
func TestTotalsFollowTheOrders(t *testing.T) {
	dir := t.TempDir()
	for _, want := range []string{
		"ada: 2 orders, 20.00\ngrace: 1 orders, 5.00\n",
		"ada: 4 orders, 40.00\ngrace: 2 orders, 10.00\n",
	} {
		var out bytes.Buffer
		if err := run(t.Context(), filepath.Join(dir, "data"), &out); err != nil {
			t.Fatal(err)
		}
		if got := out.String(); got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
}
