package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
)

// A command is one verb of the binary. Its flags are set before run is called.
type command struct {
	name  string // one or two words
	args  string // what stands after the name, for help
	short string // one line
	long  string // the rest of its help

	minArgs, maxArgs int

	flags func(*flag.FlagSet)
	run   func(ctx context.Context, a *app, args []string) error
}

// app is what a command gets from the process. Nothing in this package reads
// the environment or the standard streams another way.
type app struct {
	environ        []string
	stdin          io.Reader
	stdout, stderr io.Writer
	log            *slog.Logger
	global         *globals
	secrets        *redactor
}

// commands returns every command, in the order of the help text, with flags of
// its own each time.
func commands() []*command {
	return []*command{
		demoCommand(),
		runCommand(),
		migrateCommand(),
		emitCommand(),
		consumeCommand(),
		statusCommand(),
		outboxListCommand(),
		outboxShowCommand(),
		outboxRetryCommand(),
		outboxDiscardCommand(),
		dlqListCommand(),
		dlqShowCommand(),
		dlqReplayCommand(),
		dlqDiscardCommand(),
		dlqPruneCommand(),
		benchCommand(),
		versionCommand(),
	}
}

// planned are commands of a later version: named, so that a script written for
// it gets a clear answer, and not offered.
var planned = []string{"doctor", "audit"}

// run is the program: main without the process around it.
func run(ctx context.Context, args, environ []string, stdin io.Reader, stdout, stderr io.Writer) int {
	secrets := &redactor{}
	a := &app{
		environ: environ,
		stdin:   stdin,
		stdout:  stdout,
		stderr:  secrets.writer(stderr),
		global:  &globals{},
		secrets: secrets,
	}
	return report(a.stderr, a.dispatch(ctx, args))
}

func (a *app) dispatch(ctx context.Context, args []string) error {
	cmds := commands()
	cmd, rest, err := choose(cmds, args)
	if errors.Is(err, errHelp) {
		return help(a.stdout, cmds, rest)
	} else if err != nil {
		return err
	}
	fs := newFlagSet(cmd, a.global)
	positional, err := parseArgs(fs, rest)
	if errors.Is(err, errHelp) {
		return commandHelp(a.stdout, cmd)
	} else if err != nil {
		return withHint(err, fmt.Sprintf("relay %s -h lists its flags", cmd.name))
	}
	if err := fillFlags(fs, a.environ, &a.global.config); err != nil {
		return err
	}
	if err := countArgs(cmd, positional); err != nil {
		return err
	}
	if err := a.global.finish(a.environ); err != nil {
		return err
	}
	a.secrets.add(a.global.passwords()...)
	a.log = a.global.logger(a.stderr)
	return cmd.run(ctx, a, positional)
}

// choose finds the command that the words of args name, and returns the other
// arguments. For a request for help it returns errHelp and the words after it.
func choose(cmds []*command, args []string) (*command, []string, error) {
	first := wordAt(args)
	if first < 0 {
		if len(args) == 0 {
			return nil, nil, withHint(usagef("no command given"), "relay help lists them; relay demo shows the whole story")
		}
		if slices.ContainsFunc(args, isHelpFlag) {
			return nil, nil, errHelp
		}
		if i := slices.IndexFunc(args, isVersionFlag); i >= 0 {
			return choose(cmds, slices.Concat([]string{"version"}, without(args, i)))
		}
		return nil, nil, withHint(usagef("no command given, only flags"), "relay help lists the commands")
	}
	word, rest := args[first], without(args, first)
	if word == "help" {
		return nil, rest, errHelp
	}
	if slices.Contains(planned, word) {
		return nil, nil, fmt.Errorf("%s is not in this version yet", word)
	}
	var group []string
	for _, c := range cmds {
		if c.name == word {
			return c, rest, nil
		}
		if verb, ok := strings.CutPrefix(c.name, word+" "); ok {
			group = append(group, verb)
		}
	}
	if group == nil {
		err := usagef("unknown command %q", word)
		if near := nearest(word, commandWords(cmds)); near != "" {
			return nil, nil, withHint(err, fmt.Sprintf("did you mean %s? relay help lists the commands", near))
		}
		return nil, nil, withHint(err, "relay help lists the commands")
	}
	return chooseVerb(cmds, word, group, rest)
}

func chooseVerb(cmds []*command, word string, group, rest []string) (*command, []string, error) {
	list := strings.Join(group, ", ")
	second := wordAt(rest)
	if second < 0 {
		if slices.ContainsFunc(rest, isHelpFlag) {
			return nil, []string{word}, errHelp
		}
		return nil, nil, usagef("%s needs one of: %s", word, list)
	}
	name := word + " " + rest[second]
	for _, c := range cmds {
		if c.name == name {
			return c, without(rest, second), nil
		}
	}
	return nil, nil, usagef("unknown command %q: %s has %s", name, word, list)
}

// wordAt returns the index of the first argument that is no flag and no flag's
// value, or -1. A flag may stand before its command.
func wordAt(args []string) int {
	for i := 0; i < len(args); i++ {
		name, hasValue, isFlag := flagName(args[i])
		if !isFlag {
			return i
		}
		if hasValue || isHelpFlag(args[i]) {
			continue
		}
		if f := lookupAny(name); f != nil && !isBool(f) {
			i++
		}
	}
	return -1
}

func without(args []string, i int) []string {
	return slices.Concat(args[:i], args[i+1:])
}

func commandWords(cmds []*command) []string {
	var words []string
	for _, c := range cmds {
		word, _, _ := strings.Cut(c.name, " ")
		words = append(words, word)
	}
	return slices.Compact(words)
}

func countArgs(cmd *command, args []string) error {
	usage := "relay " + strings.TrimSpace(cmd.name+" "+cmd.args)
	switch {
	case len(args) < cmd.minArgs:
		return withHint(usagef("%s: missing argument", cmd.name), "usage: "+usage)
	case len(args) > cmd.maxArgs && cmd.maxArgs >= 0:
		return withHint(usagef("%s: unexpected argument %q", cmd.name, args[cmd.maxArgs]), "usage: "+usage)
	}
	return nil
}
