package termreason_test

import (
	"testing"

	"github.com/seed-5e04d8fb/jetbox/internal/termreason"
)

func TestLetterIsFoundBehindTheReason(t *testing.T) {
	t.Parallel()
	tests := []struct{ text, reason, letter string }{
		{termreason.Join("terminated: boom", "7-12"), "terminated: boom", "7-12"},
		{termreason.Join("", "dlq.S.c.7-12"), "", "dlq.S.c.7-12"},
		{termreason.Join("says [letter 1-1]", "7-12"), "says [letter 1-1]", "7-12"},
		{"terminated: boom", "terminated: boom", ""},
		{"", "", ""},
		{"x [letter ]", "x [letter ]", ""},
		{"x [letter a b]", "x [letter a b]", ""},
		{"x [letter 7-12] y", "x [letter 7-12] y", ""},
	}
	for _, tt := range tests {
		reason, letter := termreason.Split(tt.text)
		if reason != tt.reason || letter != tt.letter {
			t.Errorf("Split(%q) = %q, %q, want %q, %q", tt.text, reason, letter, tt.reason, tt.letter)
		}
	}
}
