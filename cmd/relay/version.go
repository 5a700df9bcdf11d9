package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/nats-io/nats.go"
)

func versionCommand() *command {
	return &command{
		name:  "version",
		short: "show the version, commit, Go and NATS versions",
		run: func(_ context.Context, a *app, _ []string) error {
			_, err := fmt.Fprint(a.stdout, versionText(debug.ReadBuildInfo()))
			return err
		},
	}
}

func versionText(info *debug.BuildInfo, ok bool) string {
	version, commit, server := "(devel)", "unknown", "unknown"
	if ok {
		if info.Main.Version != "" {
			version = info.Main.Version
		}
		commit = commitOf(info)
		for _, dep := range info.Deps {
			if strings.HasPrefix(dep.Path, "github.com/nats-io/nats-server/") {
				server = dep.Version
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "relay       %s\n", version)
	fmt.Fprintf(&b, "commit      %s\n", commit)
	fmt.Fprintf(&b, "go          %s %s/%s\n", runtime.Version(), runtime.GOOS, runtime.GOARCH)
	fmt.Fprintf(&b, "nats.go     v%s\n", nats.Version)
	fmt.Fprintf(&b, "nats-server %s (embedded)\n", server)
	return b.String()
}

func commitOf(info *debug.BuildInfo) string {
	commit, modified := "unknown", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = " (modified)"
		}
	}
	return commit + modified
}
