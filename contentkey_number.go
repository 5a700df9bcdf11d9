package jetbox

import (
	"bytes"
	"strconv"

	"github.com/gowebpki/jcs"
)

// changedNumber reports whether RFC 8785 would turn a JSON number into another
// one, and into which. Two numbers it leaves alone have the same canonical form
// only if they are equal, since each equals what its double is printed as.
//
// It also holds where strconv gives up on an exponent that a million zeros
// would balance: jcs parses the same way, and the result is not equal.
//
// The comparison is one of decimal digits, not of big.Rat: there 1e1000000000
// in the payload is a number with a billion digits in memory.
func changedNumber(literal []byte) (into string, changed bool) {
	if len(literal) <= 15 && !bytes.ContainsAny(literal, ".eE") {
		return "", false // an integer below 2^53
	}
	want, fits := parseDecimal(literal)
	f, err := strconv.ParseFloat(string(literal), 64)
	if err != nil { // the grammar is checked, so only the range is left
		return "infinite", true
	}
	var buf [32]byte
	got, _ := parseDecimal(strconv.AppendFloat(buf[:0], f, 'e', -1, 64))
	if fits && got == want {
		return "", false
	}
	into, err = jcs.NumberToJSON(f)
	if err != nil {
		return "infinite", true
	}
	return into, true
}

// maxDoubleDigits is the most digits a double's shortest decimal has.
const maxDoubleDigits = 17

// A decimal is the magnitude 0.d1d2d3... * 10^exp, with neither leading nor
// trailing zeros among its n digits, so that equal magnitudes are equal values.
// Zero has no digits and no exponent.
type decimal struct {
	digits [maxDoubleDigits]byte
	n      int
	exp    int64
}

// parseDecimal reads a valid JSON number but for its sign, which no conversion
// loses. It does not fit when it has more significant digits than any double is
// printed with.
func parseDecimal(literal []byte) (d decimal, fits bool) {
	var zeros int64 // seen since the last significant digit
	fraction := false
	i := 0
	for ; i < len(literal) && literal[i]|0x20 != 'e'; i++ {
		c := literal[i]
		if !isDigit(c) {
			fraction = fraction || c == '.'
			continue
		}
		if !fraction && (d.n > 0 || c != '0') {
			d.exp++
		}
		switch {
		case c == '0' && d.n == 0:
			if fraction {
				d.exp--
			}
		case c == '0':
			zeros++
		case int64(d.n)+zeros >= maxDoubleDigits:
			return decimal{}, false
		default:
			for ; zeros > 0; zeros-- {
				d.digits[d.n] = '0'
				d.n++
			}
			d.digits[d.n] = c
			d.n++
		}
	}
	if d.n == 0 {
		return decimal{}, true
	}
	d.exp += parseExponent(literal[i:])
	return d, true
}

// parseExponent reads what follows the digits of a JSON number. It stops
// counting at 2^40, before it could wrap around to the exponent of another
// number: the zeros of a payload cannot balance that much, so the true number is
// no double anyway.
func parseExponent(literal []byte) int64 {
	var exp int64
	for _, c := range literal {
		if isDigit(c) && exp < 1<<40 {
			exp = exp*10 + int64(c-'0')
		}
	}
	if len(literal) > 1 && literal[1] == '-' {
		return -exp
	}
	return exp
}
