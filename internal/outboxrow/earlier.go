package outboxrow

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// Claims reads the earlier claims of the rows of one claim: many rows share few of
// them. The zero value is ready.
type Claims struct{ read map[string]*jetbox.Earlier }

// Of returns the earlier claim of an age, told where streams stood in JSON.
func (c *Claims) Of(age time.Duration, before string) (*jetbox.Earlier, error) {
	key := age.Truncate(time.Second).String() + before
	if e := c.read[key]; e != nil {
		return e, nil
	}
	e := &jetbox.Earlier{Age: age}
	if err := json.Unmarshal([]byte(before), &e.Before); err != nil {
		return nil, fmt.Errorf("read earlier claim: %w", err)
	}
	if c.read == nil {
		c.read = make(map[string]*jetbox.Earlier)
	}
	c.read[key] = e
	return e, nil
}
