package sqlite

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// ParseURL returns the file that a database URL of the form "sqlite:FILE"
// names. The path is taken as it stands, without escapes. Databases in memory
// are refused, since each pooled connection would have its own; so are keys
// after a question mark, since a misspelled one would silently do nothing:
// the settings are this package's.
func ParseURL(dbURL string) (path string, err error) {
	path, ok := strings.CutPrefix(dbURL, "sqlite:")
	if !ok {
		return "", fmt.Errorf("database %q: want sqlite:FILE", dbURL)
	}
	if err := checkPath(path); err != nil {
		return "", fmt.Errorf("database %q: %w", dbURL, err)
	}
	return path, nil
}

func checkPath(path string) error {
	name, query, hasQuery := strings.Cut(path, "?")
	if hasQuery {
		key, _, _ := strings.Cut(query, "=")
		return fmt.Errorf("unknown key %q: settings are not taken from the URL", key)
	}
	switch {
	case name == "":
		return errors.New("names no file")
	case strings.Contains(name, ":memory:"):
		return errors.New("a database in memory cannot be shared by the connections of a pool: name a file")
	case strings.HasPrefix(name, "file:"):
		return errors.New("file: URIs are not taken: name the file itself")
	case strings.ContainsRune(name, 0):
		return errors.New("has a NUL byte")
	}
	return nil
}

// driverDSN is the URI for modernc.org/sqlite: every character of the path that
// a URI would read as its own is escaped.
func driverDSN(path string, set settings) string {
	q := url.Values{"_txlock": {"immediate"}}
	for _, p := range set.pragmas() {
		q.Add("_pragma", fmt.Sprintf("%s(%s)", p.name, p.value))
	}
	u := url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}
	return u.String()
}
