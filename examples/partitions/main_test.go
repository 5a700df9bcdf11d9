package main

import (
	"bytes"
	"testing"
)

// All partitions are used, and the order of each customer holds, also when one
// instance stops and the other takes over.
func TestPartitionsKeepTheOrderOfEachCustomer(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), t.TempDir(), &out); err != nil {
		t.Fatal(err)
	}
	want := "10 customers in 3 partitions, each with 6 orders in their order\n"
	if got := out.String(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
