package jetbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"maps"
	"math/big"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/cyberphone/json-canonicalization/go/src/webpki.org/jsoncanonicalizer"
)

var contentSeed = flag.Uint64("contentkey.seed", 0, "seed of the random JSON texts, 0 for a new one")

// contentRand logs the seed, with the command that repeats the run.
func contentRand(t *testing.T) *rand.Rand {
	t.Helper()
	seed := *contentSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("repeat with: go test -run '^%s$' . -contentkey.seed=%d", t.Name(), seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// FuzzContentKey checks, for any bytes:
//
//  1. an error is an ErrNoCanonicalForm and comes without a key;
//  2. what is accepted is JSON, by the parser of the standard library;
//  3. the canonical form is its own canonical form;
//  4. other white space, key order and escapes do not change the key;
//  5. two independent implementations write the same canonical form;
//  6. a number is accepted only if no other number has its canonical form;
//  7. what our scanner accepts and jcs refuses is a duplicate key.
func FuzzContentKey(f *testing.F) {
	for _, seed := range []string{
		``, ` `, `null`, `{"b":[1.50,true,{}],"a":"\u20ac\ud83d\ude00"}`, `{"a":1,"\u0061":2}`,
		`[9007199254740993,1e400,1e-400,-0,1E+2,333333333.33333329]`, `9007199254740992`, `0.1`, `5e-324`,
		`"\ud800"`, "\"\xff\"", "\ufeff[]", `[1,]`, `{"":{"":[[]]}}`, "{\"\U0001f600\":1,\"\ufb33\":2}", `"\/\b\u0000"`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		key, err := ContentKey(payload)
		if err != nil {
			if !errors.Is(err, ErrNoCanonicalForm) || key != "" {
				t.Fatalf("ContentKey(%q) = %q, %v, want ErrNoCanonicalForm", payload, key, err)
			}
			scan := jsonScan{data: payload}
			if scan.document() == nil && len(payload) > 0 && !strings.Contains(err.Error(), "Duplicate key") {
				t.Fatalf("ContentKey(%q): %v, after the scanner accepted it", payload, err)
			}
			return
		}
		checkContentKey(t, payload, key)
		if number := bytes.TrimSpace(payload); bytes.IndexByte([]byte("-0123456789"), number[0]) >= 0 {
			checkNumberIsKept(t, string(number))
		}
	})
}

// checkContentKey holds an accepted payload against the rules 2 to 5.
func checkContentKey(t *testing.T, payload []byte, key string) {
	t.Helper()
	if !json.Valid(payload) {
		t.Fatalf("ContentKey accepted %q, which is not JSON", payload)
	}
	form, err := canonicalJSON(payload)
	if err != nil {
		t.Fatalf("canonicalJSON(%q): %v", payload, err)
	}
	again, err := canonicalJSON(form)
	if err != nil || !bytes.Equal(again, form) {
		t.Fatalf("canonical form %q of %q has the canonical form %q, %v", form, payload, again, err)
	}

	d := json.NewDecoder(bytes.NewReader(payload))
	d.UseNumber()
	var value any
	if err := d.Decode(&value); err != nil {
		t.Fatalf("decode %q: %v", payload, err)
	}
	disguised := disguise(nil, value)
	if got, err := ContentKey(disguised); err != nil || got != key {
		t.Fatalf("ContentKey(%q) = %s, %v, want %s as for %q", disguised, got, err, key, payload)
	}
	if want := naiveCanonical(t, nil, value); !bytes.Equal(form, want) {
		t.Fatalf("canonical form of %q is %q, the naive one is %q", payload, form, want)
	}
	// The other implementation refuses scalars at the top level.
	if form[0] == '{' || form[0] == '[' {
		want, err := jsoncanonicalizer.Transform(payload)
		if err != nil || !bytes.Equal(form, want) {
			t.Fatalf("canonical form of %q is %q, cyberphone's is %q, %v", payload, form, want, err)
		}
	}
}

// disguise appends value with white space between all tokens, the keys in
// reverse order, and whatever encoding/json escapes (<, U+2028). It does the
// same every time, or the fuzzer would take its whims for new coverage.
func disguise(b []byte, value any) []byte {
	b = append(b, "\r\n"...)
	switch value := value.(type) {
	case map[string]any:
		b = append(b, "{\t"...)
		sep := ""
		for _, k := range slices.Backward(slices.Sorted(maps.Keys(value))) {
			b = append(b, sep...)
			b = append(disguise(b, k), " :"...)
			b = disguise(b, value[k])
			sep = " ,"
		}
		b = append(b, " }"...)
	case []any:
		b = append(b, "[ "...)
		for i, v := range value {
			if i > 0 {
				b = append(b, " ,"...)
			}
			b = disguise(b, v)
		}
		b = append(b, "\t]"...)
	default:
		scalar, _ := json.Marshal(value) // strings, numbers as written, true, false, null
		b = append(b, scalar...)
	}
	return append(b, " \n"...)
}

// naiveCanonical is RFC 8785 once more, over the values and the number format of
// encoding/json, to have an opinion that shares no code with jcs.
func naiveCanonical(t *testing.T, b []byte, value any) []byte {
	t.Helper()
	switch value := value.(type) {
	case map[string]any:
		keys := slices.SortedFunc(maps.Keys(value), func(x, y string) int {
			return slices.Compare(utf16.Encode([]rune(x)), utf16.Encode([]rune(y)))
		})
		b = append(b, '{')
		for i, k := range keys {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(naiveCanonical(t, b, k), ':')
			b = naiveCanonical(t, b, value[k])
		}
		return append(b, '}')
	case []any:
		b = append(b, '[')
		for i, v := range value {
			if i > 0 {
				b = append(b, ',')
			}
			b = naiveCanonical(t, b, v)
		}
		return append(b, ']')
	case json.Number:
		f, err := value.Float64()
		if err != nil {
			t.Fatalf("number %s was accepted: %v", value, err)
		}
		if f == 0 {
			return append(b, '0')
		}
		text, _ := json.Marshal(f) // ECMAScript's format, but for -0
		return append(b, text...)
	case string:
		b = append(b, '"')
		for _, r := range value {
			const short = "\"\\\b\f\n\r\t"
			if i := strings.IndexRune(short, r); i >= 0 {
				b = append(b, '\\', `"\bfnrt`[i])
			} else if r < ' ' {
				b = append(b, `\u00`...)
				b = append(b, "01"[r>>4], "0123456789abcdef"[r&15])
			} else {
				b = append(b, string(r)...)
			}
		}
		return append(b, '"')
	default:
		text, _ := json.Marshal(value)
		return append(b, text...)
	}
}

// checkNumberIsKept compares an accepted number with its canonical form in
// exact arithmetic. Large exponents are left out: big.Rat writes them out.
func checkNumberIsKept(t *testing.T, number string) {
	t.Helper()
	if _, exp, _ := strings.Cut(strings.ToLower(number), "e"); len(exp) > 5 {
		return
	}
	form, err := canonicalJSON([]byte(number))
	if err != nil {
		t.Fatalf("canonicalJSON(%s): %v", number, err)
	}
	if ratOf(t, number).Cmp(ratOf(t, string(form))) != 0 {
		t.Fatalf("%s has the canonical form %s, another number", number, form)
	}
}

func ratOf(t *testing.T, number string) *big.Rat {
	t.Helper()
	r, ok := new(big.Rat).SetString(number)
	if !ok {
		t.Fatalf("big.Rat does not read %q", number)
	}
	return r
}

// A number is accepted if and only if the shortest decimal of its double is
// exactly that number.
func TestNumberCheckAgreesWithExactArithmetic(t *testing.T) {
	t.Parallel()
	rng := contentRand(t)
	n := 200_000
	if testing.Short() {
		n = 20_000
	}
	accepted := 0
	for range n {
		number := randomNumber(rng)
		f, err := strconv.ParseFloat(number, 64)
		want := err == nil && ratOf(t, number).Cmp(ratOf(t, strconv.FormatFloat(f, 'e', -1, 64))) == 0
		into, changed := changedNumber([]byte(number))
		if changed == want {
			t.Fatalf("changedNumber(%s) = %q, %v, in exact arithmetic %v", number, into, changed, !want)
		}
		if want {
			accepted++
		}
	}
	if accepted < n/10 || accepted > n*9/10 {
		t.Errorf("%d of %d numbers accepted: the generator does not test both outcomes", accepted, n)
	}
}

// randomNumber returns a JSON number around all the edges: of 2^53, of 17
// digits, of the range of a double, with zeros at either end.
func randomNumber(rng *rand.Rand) string {
	var b strings.Builder
	if rng.IntN(4) == 0 {
		b.WriteByte('-')
	}
	switch rng.IntN(5) {
	case 0: // as a double prints
		return b.String() + strconv.FormatFloat(rng.Float64()*float64(rng.Uint64N(1<<60)), "efg"[rng.IntN(3)], -1, 64)
	case 1: // around a power of two
		return b.String() + strconv.FormatUint(uint64(1)<<(48+rng.IntN(16))+rng.Uint64N(5)-2, 10)
	}
	digits := func(most int) {
		for range 1 + rng.IntN(most) {
			// Many zeros: they are what a normal form gets wrong.
			b.WriteByte("00001234567899"[rng.IntN(14)])
		}
	}
	if rng.IntN(3) == 0 {
		b.WriteByte('0')
	} else {
		b.WriteByte("123456789"[rng.IntN(9)])
		digits(10 + rng.IntN(15))
	}
	if rng.IntN(2) == 0 {
		b.WriteByte('.')
		digits(10 + rng.IntN(15))
	}
	if rng.IntN(2) == 0 {
		b.WriteByte("eE"[rng.IntN(2)])
		b.WriteString([]string{"", "+", "-", "-0", "+00"}[rng.IntN(5)])
		b.WriteString(strconv.Itoa(rng.IntN([]int{4, 30, 400}[rng.IntN(3)])))
	}
	return b.String()
}

// Random texts, within what all implementations define, have the same canonical
// form everywhere.
func TestContentKeyAgreesWithIndependentImplementations(t *testing.T) {
	t.Parallel()
	rng := contentRand(t)
	n := 5_000
	if testing.Short() {
		n = 500
	}
	for range n {
		payload := randomJSON(rng, nil, 0)
		key, err := ContentKey(payload)
		if err != nil {
			t.Fatalf("ContentKey(%q): %v", payload, err)
		}
		checkContentKey(t, payload, key)
	}
}

// randomJSON appends a value that has a canonical form, spelled at random.
func randomJSON(rng *rand.Rand, b []byte, depth int) []byte {
	space := func() {
		for rng.IntN(4) == 0 {
			b = append(b, " \t\r\n"[rng.IntN(4)])
		}
	}
	space()
	defer func() { space() }()
	kind := rng.IntN(8)
	if depth > 4 {
		kind = 4 + rng.IntN(4)
	}
	switch kind {
	case 0, 1, 2:
		b = append(b, '{')
		seen := map[string]bool{}
		for range rng.IntN(8) {
			key := randomText(rng)
			if seen[string(key)] {
				continue
			}
			if len(seen) > 0 {
				b = append(b, ',')
			}
			seen[string(key)] = true
			space()
			b = randomSpelling(rng, b, key)
			space()
			b = randomJSON(rng, append(b, ':'), depth+1)
		}
		b = append(b, '}')
	case 3:
		b = append(b, '[')
		for i := range rng.IntN(6) {
			if i > 0 {
				b = append(b, ',')
			}
			b = randomJSON(rng, b, depth+1)
		}
		space()
		b = append(b, ']')
	case 4:
		b = append(b, []string{"true", "false", "null"}[rng.IntN(3)]...)
	case 5, 6:
		b = randomSpelling(rng, b, randomText(rng))
	default:
		number := randomNumber(rng)
		for _, changed := changedNumber([]byte(number)); changed; _, changed = changedNumber([]byte(number)) {
			number = randomNumber(rng)
		}
		b = append(b, number...)
	}
	return b
}

// randomText returns a short text from alphabets that sort differently by byte,
// by code point and by UTF-16 code unit.
func randomText(rng *rand.Rand) []rune {
	text := make([]rune, rng.IntN(5))
	for i := range text {
		switch rng.IntN(6) {
		case 0:
			text[i] = rune(rng.IntN(0x20))
		case 1:
			text[i] = []rune("\"\\/<>&\x7f\u0080\u00e9\u0301\u2028\u2029\ufffd\uffff")[rng.IntN(14)]
		case 2:
			text[i] = 0xe000 + rune(rng.IntN(0x2000)) // above the surrogates
		case 3:
			text[i] = 0x10000 + rune(rng.IntN(0x100000))
		default:
			text[i] = 'a' + rune(rng.IntN(4))
		}
	}
	return text
}

// randomSpelling appends text as a JSON string, each rune raw or escaped.
func randomSpelling(rng *rand.Rand, b []byte, text []rune) []byte {
	const short = "\"\\/\b\f\n\r\t"
	b = append(b, '"')
	for _, r := range text {
		i := strings.IndexRune(short, r)
		switch {
		case i >= 0 && rng.IntN(2) == 0:
			b = append(b, '\\', `"\/bfnrt`[i])
		case r < ' ' || r == '"' || r == '\\' || rng.IntN(3) == 0:
			for _, unit := range utf16.Encode([]rune{r}) {
				hex := strconv.FormatUint(0x10000+uint64(unit), 16)[1:]
				if rng.IntN(2) == 0 {
					hex = strings.ToUpper(hex)
				}
				b = append(append(b, `\u`...), hex...)
			}
		default:
			b = append(b, string(r)...)
		}
	}
	return append(b, '"')
}
