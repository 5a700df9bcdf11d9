package embedded

import "errors"

var (
	// ErrDirInUse is returned when another server, in this process or another,
	// runs on the same directory. Stop that one, or connect to it instead.
	ErrDirInUse = errors.New("embedded: directory is in use by another server")

	// ErrListen is returned when the address in Config.Listen is not to be had;
	// mostly another server has it. Connect to that one, or listen elsewhere.
	ErrListen = errors.New("embedded: address not available")

	// ErrClosed is returned for a connection to a server that is closed.
	// Restart brings it back.
	ErrClosed = errors.New("embedded: server is closed")
)
