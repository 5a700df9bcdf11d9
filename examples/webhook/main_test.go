package main

import (
	"bytes"
	"path/filepath"
	"testing"
)

// Two of three requests for each event fail, one of them after its effect: every
// event is received once all the same.
func TestEveryEventIsReceivedOnce(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), filepath.Join(t.TempDir(), "data"), &out); err != nil {
		t.Fatal(err)
	}
	if want := "5 events, 15 requests, 5 received, 5 different\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}
