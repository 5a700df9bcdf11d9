//go:build !unix

package pgtest

import (
	"fmt"
	"syscall"
)

// A home needs processes with owners and signals: there is none here.
type home struct{ path string }

func newHome() (*home, error) {
	return nil, fmt.Errorf("Unix: %w", errMissing)
}

func (h *home) own(string) error              { return errMissing }
func (h *home) log() string                   { return "" }
func (h *home) start(string, ...string) error { return errMissing }
func (h *home) run(string, ...string) error   { return errMissing }
func (h *home) running() bool                 { return false }
func (h *home) stop(syscall.Signal) error     { return errMissing }
func (h *home) pause() error                  { return errMissing }
func (h *home) resume()                       {}
func (h *home) remove()                       {}
