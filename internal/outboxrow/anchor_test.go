package outboxrow

import (
	"reflect"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// Of each stream, and of each that had its name, the highest sequence is the last one;
// what is not to be remembered is left out. Streams come in the order of their names.
func TestLastIsTheHighestOfEachStream(t *testing.T) {
	t.Parallel()
	born := time.Unix(1, 1)
	on := func(stream string, created time.Time, seq uint64) jetbox.Outcome {
		return jetbox.Outcome{State: jetbox.Published, Stream: stream, Created: created, StreamSeq: seq}
	}
	parked := on("A", born, 99)
	parked.State = jetbox.DeadLetter
	got := Last([]jetbox.Outcome{
		on("A", born, 5), on("B", born, 50), on("A", born, 7), on("A", born, 6), parked, on("A", time.Time{}, 100),
		on("A", born.Add(1), 3), on("C", born, 0),
	})
	want := []jetbox.Outcome{on("A", born, 7), on("A", born.Add(1), 3), on("B", born, 50)}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("Last = %+v, want %+v", got, want)
	}
}

// Two streams that were created a nanosecond apart are two.
func TestCreationIsKeptToTheNanosecond(t *testing.T) {
	t.Parallel()
	for _, want := range []time.Time{time.Unix(1, 1).UTC(), time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 3600))} {
		if got, err := ParseCreated(FormatCreated(want)); err != nil || !got.Equal(want) {
			t.Errorf("created at %v, read back %v, %v", want, got, err)
		}
	}
	if _, err := ParseCreated("yesterday"); err == nil {
		t.Error("ParseCreated took nonsense")
	}
}
