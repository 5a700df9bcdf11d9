package consumer

import (
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
)

// The keeper may name a message while its worker decodes it: the race detector
// watches.
func TestMessageIsNamedWhileItIsDecoded(t *testing.T) {
	t.Parallel()
	msg := &nats.Msg{Subject: "s", Header: nats.Header{jetbox.HeaderCEID: {"id"}}}
	m := &message{msg: msg, d: newDelivery(msg, &nats.MsgMetadata{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.d.decode(msg)
	}()
	for _, a := range m.attrs() {
		if a.Key == "event" && a.Value.String() != "id" {
			t.Errorf("event = %q, want its ID", a.Value)
		}
	}
	<-done
}
