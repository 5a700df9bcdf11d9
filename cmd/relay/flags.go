package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// envPrefix starts the name of a flag's environment variable. What carries it
// and matches no flag is a typing mistake, and refused.
const envPrefix = "RELAY_"

// newFlagSet returns the flags of cmd and the global ones, with their defaults.
func newFlagSet(cmd *command, g *globals) *flag.FlagSet {
	fs := flag.NewFlagSet(cmd.name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	if cmd.flags != nil {
		cmd.flags(fs)
	}
	g.define(fs)
	return fs
}

func envName(flagName string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flagName, "-", "_"))
}

// flagName takes an argument apart: "--name" or "--name=value", with one hyphen
// or two. A single hyphen is no flag: it stands for standard input.
func flagName(arg string) (name string, hasValue, isFlag bool) {
	if len(arg) < 2 || arg[0] != '-' || arg == "--" {
		return "", false, false
	}
	name, _, hasValue = strings.Cut(strings.TrimPrefix(arg[1:], "-"), "=")
	return name, hasValue, true
}

func isHelpFlag(arg string) bool {
	return slices.Contains([]string{"-h", "--h", "-help", "--help"}, arg)
}

func isVersionFlag(arg string) bool { return arg == "-version" || arg == "--version" }

func isBool(f *flag.Flag) bool {
	b, ok := f.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// parseArgs sets the flags of fs from args, which may stand before, between
// and after the positional arguments, and returns those. "--" ends the flags.
// The flag package's own Parse stops at the first argument that is no flag.
func parseArgs(fs *flag.FlagSet, args []string) (positional []string, err error) {
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			return append(positional, args[i+1:]...), nil
		}
		if isHelpFlag(arg) {
			return nil, errHelp
		}
		name, hasValue, isFlag := flagName(arg)
		if !isFlag {
			positional = append(positional, arg)
			continue
		}
		f := fs.Lookup(name)
		if f == nil {
			return nil, unknownFlag(fs, name)
		}
		var value string
		switch {
		case hasValue:
			_, value, _ = strings.Cut(arg, "=")
		case isBool(f):
			value = "true"
		case i+1 == len(args):
			return nil, usagef("flag --%s needs a value", name)
		default:
			i++
			value = args[i]
		}
		if err := setFlag(fs, f, value); err != nil {
			return nil, badValue("flag --"+name, f, value, err)
		}
	}
	return positional, nil
}

func unknownFlag(fs *flag.FlagSet, name string) error {
	var names []string
	fs.VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
	err := usagef("unknown flag --%s for relay %s", name, fs.Name())
	if near := nearest(name, names); near != "" {
		return withHint(err, fmt.Sprintf("did you mean --%s?", near))
	}
	return err
}

// setFlag marks the flag as set, unlike the Set of its Value.
func setFlag(fs *flag.FlagSet, f *flag.Flag, value string) error {
	if isBool(f) {
		// The flag package's own text names neither value nor what is wanted.
		if _, err := strconv.ParseBool(value); err != nil {
			return errors.New("want true or false")
		}
	}
	return fs.Set(f.Name, value)
}

// badValue does not repeat the value of a flag that holds a secret.
func badValue(where string, f *flag.Flag, value string, err error) error {
	if slices.Contains(secretFlags, f.Name) {
		return usagef("%s: %w", where, err)
	}
	return usagef("%s: %q: %w", where, mask(value), err)
}

// lookupAny finds a flag of any command, on a flag set that nobody uses: defining
// flags resets their values.
func lookupAny(name string) *flag.Flag {
	for _, c := range commands() {
		if f := newFlagSet(c, &globals{}).Lookup(name); f != nil {
			return f
		}
	}
	return nil
}
