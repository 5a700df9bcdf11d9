package main

import (
	"cmp"
	"io"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// masked stands where a secret was.
const masked = "*****"

// secretFlags hold secrets as their whole value.
var secretFlags = []string{"http-token"}

// secretKey finds what follows a name like password= in a connection string.
var secretKey = regexp.MustCompile(`(?i)\b(password|passwd|pwd|secret|token|sslpassword)(\s*=\s*|%3D)('(?:[^'\\]|\\.)*'|[^\s&;,'"]+)`)

// scheme finds the start of a URL.
var scheme = regexp.MustCompile(`[A-Za-z][A-Za-z0-9+.-]*://`)

// mask returns text without the passwords and tokens of the URLs and connection
// strings in it. It prefers to hide too much: a password with an @ or a / that
// was not escaped is hidden as well.
func mask(text string) string {
	starts := scheme.FindAllStringIndex(text, -1)
	var b strings.Builder
	done := 0
	for i, s := range starts {
		end := len(text)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		authority := text[s[1]:end]
		if n := strings.IndexAny(authority, " \t\r\n\"'`<>"); n >= 0 {
			authority = authority[:n]
		}
		at := strings.LastIndexByte(authority, '@')
		if at < 0 {
			continue
		}
		user, _, hasPassword := strings.Cut(authority[:at], ":")
		if !hasPassword && isPostgres(text[s[0]:s[1]]) {
			continue // the name of a role, which PostgreSQL's own errors show too
		}
		b.WriteString(text[done:s[1]])
		if hasPassword {
			b.WriteString(user + ":")
		}
		// Without a colon the name itself is the token (nats://TOKEN@HOST).
		b.WriteString(masked)
		done = s[1] + at
	}
	b.WriteString(text[done:])
	return secretKey.ReplaceAllString(b.String(), "${1}${2}"+masked)
}

// namedSecrets returns the values that follow such names, as they stand and as
// they are meant.
func namedSecrets(text string) []string {
	var out []string
	for _, m := range secretKey.FindAllStringSubmatch(text, -1) {
		value := m[3]
		out = append(out, value)
		if plain, err := url.QueryUnescape(value); err == nil {
			out = append(out, plain)
		}
		if strings.HasPrefix(value, "'") {
			value = strings.Trim(value, "'")
			quoted := strconv.Quote(value)
			out = append(out, value, quoted[1:len(quoted)-1], unescaped.Replace(value))
		}
	}
	return out
}

// unescaped undoes what a quoted value of a connection string escapes.
var unescaped = strings.NewReplacer(`\\`, `\`, `\'`, `'`)

// redactor masks texts, and with them the secrets of this process wherever they
// occur. It is safe for concurrent use.
type redactor struct {
	mu      sync.Mutex
	secrets []string // guarded by mu; longest first
}

// add names secrets. Very short ones are left out: masking them would hide
// half of the text, and protect nothing.
func (r *redactor) add(secrets ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range secrets {
		if len(s) >= 4 {
			r.secrets = append(r.secrets, s)
		}
	}
	slices.SortFunc(r.secrets, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
}

func (r *redactor) mask(text string) string {
	r.mu.Lock()
	secrets := r.secrets
	r.mu.Unlock()
	for _, s := range secrets { // first: mask may cut one in two
		text = strings.ReplaceAll(text, s, masked)
	}
	return mask(text)
}

// writer returns a writer that masks what is written through it. Each Write
// must hold whole lines, as those of slog and fmt do.
func (r *redactor) writer(w io.Writer) io.Writer { return &maskingWriter{r, w} }

type maskingWriter struct {
	r *redactor
	w io.Writer
}

func (m *maskingWriter) Write(p []byte) (int, error) {
	if _, err := io.WriteString(m.w, m.r.mask(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}
