package outbox_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

var now = time.Date(2026, 11, 29, 14, 1, 57, 987_654_321, time.FixedZone("x", 3600))

func TestPrepareFillsEmptyFieldsAndLeavesTheKey(t *testing.T) {
	t.Parallel()
	given := jetbox.Event{
		ID: "id", Key: "key", Subject: "s", Type: "t", ContentType: "text/plain",
		Time: time.Date(2020, 1, 2, 3, 4, 5, 6_999_999, time.UTC), Payload: []byte("p"),
	}
	bare, full := &jetbox.Event{Subject: "s"}, new(given)
	if err := outbox.Prepare(now, []*jetbox.Event{bare, full}); err != nil {
		t.Fatal(err)
	}
	if bare.ID == "" || bare.Key != "" || bare.Type != "s" || bare.ContentType != jetbox.DefaultContentType ||
		bare.Time != time.Date(2026, 11, 29, 13, 1, 57, 987_000_000, time.UTC) {
		t.Errorf("bare event = %+v, want defaults, whole milliseconds in UTC, and no key", *bare)
	}
	given.Time = given.Time.Truncate(time.Millisecond)
	if !reflect.DeepEqual(*full, given) {
		t.Errorf("full event = %+v, want %+v", *full, given)
	}
}

func TestPrepareNamesTheFirstBadEventAndChangesNone(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		events []*jetbox.Event
		want   string
	}{
		{"first", []*jetbox.Event{{}, {Subject: "s"}}, "append event 1 of 2: "},
		{"last", []*jetbox.Event{{Subject: "s"}, {Subject: "s"}, {Subject: ">"}}, "append event 3 of 3: "},
		{"two", []*jetbox.Event{{Subject: "s"}, {Subject: "a b"}, {Subject: "*"}}, "append event 2 of 3: "},
		{"nil", []*jetbox.Event{{Subject: "s"}, nil}, "append event 2 of 2: "},
	} {
		err := outbox.Prepare(now, tt.events)
		if !errors.Is(err, jetbox.ErrInvalidEvent) || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%s: %v, want ErrInvalidEvent that starts with %q", tt.name, err, tt.want)
		}
		for _, ev := range tt.events {
			if ev != nil && (ev.ID != "" || ev.Type != "" || !ev.Time.IsZero()) {
				t.Errorf("%s: %+v was changed", tt.name, *ev)
			}
		}
	}
}

func TestPrepareOfNothingIsFine(t *testing.T) {
	t.Parallel()
	if err := outbox.Prepare(now, nil); err != nil {
		t.Error(err)
	}
}
