package main

import (
	"errors"
	"strings"
	"unicode"
)

// dlqSubjects are the dead letters' and stay out of the event stream, which
// would relay them as events again.
const dlqSubjects = "dlq.>"

// overlap reports whether some subject matches both patterns.
func overlap(a, b string) (some bool) {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	for i := range min(len(as), len(bs)) {
		switch {
		case as[i] == ">" || bs[i] == ">":
			return true
		case as[i] != bs[i] && as[i] != "*" && bs[i] != "*":
			return false
		}
	}
	return len(as) == len(bs)
}

// streamSubject checks a subject of a stream: wildcards are whole tokens, and >
// is the last one.
func streamSubject(s string) (string, error) {
	if s == "" || strings.ContainsFunc(s, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }) {
		return "", errors.New("want a subject without blanks")
	}
	tokens := strings.Split(s, ".")
	for i, t := range tokens {
		switch {
		case t == "":
			return "", errors.New("has an empty token")
		case t == ">" && i < len(tokens)-1:
			return "", errors.New("has > before the end")
		case len(t) > 1 && strings.ContainsAny(t, "*>"):
			return "", errors.New("has a wildcard inside a token")
		}
	}
	if tokens[0][0] == '$' {
		return "", errors.New("starts with $, which is the server's")
	}
	return s, nil
}

func streamName(s string) (string, error) {
	switch {
	case s == "" || strings.ContainsAny(s, ".*>/\\") || strings.ContainsFunc(s, unicode.IsSpace) || strings.ContainsFunc(s, unicode.IsControl):
		return "", errors.New(`want a name without blanks, dots, slashes, * and >`)
	case s == dlqStream || s == advisoryStream:
		return "", errors.New("is the name of a stream of jetbox's own")
	}
	return s, nil
}
