//go:build !unix

package bench

import (
	"errors"
	"time"
)

func cpuTime() (used time.Duration, err error) { return 0, errors.ErrUnsupported }
