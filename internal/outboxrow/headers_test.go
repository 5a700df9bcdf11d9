package outboxrow

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"testing"
)

func TestHeadersColumnIsReadAsItStands(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		text string
		want map[string][]string
	}{
		{``, nil},
		{`{}`, nil},
		{` { } `, map[string][]string{}},
		{`{"a":"1"}`, map[string][]string{"a": {"1"}}},
		{`{"a":""}`, map[string][]string{"a": {""}}},
		{`{"a":[]}`, map[string][]string{"a": {}}},
		{`{"a":["1","2","1"],"A":"3"}`, map[string][]string{"a": {"1", "2", "1"}, "A": {"3"}}},
		{"\n{\"a\" :\t\"1\"}\n", map[string][]string{"a": {"1"}}},
		{`{"a":"\u00e9\ud83d\ude00\\ud800\ufffd"}`, map[string][]string{"a": {"é😀\\ud800\ufffd"}}},
		{`{"\u0061":"1"}`, map[string][]string{"a": {"1"}}},
	} {
		got, err := ParseHeaders(tt.text)
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("ParseHeaders(%s) = %v, %v, want %v", tt.text, got, err, tt.want)
		}
	}
}

func TestHeadersColumnThatLosesSomethingIsRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		` `, `[]`, `"a"`, `1`, `null`, `true`, `{`, `{"a"`, `{"a":`, `{"a":"1"`, `{"a":"1",}`, `{,}`, `{"a" "1"}`, `{a:"1"}`, `{'a':'1'}`,
		`{}}`, `{}]`, `{} {}`, `{} x`, `{"a":"1"}}`, `{"a":"1"}]`, `{"a":"1"} null`, `{"a":"1"},`,
		`{"a":1}`, `{"a":null}`, `{"a":true}`, `{"a":{}}`, `{"a":{"b":"c"}}`, `{"a":[1]}`, `{"a":[null]}`, `{"a":["1",null]}`, `{"a":[["1"]]}`,
		`{"a":"1","a":"2"}`, `{"a":"1","\u0061":"1"}`,
		`{"a":"\ud800"}`, `{"a":"\udc00\ud800"}`, `{"a":"\ud800\ud800"}`, `{"a":"\ud800x"}`, `{"a":["1","\udfff"]}`, `{"\ud800":"1"}`,
		`{"a":"\\ufffd\ud800"}`, `{"a":"\\\ud800"}`, `{"a":"\ud800\\udc00"}`, "{\"a\":\"\ufffd\\ud800\"}",
		"{\"a\":\"\xff\"}", "{\"\xff\":\"1\"}", "{\"a\":\"1\n2\"}", "\ufeff{}",
	} {
		if got, err := ParseHeaders(text); err == nil {
			t.Errorf("ParseHeaders(%s) = %q, want an error", text, got)
		}
	}
}

// What is accepted is kept: written again and read again it is the same.
func FuzzParseHeaders(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"a":"1"}`, `{"a":["1","2"],"b":""}`, `{"a":"\ud83d\ude00"}`, `{"a":"\\ufffd\ud800"}`, `{"a":[]}`, `{}}`, `{"":"\\\\u"}`, `{"a":"<>&"}`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := ParseHeaders(text)
		if err != nil {
			return
		}
		var plain map[string]any
		if text != "" {
			if err := json.Unmarshal([]byte(text), &plain); err != nil {
				t.Fatalf("ParseHeaders(%q) = %q, but it is no JSON object: %v", text, got, err)
			}
		}
		if names := slices.Sorted(maps.Keys(plain)); !slices.Equal(names, slices.Sorted(maps.Keys(got))) {
			t.Fatalf("ParseHeaders(%q) has the names %q, want %q", text, slices.Sorted(maps.Keys(got)), names)
		}
		for name, values := range got {
			want := []any{plain[name]}
			if many, ok := plain[name].([]any); ok {
				want = many
			}
			if len(want) != len(values) {
				t.Fatalf("ParseHeaders(%q)[%q] = %q, want %q", text, name, values, want)
			}
			for i := range want {
				if want[i] != any(values[i]) {
					t.Fatalf("ParseHeaders(%q)[%q] = %q, want %q", text, name, values, want)
				}
			}
		}
		b, err := json.Marshal(got)
		if err != nil {
			t.Fatalf("marshal %q: %v", got, err)
		}
		if len(got) == 0 {
			return // Append writes {} for none
		}
		again, err := ParseHeaders(string(b))
		if err != nil || !reflect.DeepEqual(again, got) {
			t.Fatalf("ParseHeaders(%s) = %q, %v, want %q", b, again, err, got)
		}
	})
}
