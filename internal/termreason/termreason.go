// Package termreason is what a consumer's term says to whoever reads the advisory
// of it: why, and which dead letter it has stored before. The letter is named by
// its subject, or, since a consumer does not know the prefix of letters, by the
// last token of that: sequence and time stored of the message. A reader must not
// believe it: anybody may send such an advisory.
package termreason

import "strings"

const (
	open = " [letter "
	end  = "]"
)

// Join returns the reason with the letter's name.
func Join(reason, letter string) string { return reason + open + letter + end }

// Split undoes Join. The letter is empty when the reason names none.
func Split(text string) (reason, letter string) {
	i := strings.LastIndex(text, open)
	if i < 0 || !strings.HasSuffix(text, end) {
		return text, ""
	}
	letter = text[i+len(open) : len(text)-len(end)]
	if letter == "" || strings.ContainsAny(letter, " []") {
		return text, ""
	}
	return text[:i], letter
}
