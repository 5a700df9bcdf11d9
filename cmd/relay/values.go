package main

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

// parsed makes a parse function a flag.Value.
type parsed[T any] struct {
	p     *T
	parse func(string) (T, error)
	text  string // the default, for help
	bool  bool
}

func (v *parsed[T]) String() string   { return v.text }
func (v *parsed[T]) IsBoolFlag() bool { return v.bool }

func (v *parsed[T]) Set(s string) error {
	x, err := v.parse(s)
	if err != nil {
		return err
	}
	*v.p = x
	return nil
}

// define adds a flag whose value is parsed by parse. The word in back quotes in
// usage names the value in the help text.
func define[T any](fs *flag.FlagSet, p *T, name string, def T, parse func(string) (T, error), usage string) {
	*p = def
	text := fmt.Sprint(def)
	switch x := any(def).(type) {
	case time.Duration:
		text = shortDuration(x)
	case slog.Level:
		text = strings.ToLower(x.String())
	}
	if any(def) == any(0) || any(def) == any(0.0) {
		text = "" // 0 stands for no limit, and is not accepted as a value
	}
	fs.Var(&parsed[T]{p: p, parse: parse, text: text}, name, usage)
}

// multi is a flag whose values add up: given several times, or as a list in the
// config file.
type multi[T any] struct {
	p     *[]T
	parse func(string) (T, error)
	comma bool // one value may hold several, separated by commas
	def   string
	set   bool
}

func (v *multi[T]) String() string { return v.def }

func (v *multi[T]) Set(s string) error {
	parts := []string{s}
	if v.comma {
		parts = strings.Split(s, ",")
	}
	var out []T
	for _, part := range parts {
		if v.comma {
			part = strings.TrimSpace(part)
		}
		x, err := v.parse(part)
		if err != nil {
			return err
		}
		out = append(out, x)
	}
	if !v.set { // what is there is the default
		*v.p, v.set = nil, true
	}
	*v.p = append(*v.p, out...)
	return nil
}

// repeated marks the flags a config file may give as a list.
type repeated interface{ repeats() }

func (v *multi[T]) repeats() {}

// defineEach adds a flag that may be repeated.
func defineEach[T any](fs *flag.FlagSet, p *[]T, name string, parse func(string) (T, error), usage string) {
	fs.Var(&multi[T]{p: p, parse: parse}, name, usage)
}

// defineList adds a flag with comma-separated values.
func defineList(fs *flag.FlagSet, p *[]string, name, def string, parse func(string) (string, error), usage string) {
	v := &multi[string]{p: p, parse: parse, comma: true, def: def}
	if def != "" {
		*p = strings.Split(def, ",")
	}
	fs.Var(v, name, usage)
}

func someText(s string) (string, error) {
	if strings.TrimSpace(s) == "" {
		return "", errors.New("want a text that is not empty")
	}
	return s, nil
}

func positiveInt(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, errors.New("want a whole number")
	}
	if n <= 0 {
		return 0, errors.New("want a number above 0")
	}
	return n, nil
}

func anyInt64(s string) (*int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return nil, errors.New("want a whole number")
	}
	return &n, nil
}

func rowID(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 {
		return 0, errors.New("want the number of a row")
	}
	return n, nil
}

func positiveFloat(s string) (float64, error) {
	x, err := strconv.ParseFloat(s, 64)
	if err != nil || !(x > 0) || x > 1e9 {
		return 0, errors.New("want a number above 0")
	}
	return x, nil
}

const durationWanted = "want a duration such as 500ms, 10s or 1h30m"

func duration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		// The standard library's text names the unit that is missing or unknown.
		return 0, fmt.Errorf("%s; %s", strings.TrimPrefix(err.Error(), "time: "), durationWanted)
	}
	return d, nil
}

func positiveDuration(s string) (time.Duration, error) {
	d, err := duration(s)
	if err == nil && d <= 0 {
		return 0, errors.New("want a duration above 0")
	}
	return d, err
}

// atLeast parses a duration not shorter than least, for settings that a library
// would refuse otherwise, later and in its own words.
func atLeast(least time.Duration) func(string) (time.Duration, error) {
	return func(s string) (time.Duration, error) {
		d, err := positiveDuration(s)
		if err == nil && d < least {
			return 0, fmt.Errorf("want at least %v", least)
		}
		return d, err
	}
}

// hostPort parses where to listen: HOST:PORT or off.
func hostPort(s string) (string, error) {
	if s == listenOff {
		return s, nil
	}
	_, port, err := net.SplitHostPort(s)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return "", errors.New("want HOST:PORT or off")
	}
	return s, nil
}

func oneOf(words ...string) func(string) (string, error) {
	return func(s string) (string, error) {
		if !slices.Contains(words, s) {
			return "", fmt.Errorf("want %s", strings.Join(words, " or "))
		}
		return s, nil
	}
}

// retention is what happens to published rows.
type retention struct {
	keep    time.Duration // 0 deletes at once
	archive bool
}

func (r retention) String() string {
	switch {
	case r.archive:
		return "archive"
	case r.keep == 0:
		return "0"
	}
	return shortDuration(r.keep)
}

func parseRetention(s string) (retention, error) {
	if s == "archive" {
		return retention{archive: true}, nil
	}
	d, err := duration(s)
	if err != nil {
		return retention{}, fmt.Errorf("%w, 0 or archive", err)
	}
	if d < 0 {
		return retention{}, errors.New("want a duration that is not negative, or archive")
	}
	return retention{keep: d}, nil
}

// syncPolicy is how often the embedded broker syncs its files.
type syncPolicy struct {
	every  time.Duration
	always bool
}

func (p syncPolicy) String() string {
	if p.always {
		return "always"
	}
	return shortDuration(p.every)
}

func parseSync(s string) (syncPolicy, error) {
	if s == "always" {
		return syncPolicy{always: true}, nil
	}
	d, err := positiveDuration(s)
	if err != nil {
		return syncPolicy{}, fmt.Errorf("%w, or always", err)
	}
	return syncPolicy{every: d}, nil
}

type headerLine struct{ name, value string }

func parseHeader(s string) (headerLine, error) {
	name, value, ok := strings.Cut(s, "=")
	if !ok || name == "" {
		return headerLine{}, errors.New("want NAME=VALUE")
	}
	return headerLine{name, value}, nil
}

// moment is a point in time, or a distance from now.
type moment struct {
	at    time.Time
	delta time.Duration
}

func parseMoment(s string) (moment, error) {
	if d, err := time.ParseDuration(s); err == nil {
		if d < 0 {
			return moment{}, errors.New("want a duration that is not negative, or a time")
		}
		return moment{delta: d}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return moment{}, errors.New("want an RFC 3339 time such as 2030-01-31T08:00:00Z, or a duration such as 10m")
	}
	return moment{at: t}, nil
}

func (m moment) String() string { return "" }

func (m moment) after(now time.Time) time.Time {
	if !m.at.IsZero() || m.delta == 0 {
		return m.at
	}
	return now.Add(m.delta)
}

func (m moment) before(now time.Time) time.Time {
	if !m.at.IsZero() || m.delta == 0 {
		return m.at
	}
	return now.Add(-m.delta)
}

func parseLevel(s string) (slog.Level, error) {
	word, err := oneOf("debug", "info", "warn", "error")(s)
	if err != nil {
		return 0, err
	}
	var l slog.Level
	return l, l.UnmarshalText([]byte(word))
}

// shortDuration writes 1m0s as 1m.
func shortDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
