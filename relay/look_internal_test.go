package relay

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// What is on the stream after the position is found, what is not is proved absent,
// and nothing is left behind.
func TestLookFindsWhatIsThereAndProvesTheRestAbsent(t *testing.T) {
	for name, adjust := range map[string]func(*jetstream.StreamConfig){
		"plain":       func(*jetstream.StreamConfig) {},
		"memory":      func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage },
		"direct gets": func(c *jetstream.StreamConfig) { c.AllowDirect = true },
		"deny delete": func(c *jetstream.StreamConfig) { c.DenyDelete, c.DenyPurge = true, true },
		"transformed": func(c *jetstream.StreamConfig) {
			c.SubjectTransform = &jetstream.SubjectTransformConfig{Source: "s.*", Destination: "t.{{wildcard(1)}}"}
		},
		"no consumer allowed": func(c *jetstream.StreamConfig) { c.MaxConsumers = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			withLook(t, func(t *testing.T, r *lookRig) {
				if r.stream().CachedInfo().Config.MaxConsumers == 1 {
					_, err := r.stream().CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "theirs"})
					r.must(err)
				}
				r.publish("early", "early")
				from := r.now()
				r.others(3000)
				a := r.publish("a", "a")
				r.others(50)
				b := r.publish("b", "b")
				r.others(7)
				wanted := want("b", "early", "a", "nowhere")
				res := r.look(from, wanted)
				r.wantSeqs(wanted, b, 0, a, 0)
				if !res.absent || res.next.Seq != r.now().Seq || res.read != 3059 || res.next.Holed {
					t.Fatalf("look() = %+v, want all 3059 read and absence proved", res)
				}
				if r.stream().CachedInfo().Config.MaxConsumers != 1 {
					r.wantNoConsumer()
				}
				// Nothing new: nothing to read, and still a proof.
				if res := r.look(res.next, want("nowhere")); !res.absent || res.read != 0 {
					t.Fatalf("look() = %+v, want absence proved without reading", res)
				}
			}, lookStream(adjust))
		})
	}
}

// Looking ends with the last event that is wanted.
func TestLookStopsWhenEverythingIsFound(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		from := r.now()
		r.others(10)
		a := r.publish("a", "a")
		r.others(5000)
		wanted := want("a")
		res := r.look(from, wanted)
		r.wantSeqs(wanted, a)
		if res.read != 11 || res.next.Seq != a {
			t.Fatalf("look() = %+v, want 11 messages read", res)
		}
		for _, wanted := range [][]wantedEvent{nil, wanted} {
			if res := r.look(from, wanted); res.read != 0 {
				t.Fatalf("look() for nothing = %+v", res)
			}
		}
	}, lookStream())
}

// No payload is transferred.
func TestLookTransfersLittle(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		from := r.now()
		for range 1000 {
			_, err := r.admin.Publish(t.Context(), "s.other", make([]byte, 10_000))
			r.must(err)
		}
		before := r.js.Conn().Stats()
		r.look(from, want("nowhere"))
		if n := r.js.Conn().Stats().InBytes - before.InBytes; n > 1000*1000 {
			t.Fatalf("%d bytes came, want headers only", n)
		}
	}, lookStream())
}

// Another event under a wanted message ID is reported as such and is not the event.
// The event itself, behind it, still is.
func TestLookTellsAnEventFromAnotherUnderItsMessageID(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		from := r.now()
		theirs := r.publish("theirs", "k1")
		time.Sleep(2 * time.Minute)
		r.publish("third", "k1")
		time.Sleep(2 * time.Minute)
		mine := r.publish("mine", "k1")
		wanted := []wantedEvent{{msgID: "k1", ceID: "mine"}, {msgID: "k1", ceID: "nowhere"}, {msgID: "theirs", ceID: "theirs"}}
		res := r.look(from, wanted)
		r.wantSeqs(wanted, mine, 0, 0)
		for _, w := range wanted[:2] {
			if w.other != "theirs" || w.otherSeq != theirs {
				t.Fatalf("%+v, want the other event at %d", w, theirs)
			}
		}
		if wanted[2].otherSeq != 0 || !res.absent {
			t.Fatalf("%+v, %+v: event IDs alone are no message IDs", res, wanted[2])
		}
	}, lookStream())
}

// Where a message is gone, what is not found may have been it. What is left is found
// all the same.
func TestLookProvesNothingWhereMessagesAreGone(t *testing.T) {
	long(t)
	for name, tt := range map[string]struct {
		cfg    func(*jetstream.StreamConfig)
		remove func(r *lookRig, a uint64) // b and c are next to a
		gone   int                        // of the three events
	}{
		"first deleted": {remove: func(r *lookRig, a uint64) { r.must(r.stream().DeleteMsg(r.t.Context(), a)) }, gone: 1},
		"middle deleted": {remove: func(r *lookRig, a uint64) {
			r.must(r.stream().DeleteMsg(r.t.Context(), a+1))
			r.must(r.stream().DeleteMsg(r.t.Context(), 5))
		}, gone: 1},
		"last deleted":  {remove: func(r *lookRig, a uint64) { r.must(r.stream().DeleteMsg(r.t.Context(), a+2)) }, gone: 1},
		"purged":        {remove: func(r *lookRig, a uint64) { r.must(r.stream().Purge(r.t.Context())) }, gone: 3},
		"partly purged": {remove: func(r *lookRig, a uint64) { r.must(r.stream().Purge(r.t.Context(), jetstream.WithPurgeSequence(a+2))) }, gone: 2},
		"aged": {
			cfg:    func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour },
			remove: func(*lookRig, uint64) { time.Sleep(2 * time.Hour) }, gone: 3,
		},
		"limit of a subject": {
			cfg: func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 },
			remove: func(r *lookRig, a uint64) {
				time.Sleep(time.Hour)
				for range 2 {
					_, err := r.admin.Publish(r.t.Context(), "s.b", nil)
					r.must(err)
				}
			}, gone: 1,
		},
		"limit of the stream": {
			cfg: func(c *jetstream.StreamConfig) { c.MaxMsgs = 2 }, remove: func(*lookRig, uint64) {}, gone: 1,
		},
	} {
		for _, storage := range []jetstream.StorageType{jetstream.FileStorage, jetstream.MemoryStorage} {
			t.Run(fmt.Sprint(name, " ", storage), func(t *testing.T) {
				withLook(t, func(t *testing.T, r *lookRig) {
					r.others(10)
					from := r.now()
					a := r.publish("a", "a")
					r.publish("b", "b")
					r.publish("c", "c")
					tt.remove(r, a)
					wanted := want("a", "b", "c")
					if tt.gone == 0 {
						wanted = append(wanted, want("nowhere")...)
					}
					res := r.look(from, wanted)
					gone := 0
					for _, w := range wanted {
						if w.seq == 0 {
							gone++
						}
					}
					if gone != tt.gone || res.absent || !res.next.Holed {
						t.Fatalf("%d not found, look() = %+v, want %d and no proof", gone, res, tt.gone)
					}
					if res.next.Seq != r.now().Seq {
						t.Fatalf("looked up to %d, want %d", res.next.Seq, r.now().Seq)
					}
					r.wantNoConsumer()
				}, lookStream(func(c *jetstream.StreamConfig) { c.Storage = storage }, func(c *jetstream.StreamConfig) {
					if tt.cfg != nil {
						tt.cfg(c)
					}
				}))
			})
		}
	}
}

// Messages removed before the position are nobody's concern.
func TestLookDoesNotMindWhatWentBeforeThePosition(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		r.others(10)
		r.must(r.stream().DeleteMsg(t.Context(), 4))
		r.must(r.stream().Purge(t.Context()))
		from := r.now()
		a := r.publish("a", "a")
		wanted := want("a", "nowhere")
		if res := r.look(from, wanted); !res.absent {
			t.Fatalf("look() = %+v, want absence proved", res)
		}
		r.wantSeqs(wanted, a, 0)
	}, lookStream())
}

// A look can be interrupted after any number of messages. It goes on from there,
// and does not forget that something was missing.
func TestLookGoesOnWhereItStopped(t *testing.T) {
	for _, hole := range []bool{false, true} {
		t.Run(fmt.Sprint("hole ", hole), func(t *testing.T) {
			withLook(t, func(t *testing.T, r *lookRig) {
				from := r.now()
				r.others(20)
				a := r.publish("a", "a")
				r.others(2500)
				b := r.publish("b", "b")
				if hole {
					r.must(r.stream().DeleteMsg(t.Context(), 3))
				}
				wanted := want("a", "b", "nowhere")
				var read int
				for pos, calls := from, 0; ; calls++ {
					res, err := look(t.Context(), r.js, pos, wanted, 700)
					r.must(err)
					read += res.read
					pos = res.next
					if res.absent && !res.done {
						t.Fatalf("look() = %+v, a proof before the end", res)
					}
					if res.done {
						if calls != 3 || res.absent == hole || res.next.Holed != hole {
							t.Fatalf("after %d calls look() = %+v", calls, res)
						}
						break
					}
					if res.read != 700 {
						t.Fatalf("look() = %+v, want 700 messages read", res)
					}
				}
				r.wantSeqs(wanted, a, b, 0)
				if n := r.stream().CachedInfo().State.Msgs; n != uint64(read) {
					t.Fatalf("%d messages read, want each once", read)
				}
			}, lookStream())
		})
	}
}

// A stream that removes what was handled proves nothing, and a look at it disturbs
// nobody: no consumer, nothing kept or removed for its sake.
func TestLookAtAStreamThatForgetsFindsWithoutProof(t *testing.T) {
	for _, retention := range []jetstream.RetentionPolicy{jetstream.WorkQueuePolicy, jetstream.InterestPolicy} {
		t.Run(retention.String(), func(t *testing.T) {
			withLook(t, func(t *testing.T, r *lookRig) {
				c, err := r.stream().CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "worker"})
				r.must(err)
				r.js = hooked{r.js, func(*jetstream.ConsumerInfo) { t.Fatal("a consumer was created") }}
				from := r.now()
				a := r.publish("a", "a")
				b := r.publish("b", "b")
				wanted := want("a", "b", "nowhere")
				if res := r.look(from, wanted); res.absent {
					t.Fatalf("look() = %+v, want no proof", res)
				}
				r.wantSeqs(wanted, a, b, 0)
				m, err := c.Next()
				r.must(err)
				r.must(m.DoubleAck(t.Context()))
				wanted = want("a", "b", "nowhere")
				if res := r.look(from, wanted); res.absent || !res.next.Holed {
					t.Fatalf("look() = %+v, want no proof", res)
				}
				r.wantSeqs(wanted, 0, b, 0)
				info := r.stream().CachedInfo()
				if info.State.Consumers != 1 || info.State.Msgs != 1 {
					t.Fatalf("state = %+v, want one consumer and one message", info.State)
				}
			}, lookStream(func(c *jetstream.StreamConfig) { c.Retention = retention }))
		})
	}
}

// Whatever happens to connection, server or consumer in the middle, the look goes on
// and reads no message of the stream in vain.
func TestLookSurvivesWhatHappensMeanwhile(t *testing.T) {
	for name, disturb := range map[string]func(r *lookRig){
		"connection cut": func(r *lookRig) { r.box.Cut(false) },
		"answers lost":   func(r *lookRig) { r.box.Mute(true); time.Sleep(3 * time.Second); r.box.Mute(false) },
		"server away": func(r *lookRig) {
			r.must(r.srv.Close())
			time.Sleep(3 * time.Second)
			r.must(r.srv.Restart(context.Background()))
		},
		"consumer deleted": func(r *lookRig) {
			for name := range r.stream().ConsumerNames(context.Background()).Name() {
				r.must(r.stream().DeleteConsumer(context.Background(), name))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			withLook(t, func(t *testing.T, r *lookRig) {
				from := r.now()
				r.others(10000)
				a := r.publish("a", "a")
				r.box.Delay(time.Millisecond) // each piece: reading takes seconds
				start := time.Now()
				go func() {
					time.Sleep(500 * time.Millisecond)
					disturb(r)
				}()
				wanted := want("a", "nowhere")
				res := r.look(from, wanted)
				r.wantSeqs(wanted, a, 0)
				took := time.Since(start)
				if took < 600*time.Millisecond || took > 20*time.Second {
					t.Fatalf("took %v, want it disturbed in the middle", took)
				}
				if !res.absent || res.read != 10001 {
					t.Fatalf("look() = %+v, want each message once and absence proved", res)
				}
				time.Sleep(2 * readAlive)
				r.wantNoConsumer()
			}, lookStream())
		})
	}
}

// A broker that stays away is an outage, told in bounded time. What was read till
// then need not be read again.
func TestLookGivesUpOnABrokerThatIsAway(t *testing.T) {
	for name, away := range map[string]func(r *lookRig, away bool){
		"refused": func(r *lookRig, away bool) {
			if away {
				r.box.Cut(true)
			} else {
				r.box.Cut(false)
			}
		},
		"mute": func(r *lookRig, away bool) { r.box.Mute(away) },
	} {
		t.Run(name, func(t *testing.T) {
			withLook(t, func(t *testing.T, r *lookRig) {
				from := r.now()
				r.others(10000)
				a := r.publish("a", "a")
				r.box.Delay(time.Millisecond)
				go func() {
					time.Sleep(500 * time.Millisecond)
					away(r, true)
				}()
				start := time.Now()
				wanted := want("a")
				res, err := look(t.Context(), r.js, from, wanted, noLimit)
				if err == nil || classify(err) != classOutage || time.Since(start) > 2*lookPatience {
					t.Fatalf("after %v: %v, want an outage", time.Since(start), err)
				}
				if res.done || res.read == 0 || res.next.Seq != uint64(res.read) {
					t.Fatalf("look() = %+v, want a part", res)
				}
				time.Sleep(2 * readAlive)
				r.wantNoConsumer()
				_, err = look(t.Context(), r.js, from, wanted, noLimit)
				if err == nil || classify(err) != classOutage {
					t.Fatalf("without a broker: %v, want an outage", err)
				}
				away(r, false)
				time.Sleep(20 * time.Second)
				rest := r.look(res.next, wanted)
				r.wantSeqs(wanted, a)
				if rest.read+res.read != 10001 {
					t.Fatalf("%d and %d messages read, want each once", res.read, rest.read)
				}
			}, lookStream())
		})
	}
}

// The caller's context ends a look at once, with what was found.
func TestLookEndsWithItsContext(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		from := r.now()
		r.others(10000)
		r.box.Delay(time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		start := time.Now()
		res, err := look(ctx, r.js, from, want("nowhere"), noLimit)
		if !errors.Is(err, context.DeadlineExceeded) || res.done || res.read == 0 {
			t.Fatalf("look() = %+v, %v, want a part", res, err)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Fatalf("took %v", took)
		}
		r.wantNoConsumer()
	}, lookStream())
}

// A stream that is not the one of the position is told by an error of its own, also
// when it changes in the middle.
func TestLookTellsWhenTheStreamIsAnotherOne(t *testing.T) {
	long(t)
	recreate := func(r *lookRig) {
		time.Sleep(time.Nanosecond) // the clock of a bubble stands still
		r.must(r.admin.DeleteStream(context.Background(), "S"))
		_, err := r.admin.CreateStream(context.Background(), lookStream())
		r.must(err)
	}
	for name, tt := range map[string]struct {
		change func(r *lookRig)
		want   error
	}{
		"deleted":   {func(r *lookRig) { r.must(r.admin.DeleteStream(context.Background(), "S")) }, jetstream.ErrStreamNotFound},
		"recreated": {recreate, errRecreated},
		"recreated and filled": {func(r *lookRig) {
			recreate(r)
			for range 11000 {
				_, err := r.admin.PublishAsync("s.other", nil)
				r.must(err)
			}
			<-r.admin.PublishAsyncComplete()
		}, errRecreated},
	} {
		for _, middle := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " middle ", middle), func(t *testing.T) {
				withLook(t, func(t *testing.T, r *lookRig) {
					from := r.now()
					r.others(10000)
					if middle {
						r.box.Delay(time.Millisecond)
						go func() {
							time.Sleep(500 * time.Millisecond)
							tt.change(r)
						}()
					} else {
						tt.change(r)
					}
					res, err := look(t.Context(), r.js, from, want("nowhere"), noLimit)
					if !errors.Is(err, tt.want) || res.done || res.absent || classify(err) != classOutage {
						t.Fatalf("look() = %+v, %v, want %v", res, err, tt.want)
					}
				}, lookStream())
			})
		}
	}
}

// A stream that ends before the position has lost messages: what was looked for may
// have been one of them.
func TestLookTellsWhenTheStreamEndsBeforeThePosition(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		r.others(10)
		from := r.now()
		from.Seq++
		res, err := look(t.Context(), r.js, from, want("nowhere"), noLimit)
		if !errors.Is(err, errRolledBack) || res.done || res.absent {
			t.Fatalf("look() = %+v, %v, want errRolledBack", res, err)
		}
	}, lookStream())
}

// lagging is a connection whose consumers see no message but those of one subject, as
// if they were on a replica that has not got the others yet.
type lagging struct {
	jetstream.JetStream
	subject string
}

func (l lagging) CreateConsumer(ctx context.Context, stream string, cfg jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	cfg.FilterSubjects = []string{l.subject}
	return l.JetStream.CreateConsumer(ctx, stream, cfg)
}

// A consumer may be on a replica that lags. What that replica does not have is found
// all the same, and its end is not the stream's.
func TestLookIsNotFooledByAReplicaThatLags(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		from := r.now()
		r.others(500)
		a := r.publish("a", "a") // missing in the middle
		r.others(20)
		for i := range 20 { // and at the end
			r.publish(fmt.Sprint("late-", i), fmt.Sprint("late-", i))
		}
		b := r.publish("b", "b")
		wanted := want("b", "nowhere", "a")
		res, err := look(t.Context(), lagging{r.js, "s.other"}, from, wanted, noLimit)
		r.must(err)
		r.wantSeqs(wanted, b, 0, a)
		if !res.done || !res.absent || res.read != 542 {
			t.Fatalf("look() = %+v, want all 542 messages read and absence proved", res)
		}
		r.wantNoConsumer()
	}, lookStream())
}

// Fifty thousand rows of unknown outcome at once, half of them stored, with others in
// between.
func TestLookForFiftyThousandAtOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	withLook(t, func(t *testing.T, r *lookRig) {
		from := r.now()
		const n = 50_000
		wanted := make([]wantedEvent, n)
		for i := range wanted {
			id := fmt.Sprint("id-", i)
			wanted[i] = wantedEvent{msgID: id, ceID: "event " + id}
			if i%2 == 0 {
				_, err := r.admin.PublishMsgAsync(eventMsg("s.a", "event "+id, id))
				r.must(err)
			}
		}
		<-r.admin.PublishAsyncComplete()
		res := r.look(from, wanted)
		if !res.absent || res.read != n/2 {
			t.Fatalf("look() = %+v", res)
		}
		for i, w := range wanted {
			if (w.seq > 0) != (i%2 == 0) || w.otherSeq > 0 {
				t.Fatalf("event %d: %+v", i, w)
			}
		}
	}, lookStream(func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }))
}

// Only a leader in touch with most of the replicas is believed.
func TestOnlyALeaderWithAQuorumIsBelieved(t *testing.T) {
	t.Parallel()
	peer := func(name string, active time.Duration) *jetstream.PeerInfo {
		return &jetstream.PeerInfo{Name: name, Active: active}
	}
	for _, tt := range []struct {
		name string
		info *jetstream.ClusterInfo
		want bool
	}{
		{"not clustered", nil, true},
		{"one replica", &jetstream.ClusterInfo{Leader: "a"}, true},
		{"no leader", &jetstream.ClusterInfo{}, false},
		{"all in touch", &jetstream.ClusterInfo{Leader: "a", Replicas: []*jetstream.PeerInfo{peer("b", 1), peer("c", time.Second)}}, true},
		{"one away", &jetstream.ClusterInfo{Leader: "a", Replicas: []*jetstream.PeerInfo{peer("b", time.Hour), peer("c", time.Second)}}, true},
		{"both away", &jetstream.ClusterInfo{Leader: "a", Replicas: []*jetstream.PeerInfo{peer("b", time.Hour), peer("c", 4*time.Second)}}, false},
		{"never heard", &jetstream.ClusterInfo{Leader: "a", Replicas: []*jetstream.PeerInfo{peer("b", 0), peer("c", 0)}}, false},
		{"a follower says so", &jetstream.ClusterInfo{Leader: "b", Replicas: []*jetstream.PeerInfo{peer("b", 1), peer("c", 1)}}, false},
		{"one of two replicas", &jetstream.ClusterInfo{Leader: "a", Replicas: []*jetstream.PeerInfo{peer("b", time.Hour)}}, false},
	} {
		if got := leads(tt.info); got != tt.want {
			t.Errorf("%s: leads() = %v, want %v", tt.name, got, tt.want)
		}
	}
}
