package main

import "strings"

// nearest returns the candidate that word is most probably a misspelling of, or
// "".
func nearest(word string, candidates []string) string {
	normal := func(s string) string { return strings.ToLower(strings.ReplaceAll(s, "_", "-")) }
	best, bestDistance := "", 3
	if len(word) < 5 {
		bestDistance = 2
	}
	for _, c := range candidates {
		if d := editDistance(normal(word), normal(c)); d < bestDistance {
			best, bestDistance = c, d
		}
	}
	return best
}

// editDistance counts the insertions, deletions and replacements that make b
// of a; a swap of two neighbors counts as one.
func editDistance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replace := rows[i-1][j-1]
			if a[i-1] != b[j-1] {
				replace++
			}
			d := min(replace, rows[i-1][j]+1, rows[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d = min(d, rows[i-2][j-2]+1)
			}
			rows[i][j] = d
		}
	}
	return rows[len(a)][len(b)]
}
