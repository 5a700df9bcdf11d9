package main

import "context"

func demoCommand() *command {
	return &command{name: "demo", short: "x", run: func(context.Context, *app, []string) error { return nil }}
}
