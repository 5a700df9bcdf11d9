package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf16"

	"go.yaml.in/yaml/v3"
)

// fillFlags gives the flags of fs that the command line left alone their values
// from the environment, then from the config file. Both are shared by all
// commands: what belongs to another one is checked all the same, so that no
// mistake stays unnoticed, and has no effect. config is the value of --config,
// which the environment may name.
func fillFlags(fs *flag.FlagSet, environ []string, config *string) error {
	taken := map[string]bool{} // by a stronger source
	fs.Visit(func(f *flag.Flag) { taken[f.Name] = true })
	if err := fillFromEnv(fs, environ, taken); err != nil {
		return err
	}
	if *config == "" {
		return nil
	}
	entries, err := readConfig(*config)
	if err != nil {
		return err
	}
	return fillFromConfig(fs, *config, entries, taken)
}

func fillFromEnv(fs *flag.FlagSet, environ []string, taken map[string]bool) error {
	names := flagNames()
	var fromEnv []string
	for _, entry := range environ {
		key, value, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(key, envPrefix) {
			continue
		}
		i := slices.IndexFunc(names, func(name string) bool { return envName(name) == key })
		if i < 0 {
			err := usagef("unknown environment variable %s: it matches no flag", key)
			if near := nearest(key, envNames(names)); near != "" {
				return withHint(err, fmt.Sprintf("did you mean %s?", near))
			}
			return withHint(err, "relay COMMAND -h lists the variables; unset the others that start with "+envPrefix)
		}
		if value == "" {
			continue // as good as not set: that is how a variable is cleared
		}
		name := names[i]
		if err := offer(fs, name, []string{value}, taken, "environment variable "+key); err != nil {
			return err
		}
		fromEnv = append(fromEnv, name)
	}
	for _, name := range fromEnv {
		taken[name] = true
	}
	return nil
}

// offer sets a flag unless a stronger source has. A flag that fs does not have
// is tried on another command's flags, to find mistakes in its value.
func offer(fs *flag.FlagSet, name string, values []string, taken map[string]bool, where string) error {
	target, f := fs, fs.Lookup(name)
	if f == nil || taken[name] {
		f = lookupAny(name)
		target = flag.NewFlagSet("", flag.ContinueOnError)
		target.Var(f.Value, f.Name, f.Usage)
	}
	if _, ok := f.Value.(repeated); !ok && len(values) != 1 {
		return usagef("%s: want one value, not a list", where)
	}
	for _, v := range values {
		if err := setFlag(target, f, v); err != nil {
			return badValue(where, f, v, err)
		}
	}
	return nil
}

// A configEntry is one key of the config file.
type configEntry struct {
	key    string
	line   int
	values []string
}

func fillFromConfig(fs *flag.FlagSet, file string, entries []configEntry, taken map[string]bool) error {
	names := slices.DeleteFunc(flagNames(), func(name string) bool { return name == "config" })
	lines := map[string]int{}
	for _, e := range entries {
		where := fmt.Sprintf("%s:%d: key %q", file, e.line, e.key)
		if !slices.Contains(names, e.key) {
			err := usagef("%s is unknown: keys are the names of flags", where)
			if near := nearest(e.key, names); near != "" {
				return withHint(err, fmt.Sprintf("did you mean %s?", near))
			}
			return err
		}
		if before := lines[e.key]; before > 0 {
			return usagef("%s is there twice, first on line %d", where, before)
		}
		lines[e.key] = e.line
		if err := offer(fs, e.key, e.values, taken, where); err != nil {
			return err
		}
	}
	return nil
}

// readConfig reads a flat YAML file: one key a line, with a value or a list of
// values.
func readConfig(file string) ([]configEntry, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		if info, statErr := os.Stat(file); statErr == nil && info.IsDir() {
			return nil, usagef("config file %s is a directory", file)
		}
		return nil, withHint(usagef("read config file: %w", err), "--config, or RELAY_CONFIG, names it")
	}
	text, err = plainText(text)
	if err != nil {
		return nil, usagef("config file %s: %w", file, err)
	}
	// A key that is indented by mistake becomes part of the value above it, or
	// an error that names neither.
	for i, line := range strings.Split(string(text), "\n") {
		word := strings.TrimLeft(line, " \t")
		key, _, isKey := strings.Cut(word, ":")
		if isKey && len(word) < len(line) && word[0] != '#' && word[0] != '-' {
			return nil, usagef("%s:%d: key %q is indented: keys start their line", file, i+1, strings.TrimSpace(key))
		}
	}
	return parseConfig(file, text)
}

// plainText removes the mark that some editors put before UTF-8, and refuses
// what is no text.
func plainText(b []byte) ([]byte, error) {
	b = bytes.TrimPrefix(b, []byte("\xef\xbb\xbf"))
	for _, mark := range []string{"\xff\xfe", "\xfe\xff"} {
		if bytes.HasPrefix(b, []byte(mark)) {
			return nil, fmt.Errorf("starts with a UTF-16 byte order mark (%#x): save it as UTF-8", utf16.AppendRune(nil, '\ufeff'))
		}
	}
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return nil, fmt.Errorf("has a NUL byte at offset %d: it is no text", i)
	}
	return b, nil
}

func parseConfig(file string, text []byte) ([]configEntry, error) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, nil // nothing but comments
	} else if err != nil {
		return nil, usagef("config file %s: %w", file, err)
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, usagef("config file %s: want one YAML document, there is more", file)
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil, nil
	}
	if root.Kind != yaml.MappingNode {
		return nil, usagef("%s:%d: want lines of the form KEY: VALUE", file, root.Line)
	}
	var entries []configEntry
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		values, err := configValues(value)
		if err != nil {
			return nil, usagef("%s:%d: key %q %w", file, key.Line, key.Value, err)
		}
		entries = append(entries, configEntry{key.Value, key.Line, values})
	}
	return entries, nil
}

func configValues(n *yaml.Node) ([]string, error) {
	switch {
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		return nil, errors.New("has no value")
	case n.Kind == yaml.ScalarNode:
		return []string{n.Value}, nil
	case n.Kind == yaml.SequenceNode && len(n.Content) > 0:
		var values []string
		for _, item := range n.Content {
			if item.Kind != yaml.ScalarNode || item.Tag == "!!null" {
				return nil, errors.New("is a list of something else than values")
			}
			values = append(values, item.Value)
		}
		return values, nil
	case n.Kind == yaml.MappingNode:
		return nil, errors.New("has keys below it: all keys are at the top")
	}
	return nil, errors.New("has no plain value")
}

// flagNames returns the names of all flags of all commands, sorted.
func flagNames() []string {
	var names []string
	for _, c := range commands() {
		newFlagSet(c, &globals{}).VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func envNames(flags []string) []string {
	out := make([]string, len(flags))
	for i, name := range flags {
		out[i] = envName(name)
	}
	return out
}
