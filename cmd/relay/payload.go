package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// How a payload is shown to a person.
const (
	payloadAuto   = "auto"
	payloadText   = "text"
	payloadAsJSON = "json"
	payloadHex    = "hex"
)

func definePayload(fs *flag.FlagSet, format *string) {
	define(fs, format, "payload", payloadAuto, oneOf(payloadAuto, payloadText, payloadAsJSON, payloadHex),
		"show the payload as `FORMAT`: auto, text, json or hex")
}

// payloadAs renders a payload. Nothing in it can move a terminal's cursor, and
// JSON keeps every digit and letter it has.
func payloadAs(format string, b []byte) (string, error) {
	if format == payloadAuto {
		format = kindOf(b)
	}
	switch format {
	case payloadAsJSON:
		var indented bytes.Buffer
		if err := json.Indent(&indented, b, "", "  "); err != nil {
			return "", withHint(fmt.Errorf("the payload is no JSON: %w", err), "--payload auto shows what it is")
		}
		return printableLines(indented.String()), nil
	case payloadHex:
		return strings.TrimSuffix(hex.Dump(b), "\n"), nil
	default:
		return printableLines(string(b)), nil
	}
}

// kindOf is as what a payload is best shown.
func kindOf(b []byte) string {
	trimmed := bytes.TrimSpace(b)
	switch {
	case len(trimmed) > 0 && (trimmed[0] == '{' || trimmed[0] == '[') && json.Valid(b):
		return payloadAsJSON
	case utf8.Valid(b) && !bytes.ContainsFunc(b, func(r rune) bool { return unicode.IsControl(r) && !unicode.IsSpace(r) }):
		return payloadText
	default:
		return payloadHex
	}
}

// printableLines is printable for text of several lines.
func printableLines(s string) string {
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = printable(strings.ReplaceAll(line, "\t", "    "))
	}
	return strings.Join(lines, "\n")
}
