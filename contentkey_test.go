package jetbox_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

func ExampleContentKey() {
	// Two programs write the same order, each in its own way.
	first, err := jetbox.ContentKey([]byte(`{"id": 42, "total": 9.50}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	second, err := jetbox.ContentKey([]byte(`{"total":9.5,"id":42}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(first == second)

	// The key covers the payload only. The prefix keeps the order's other
	// events apart from this one.
	fmt.Println("order-created:" + first)

	_, err = jetbox.ContentKey([]byte(`{"id":9007199254740993}`))
	fmt.Println(errors.Is(err, jetbox.ErrNoCanonicalForm))
	fmt.Println(err)
	// Output:
	// true
	// order-created:1d665bdc34dc2b8ede99ab45cb296d10a0fb6ebda57c18b864c78e16cdc71763
	// true
	// derive content key: payload has no canonical JSON form: number 9007199254740993 at offset 6 would become 9007199254740992, send it as a string
}

func contentKey(t *testing.T, payload string) string {
	t.Helper()
	key, err := jetbox.ContentKey([]byte(payload))
	if err != nil {
		t.Fatalf("ContentKey(%q): %v", clip(payload), err)
	}
	return key
}

// clip keeps a failure readable when its payload is megabytes.
func clip(payload string) string {
	if len(payload) > 200 {
		return payload[:200] + "..."
	}
	return payload
}

// The key is part of what users store: it must be the same in every version.
// The hashes come from sha256sum, not from this package.
func TestContentKeyIsStable(t *testing.T) {
	t.Parallel()
	tests := []struct{ payload, wantKey string }{
		{`{}`, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"},
		{`null`, "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"},
		{` { "b" : [ 1.0, "\u00e9" ], "a" : -0 } `, "6a059a0fd139a758c00b61f78527f4ba4ea50e3d13d72527b7ff1d5f3795086d"},
	}
	for _, tt := range tests {
		if got := contentKey(t, tt.payload); got != tt.wantKey {
			t.Errorf("ContentKey(%q) = %s, want %s", tt.payload, got, tt.wantKey)
		}
	}
}

// The canonical form is that of RFC 8785: the sample of section 3.2.2, the
// sorting sample of section 3.2.3, and what the catalog adds to them.
func TestContentKeyHashesTheCanonicalForm(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, payload, wantForm string }{
		{
			name: "RFC 8785 section 3.2.2, its first number as a double prints",
			payload: `{
				"numbers": [333333333.3333333, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
				"string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
				"literals": [null, true, false]
			}`,
			wantForm: `{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],` +
				`"string":"€$\u000f\nA'B\"\\\\\"/"}`,
		},
		{
			name: "RFC 8785 section 3.2.3, keys sorted by UTF-16 code unit",
			payload: `{
				"\u20ac": "Euro Sign",
				"\r": "Carriage Return",
				"\ufb33": "Hebrew Letter Dalet With Dagesh",
				"1": "One",
				"\ud83d\ude00": "Emoji: Grinning Face",
				"\u0080": "Control",
				"\u00f6": "Latin Small Letter O With Diaeresis"
			}`,
			wantForm: `{"\r":"Carriage Return","1":"One","` + "\u0080" + `":"Control",` +
				`"ö":"Latin Small Letter O With Diaeresis","€":"Euro Sign",` +
				`"😀":"Emoji: Grinning Face","` + "\ufb33" + `":"Hebrew Letter Dalet With Dagesh"}`,
		},
		{name: "array order is content", payload: `[3, 1, 2]`, wantForm: `[3,1,2]`},
		{name: "keys sorted at every level", payload: `{"b":{"d":1,"c":[{"f":1,"e":2}]},"a":{}}`, wantForm: `{"a":{},"b":{"c":[{"e":2,"f":1}],"d":1}}`},
		{name: "a key before its extension", payload: `{"aa":1,"a":2,"":3}`, wantForm: `{"":3,"a":2,"aa":1}`},
		{name: "HTML is not escaped", payload: `"<a href>&"`, wantForm: `"<a href>&"`},
		{name: "line separators are raw", payload: `"\u2028\u2029"`, wantForm: "\"\u2028\u2029\""},
		{name: "DEL is raw", payload: `"\u007f"`, wantForm: "\"\x7f\""},
		{name: "every control character", payload: `"\u0000\u0008\u0009\u000a\u000b\u000c\u000d\u001f"`, wantForm: `"\u0000\b\t\n\u000b\f\r\u001f"`},
		{name: "noncharacters are kept", payload: `"\uffff\ufdd0"`, wantForm: "\"\uffff\ufdd0\""},
		{name: "replacement character is kept", payload: `"\ufffd"`, wantForm: "\"\ufffd\""},
		{name: "empty object", payload: ` { } `, wantForm: `{}`},
		{name: "empty array", payload: ` [ ] `, wantForm: `[]`},
		{name: "top-level string", payload: "\t\"a\"\r\n", wantForm: `"a"`},
		{name: "top-level word", payload: ` true `, wantForm: `true`},
		{name: "top-level number", payload: ` -1.50E+2 `, wantForm: `-150`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			sum := sha256.Sum256([]byte(tt.wantForm))
			if got, want := contentKey(t, tt.payload), hex.EncodeToString(sum[:]); got != want {
				t.Errorf("ContentKey(%q) = %s, want %s, the hash of %q", tt.payload, got, want, tt.wantForm)
			}
		})
	}
}

// RFC 8785 Appendix B: the double on the left is written as on the right.
func TestContentKeyWritesNumbersAsAppendixB(t *testing.T) {
	t.Parallel()
	tests := []struct {
		bits uint64
		want string
	}{
		{0x0000000000000000, "0"},
		{0x8000000000000000, "0"},
		{0x0000000000000001, "5e-324"},
		{0x8000000000000001, "-5e-324"},
		{0x7fefffffffffffff, "1.7976931348623157e+308"},
		{0xffefffffffffffff, "-1.7976931348623157e+308"},
		{0x4340000000000000, "9007199254740992"},
		{0xc340000000000000, "-9007199254740992"},
		{0x4430000000000000, "295147905179352830000"},
		{0x44b52d02c7e14af5, "9.999999999999997e+22"},
		{0x44b52d02c7e14af6, "1e+23"},
		{0x44b52d02c7e14af7, "1.0000000000000001e+23"},
		{0x444b1ae4d6e2ef4e, "999999999999999700000"},
		{0x444b1ae4d6e2ef4f, "999999999999999900000"},
		{0x444b1ae4d6e2ef50, "1e+21"},
		{0x3eb0c6f7a0b5ed8c, "9.999999999999997e-7"},
		{0x3eb0c6f7a0b5ed8d, "0.000001"},
		{0x41b3de4355555553, "333333333.3333332"},
		{0x41b3de4355555554, "333333333.33333325"},
		{0x41b3de4355555555, "333333333.3333333"},
		{0x41b3de4355555556, "333333333.3333334"},
		{0x41b3de4355555557, "333333333.33333343"},
		{0xbecbf647612f3696, "-0.0000033333333333333333"},
		{0x43143ff3c1cb0959, "1424953923781206.2"},
	}
	for _, tt := range tests {
		sum := sha256.Sum256([]byte(tt.want))
		want := hex.EncodeToString(sum[:])
		f := math.Float64frombits(tt.bits)
		for _, format := range []byte{'e', 'f', 'g'} { // three spellings of one number
			payload := strconv.FormatFloat(f, format, -1, 64)
			if got := contentKey(t, payload); got != want {
				t.Errorf("ContentKey(%s) = %s, want %s, the hash of %s", payload, got, want, tt.want)
			}
		}
	}
}

// BR-64 and BR-65: what means the same has one key.
func TestSameContentHasOneKey(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name     string
		payloads []string
	}{
		{"one", []string{`1`, `1.0`, `1e0`, `1E+0`, `10e-1`, `0.1e1`, `1.000000000000000000000000000`, `1e-0`, `1e0000`}},
		{"zero", []string{`0`, `-0`, `0.0`, `-0.0`, `0e400`, `-0e-400`, `0e99999999999999999999999999`, `0.000e-99999999999999999999999999`}},
		{"2^53", []string{`9007199254740992`, `9007199254740992.0`, `9.007199254740992e15`, `9007199254740992000e-3`}},
		{"1e20", []string{`1e20`, `100000000000000000000`, `0.1E21`}},
		{"1e-7", []string{`1e-7`, `0.0000001`, `0.00000010`}},
		{"key order and white space", []string{`{"a":1,"b":[true,null]}`, "{\r\n\t\"b\" : [ true , null ] ,\n \"a\" : 1 }\n"}},
		{"nested key order", []string{`[{"x":{"p":1,"q":2}}]`, `[{"x":{"q":2,"p":1}}]`}},
		{"degree sign raw and escaped", []string{`"°"`, `"\u00b0"`, `"\u00B0"`}},
		{"line separator raw and escaped", []string{"\"\u2028\"", `"\u2028"`}},
		{"DEL raw and escaped", []string{"\"\x7f\"", `"\u007f"`, `"\u007F"`}},
		{"HTML raw and escaped", []string{`"<a href>&"`, `"\u003ca href\u003E\u0026"`}},
		{"slash raw and escaped", []string{`"a/b"`, `"a\/b"`, `"a\u002fb"`}},
		{"short and long escapes", []string{`"\b\f\n\r\t\"\\"`, `"\u0008\u000c\u000A\u000d\u0009\u0022\u005C"`}},
		{"astral raw and escaped", []string{`{"😀":1}`, `{"\ud83d\ude00":1}`, `{"\uD83D\uDE00":1}`}},
		{"keys beyond the BMP in any order", []string{`{"😀":1,"` + "\ufb33" + `":2}`, `{"\ufb33":2,"\ud83d\ude00":1}`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			want := contentKey(t, tt.payloads[0])
			for _, payload := range tt.payloads[1:] {
				if got := contentKey(t, payload); got != want {
					t.Errorf("ContentKey(%q) = %s, want %s as for %q", payload, got, want, tt.payloads[0])
				}
			}
		})
	}
}

// BR-64, BR-65 and BR-67: what differs in content differs in its key. All
// payloads are compared with all others.
func TestDifferentContentHasDifferentKeys(t *testing.T) {
	t.Parallel()
	payloads := []string{
		`9007199254740990`, `9007199254740991`, `9007199254740992`, `9007199254740994`,
		`1152921504606847000`, `0`, `1`, `-1`, `0.1`, `0.10000000000000002`, `5e-324`,
		`1.7976931348623157e308`, `1.7976931348623155e308`,
		`null`, `true`, `false`, `"null"`, `"true"`, `"1"`, `""`, `" "`, `{}`, `[]`, `[[]]`, `[{}]`, `{"":{}}`, `[null]`,
		"\"\u00e9\"", "\"e\u0301\"", // composed and decomposed: no silent normalization
		`{"` + "\u00e9" + `":1,"e` + "\u0301" + `":2}`, `{"` + "\u00e9" + `":2,"e` + "\u0301" + `":1}`,
		"\"\u212b\"", "\"\u00c5\"", // Angstrom sign and A with ring
		`"a"`, `"A"`, `"\u0000"`, `"a\u0000"`, "\"\ufffd\"", "\"\ufeff\"", `"\\u00e9"`,
		`{"a":2}`, `{"a":1}`, `{"A":1}`, `{"a":[1]}`, `{"a":1,"b":2}`, `{"a":2,"b":1}`, `[1,2]`, `[2,1]`, `[1,[2]]`, `[12]`,
		`"!nil!"`,
	}
	seen := map[string]string{}
	for _, payload := range payloads {
		key := contentKey(t, payload)
		if other, ok := seen[key]; ok {
			t.Errorf("%q and %q have the same key", payload, other)
		}
		seen[key] = payload
	}
}

func TestContentKeyRefusesWhatHasNoCanonicalForm(t *testing.T) {
	t.Parallel()
	digits := strings.Repeat("1234567890", 10)
	tests := []struct{ name, payload, wantReason string }{
		{"empty", "", "it is empty"},
		{"blank", " ", "unexpected end at offset 1, want a value"},
		{"the text !nil!", "!nil!", `unexpected '!' at offset 0`},

		{"2^53+1", `{"n":9007199254740993}`, "number 9007199254740993 at offset 5 would become 9007199254740992"},
		{"-(2^53+1)", `-9007199254740993`, "would become -9007199254740992"},
		{"2^53+1 as a decimal", `9007199254740993.0`, "would become 9007199254740992"},
		{"2^53+1 with an exponent", `9.007199254740993e15`, "would become 9007199254740992"},
		{"2^60", `[0,1152921504606846976]`, "number 1152921504606846976 at offset 3 would become 1152921504606847000"},
		{"2^60+1", `1152921504606846977`, "would become 1152921504606847000"},
		{"18446744073709551615", `18446744073709551615`, "would become 18446744073709552000"},
		{"RFC 8785 section 3.2.2's rounded number", `333333333.33333329`, "would become 333333333.3333333"},
		{"17 digits of 0.1", `0.10000000000000001`, "would become 0.1"},
		{"long decimal", `0.1000000000000000055`, "would become 0.1"},
		{"100 digits", digits, "number 1234567890123456789012345678901234567890... at offset 0 would become 1.2345678901234567e+99"},
		{"1e400", `[1, 1e400]`, "number 1e400 at offset 4 would become infinite"},
		{"-1e400", `-1e400`, "number -1e400 at offset 0 would become infinite"},
		{"just out of range", `1.7976931348623159e308`, "infinite"},
		{"1e-400", `{"a":1e-400}`, "number 1e-400 at offset 5 would become 0"},
		{"below the smallest double", `4e-324`, "would become 5e-324"},
		{"huge exponent", `1e99999999999999999999999999`, "infinite"},
		{"huge negative exponent", `1e-99999999999999999999999999`, "would become 0"},
		// strconv reads its first five digits; 2^64 less, it is the 18446 they say.
		{"exponent that wraps 64 bits", "0." + strings.Repeat("0", 18440) + "1e18446744073709570062", "would become 100000"},

		{"NaN", `NaN`, `unexpected 'N' at offset 0, want a value`},
		{"Infinity", `[-Infinity]`, `unexpected 'I' at offset 2, want a digit`},
		{"leading zero", `01`, `unexpected '1' at offset 1, want nothing after the value`},
		{"plus sign", `+1`, `unexpected '+' at offset 0`},
		{"no integer part", `.5`, `unexpected '.' at offset 0`},
		{"no fraction", `5.`, "unexpected end at offset 2, want a digit"},
		{"no exponent", `[5e]`, `unexpected ']' at offset 3, want a digit`},
		{"hexadecimal", `0x1p4`, `unexpected 'x' at offset 1`},
		{"underscore", `1_000`, `unexpected '_' at offset 1`},
		{"lone minus", `-`, "unexpected end at offset 1"},

		{"duplicate key", `{"a":1,"a":2}`, `Duplicate key: "a"`},
		{"duplicate key, equal values", `{"a":1,"a":1}`, `Duplicate key: "a"`},
		{"duplicate key by escape", `{"a":1,"\u0061":2}`, `Duplicate key: "a"`},
		{"duplicate key by surrogate pair", `{"😀":1,"\ud83d\ude00":2}`, `Duplicate key: "😀"`},
		{"duplicate key, nested", `{"x":{"b":1,"c":2,"b":1}}`, `Duplicate key: "b"`},
		{"duplicate key in an array", `[{"a":1},{"b":1,"b":2}]`, `Duplicate key: "b"`},
		{"duplicate empty key", `{"":1,"":2}`, `Duplicate key: ""`},

		{"lone high surrogate", `"\ud800"`, `lone surrogate \ud800 at offset 1`},
		{"lone low surrogate", `["a\udc00"]`, `lone surrogate \udc00 at offset 3`},
		{"surrogates swapped", `"\udc00\ud800"`, `lone surrogate \udc00 at offset 1`},
		{"two high surrogates", `"\ud800\ud800"`, `lone surrogate \ud800 at offset 1`},
		{"high surrogate and text", `"\ud800abcdef"`, `lone surrogate \ud800 at offset 1`},
		{"high surrogate and another escape", `"\ud800\u0061"`, `lone surrogate \ud800 at offset 1`},
		{"lone surrogate in a key", `{"\udfff":1}`, `lone surrogate \udfff at offset 2`},

		{"invalid UTF-8", "\"a\xff\"", "invalid UTF-8 (byte 0xff) at offset 2"},
		{"overlong UTF-8", "\"\xc0\xaf\"", "invalid UTF-8 (byte 0xc0) at offset 1"},
		{"surrogate in UTF-8", "\"\xed\xa0\x80\"", "invalid UTF-8 (byte 0xed) at offset 1"},
		{"UTF-8 cut short", "\"\xe2\x82\"", "invalid UTF-8 (byte 0xe2) at offset 1"},
		{"beyond U+10FFFF", "\"\xf4\x90\x80\x80\"", "invalid UTF-8 (byte 0xf4) at offset 1"},
		{"invalid UTF-8 outside a string", "[\xff]", "at offset 1, want a value"},
		{"UTF-16", "\xff\xfe1\x00", "at offset 0, want a value"},
		{"byte order mark", "\ufeff{}", `unexpected '\ufeff' at offset 0, want a value`},
		{"no-break space between tokens", "[\u00a01]", `unexpected '\u00a0' at offset 1`},

		{"trailing data", `{} x`, `unexpected 'x' at offset 3, want nothing after the value`},
		{"two values", `1 2`, `unexpected '2' at offset 2`},
		{"trailing NUL", "{}\x00", `unexpected '\x00' at offset 2`},
		{"line comment", "{} // done", `unexpected '/' at offset 3`},
		{"block comment", `[/* one */1]`, `unexpected '/' at offset 1`},
		{"trailing comma in an array", `[1,]`, `unexpected ']' at offset 3, want a value`},
		{"trailing comma in an object", `{"a":1,}`, `unexpected '}' at offset 7, want a key`},
		{"no comma", `[1 2]`, `unexpected '2' at offset 3, want ',' or ']'`},
		{"no colon", `{"a" 1}`, `unexpected '1' at offset 5, want ':'`},
		{"key without quotes", `{a:1}`, `unexpected 'a' at offset 1, want a key`},
		{"single quotes", `'a'`, `unexpected '\'' at offset 0`},
		{"brackets crossed", `[{]}`, `unexpected ']' at offset 2, want a key`},
		{"open array", `[1`, `unexpected end at offset 2, want ',' or ']'`},
		{"open object", `{"a":1`, `unexpected end at offset 6, want ',' or '}'`},
		{"open string", ` "abc`, "string at offset 1 has no end"},
		{"string that ends in a backslash", `"\`, "invalid escape at offset 1"},
		{"unknown escape", `"\x41"`, "invalid escape at offset 1"},
		{"short escape", `"\u12"`, "invalid escape at offset 1"},
		{"escape that is not hexadecimal", `"\u+123"`, "invalid escape at offset 1"},
		{"raw newline in a string", "\"a\nb\"", "control character 0x0a at offset 2"},
		{"raw NUL in a string", "\"\x00\"", "control character 0x00 at offset 1"},
		{"word cut short", `[tru]`, `unexpected 't' at offset 1`},
		{"word in upper case", `TRUE`, `unexpected 'T' at offset 0`},
		{"word with a tail", `nullx`, `unexpected 'x' at offset 4`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			key, err := jetbox.ContentKey([]byte(tt.payload))
			if !errors.Is(err, jetbox.ErrNoCanonicalForm) || key != "" {
				t.Fatalf("ContentKey(%q) = %q, %v, want ErrNoCanonicalForm", tt.payload, key, err)
			}
			// The text tells the user what to change, so here it is tested.
			if !strings.Contains(err.Error(), tt.wantReason) {
				t.Errorf("ContentKey(%q): %v, want %q in it", tt.payload, err, tt.wantReason)
			}
		})
	}
	if _, err := jetbox.ContentKey(nil); !errors.Is(err, jetbox.ErrNoCanonicalForm) {
		t.Errorf("ContentKey(nil): %v, want ErrNoCanonicalForm", err)
	}
}

// What is too large, too deep or too many is refused before it costs anything;
// what is just within the limits is not.
func TestContentKeyLimits(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	nest := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	text := func(n int) string { return `"` + strings.Repeat("x", n-2) + `"` }
	list := func(n int) string { return "[" + strings.Repeat("1,", n-2) + "1]" }
	tests := []struct{ name, payload, wantReason string }{
		{"depth 1,000", nest(1000), ""},
		{"depth 1,001", nest(1001), "more than 1000 nested arrays and objects at offset 1000"},
		{"depth 10,000", nest(10_000), "more than 1000 nested"},
		{"depth 1,000,000", nest(1_000_000), "more than 1000 nested"},
		{"depth 1,000,000, never closed", strings.Repeat("[", 1_000_000), "more than 1000 nested"},
		{"objects 1,000 deep", strings.Repeat(`{"a":`, 999) + "{}" + strings.Repeat("}", 999), ""},
		{"objects 1,000,000 deep", strings.Repeat(`{"a":`, 1_000_000), "more than 1000 nested"},
		{"1,000 deep again and again", "[" + strings.Repeat(nest(999)+",", 500) + nest(999) + "]", ""},
		{"16 MiB", text(16 * mib), ""},
		{"16 MiB and a byte", text(16*mib + 1), "16777217 bytes, want at most 16777216"},
		{"1,048,576 values", list(1_048_576), ""},
		{"1,048,577 values", list(1_048_577), "more than 1048576 values at offset 2097151"},
		{"a number of 1 MiB", "1" + strings.Repeat("0", mib), "infinite"},
		{"a decimal of 1 MiB", "0." + strings.Repeat("1", mib), "would become 0.1111111111111111"},
		{"a fraction of 1 MiB and its exponent", "0." + strings.Repeat("0", mib) + "1e1048577", "would become"},
		{"zero in 1 MiB", "0." + strings.Repeat("0", mib), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			_, err := jetbox.ContentKey([]byte(tt.payload))
			took := time.Since(start)
			switch {
			case tt.wantReason == "" && err != nil:
				t.Errorf("ContentKey: %v, want a key", err)
			case tt.wantReason != "" && (!errors.Is(err, jetbox.ErrNoCanonicalForm) || !strings.Contains(err.Error(), tt.wantReason)):
				t.Errorf("ContentKey: %v, want ErrNoCanonicalForm and %q", err, tt.wantReason)
			case tt.wantReason != "" && len(err.Error()) > 300:
				t.Errorf("the error has %d bytes: it copies the payload", len(err.Error()))
			}
			// Generous, for a loaded machine under -race: the quadratic
			// implementation that this guards against needs minutes.
			if took > 20*time.Second {
				t.Errorf("ContentKey took %v", took)
			}
		})
	}
}

func TestContentKeyLeavesThePayloadAlone(t *testing.T) {
	t.Parallel()
	payload := []byte(` {"b":1.0,"a":"\u0061"} `)
	before := bytes.Clone(payload)
	if _, err := jetbox.ContentKey(payload); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(payload, before) {
		t.Errorf("payload = %q, want %q", payload, before)
	}
}

func BenchmarkContentKey(b *testing.B) {
	type line struct {
		SKU   string  `json:"sku"`
		Count int     `json:"count"`
		Price float64 `json:"price"`
		Gift  bool    `json:"gift"`
	}
	for _, lines := range []int{2, 12_000} {
		order := map[string]any{"id": "01890a5d-ac96-774b-bcce-b302099a8057", "customer": "Zoë", "note": nil}
		var all []line
		for i := range lines {
			all = append(all, line{SKU: "sku-" + strconv.Itoa(i), Count: i, Price: float64(i) + 0.95, Gift: i%2 == 0})
		}
		order["lines"] = all
		payload, err := json.Marshal(order)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("%dB", len(payload)), func(b *testing.B) {
			b.SetBytes(int64(len(payload)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := jetbox.ContentKey(payload); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
