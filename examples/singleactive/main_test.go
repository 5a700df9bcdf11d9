package main

import (
	"bytes"
	"testing"
)

// The order of each customer holds across the takeover.
func TestSecondInstanceTakesOverInOrder(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), t.TempDir(), &out); err != nil {
		t.Fatal(err)
	}
	want := "the second instance took over\n" +
		"ada: 8 orders, in their order\n" +
		"grace: 8 orders, in their order\n" +
		"mary: 8 orders, in their order\n"
	if got := out.String(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
