package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
)

const intro = `relay moves events from an outbox table to NATS JetStream.

usage: relay COMMAND [flags]

`

const outro = `
relay COMMAND -h shows a command's flags. A flag may also be given as
environment variable (--poll-interval as RELAY_POLL_INTERVAL) or in a YAML file
(--config FILE, with the flags' names as keys). The flag wins, then the
variable, then the file.

exit status: 0 fine, 1 failed, 2 wrong usage, 3 a check found something wrong

first steps:
  relay demo                                     the whole story in seconds
  relay run                                      outbox, relay and broker in one
  relay emit events.hello '{"x":1}'              append an event
  relay consume --durable d --print              see it arrive
`

// help writes the overview, or the help of the command that words name.
func help(w io.Writer, cmds []*command, words []string) error {
	name := strings.Join(slices.DeleteFunc(words, isHelpFlag), " ")
	if name == "" {
		return overview(w, cmds)
	}
	var group []*command
	for _, c := range cmds {
		if c.name == name {
			return commandHelp(w, c)
		}
		if strings.HasPrefix(c.name, name+" ") {
			group = append(group, c)
		}
	}
	if group == nil {
		return withHint(usagef("no help for %q: unknown command", name), "relay help lists the commands")
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "usage: relay %s COMMAND [flags]\n\n", name)
	list(&b, group)
	fmt.Fprintf(&b, "\nrelay %s COMMAND -h shows a command's flags.\n", name)
	_, err := w.Write(b.Bytes())
	return err
}

func overview(w io.Writer, cmds []*command) error {
	var b bytes.Buffer
	b.WriteString(intro)
	list(&b, cmds)
	b.WriteString(outro)
	_, err := w.Write(b.Bytes())
	return err
}

func list(b *bytes.Buffer, cmds []*command) {
	for _, c := range cmds {
		fmt.Fprintf(b, "  %-16s %s\n", c.name, c.short)
	}
}

// commandHelp writes everything about one command: each flag with its default
// and its environment variable.
func commandHelp(w io.Writer, c *command) error {
	var b bytes.Buffer
	usage := "usage: relay " + c.name + " [flags]"
	if c.args != "" {
		usage += " " + c.args
	}
	fmt.Fprintf(&b, "%s\n\n%s.\n", usage, strings.ToUpper(c.short[:1])+c.short[1:])
	if c.long != "" {
		fmt.Fprintf(&b, "\n%s\n", strings.TrimSpace(c.long))
	}
	if c.flags != nil {
		own := flag.NewFlagSet(c.name, flag.ContinueOnError)
		c.flags(own)
		b.WriteString("\nflags:\n")
		flagHelp(&b, own)
	}
	global := flag.NewFlagSet("", flag.ContinueOnError)
	(&globals{}).define(global)
	b.WriteString("\nglobal flags:\n")
	flagHelp(&b, global)
	_, err := w.Write(b.Bytes())
	return err
}

func flagHelp(b *bytes.Buffer, fs *flag.FlagSet) {
	fs.VisitAll(func(f *flag.Flag) {
		value, usage := flag.UnquoteUsage(f)
		if isBool(f) {
			value = ""
		}
		facts := envName(f.Name)
		if f.DefValue != "" && (!isBool(f) || f.DefValue == "true") {
			facts = "default " + f.DefValue + ", " + facts
		}
		fmt.Fprintf(b, "  %s (%s)\n", strings.TrimSpace("--"+f.Name+" "+value), facts)
		for line := range strings.Lines(usage) {
			fmt.Fprintf(b, "        %s\n", strings.TrimRight(line, "\n"))
		}
	})
}
