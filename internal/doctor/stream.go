package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/natscli"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// A broker looks at the streams of one installation.
type broker struct {
	nc    *nats.Conn
	js    jetstream.JetStream
	names outbox.Names
	cfg   outbox.RelayConfig

	tasks     jetstream.Stream // nil: not there
	consumers map[string]*jetstream.ConsumerInfo
	subjects  map[string]uint64
	checks    map[string]outbox.StreamCheck
}

// streams fills in the three streams and reports what is wrong with each by itself.
func (b *broker) streams(ctx context.Context, r *Report) error {
	checks, err := outbox.CheckStreams(ctx, b.nc, b.cfg, r.installation)
	if err != nil {
		return err
	}
	b.checks = make(map[string]outbox.StreamCheck)
	for _, c := range checks {
		b.checks[c.Stream] = c
	}
	for _, name := range []string{b.names.Stream(), b.names.DeadStream(), b.names.EventStream()} {
		s, err := b.js.Stream(ctx, name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			r.NATS.Streams = append(r.NATS.Streams, Stream{Name: name})
			r.add(Finding{Level: Problem, Code: "stream_missing", Where: name, What: "the stream does not exist",
				Relay: "makes it within 5 s and fills it from the table", You: "start a relay, if none runs"})
			continue
		}
		if err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
		b.stream(r, s.CachedInfo())
		if name == b.names.Stream() {
			b.tasks = s
		}
	}
	if b.tasks == nil {
		return nil
	}
	info, err := b.tasks.Info(ctx, jetstream.WithSubjectFilter(b.names.Subject("*", "*")))
	if err != nil {
		return fmt.Errorf("stream %s: %w", b.names.Stream(), err)
	}
	b.subjects = info.State.Subjects
	b.consumers = make(map[string]*jetstream.ConsumerInfo)
	list := b.tasks.ListConsumers(ctx)
	for c := range list.Info() {
		b.consumers[c.Name] = c
	}
	if err := list.Err(); err != nil {
		return fmt.Errorf("consumers of %s: %w", b.names.Stream(), err)
	}
	return nil
}

func (b *broker) stream(r *Report, info *jetstream.StreamInfo) {
	name, owner := info.Config.Name, info.Config.Metadata[outbox.MetadataInstallation]
	s := Stream{Name: name, Exists: true, Installation: owner, Created: info.Created.UTC(), Messages: info.State.Msgs,
		Bytes: info.State.Bytes, LastSequence: info.State.LastSeq}
	if info.Cluster != nil {
		s.Leader = info.Cluster.Leader
		if s.Leader == "" {
			r.add(Finding{Level: Problem, Code: "stream_without_leader", Where: name, What: "the stream has no leader: most of its servers are away",
				Relay: "waits, tasks stay in the table", You: "bring the nats-servers back"})
		}
		for _, p := range info.Cluster.Replicas {
			if p.Offline || !p.Current {
				r.add(Finding{Level: Notice, Code: "replica_behind", Where: name, What: fmt.Sprintf("its replica on %s is offline or behind", p.Name),
					Relay: "nothing, it publishes to the leader", You: "look at that nats-server: one more loss may stop the stream"})
			}
		}
	}
	r.NATS.Streams = append(r.NATS.Streams, s)
	if r.installation != "" && owner != "" && owner != r.installation {
		r.add(Finding{Level: Problem, Code: "stream_foreign", Where: name,
			What:  fmt.Sprintf("the stream belongs to installation %s, this database is %s", owner, r.installation),
			Relay: "refuses to start, and so do workers", You: "use another TASKRELAY_NATS_URL or set TASKRELAY_NAMESPACE; if that database is gone, delete the stream"})
		return
	}
	check := b.checks[name]
	if len(check.Unsafe) > 0 {
		r.add(Finding{Level: Problem, Code: "stream_unsafe", Where: name, What: "the stream would lose tasks: " + strings.Join(check.Unsafe, ", "),
			Relay: "publishes nothing until it is mended, tasks stay in the table", You: natscli.Line(natscli.Server{}.Command(b.names, "stream", "edit", name))})
	}
	for _, d := range check.Differs {
		r.add(Finding{Level: Notice, Code: "stream_setting", Where: name, What: d + " (by the environment of this command)",
			Relay: "leaves it as it is", You: "nothing, if it is meant"})
	}
	if name == b.names.Stream() && r.Postgres.streamCreated != nil && !r.Postgres.streamCreated.Equal(info.Created.Truncate(time.Microsecond)) {
		r.add(Finding{Level: Problem, Code: "stream_made_anew", Where: name, What: "the stream is not the one that tasks were published to",
			Relay: "sees that within 5 s and publishes all unfinished tasks again", You: "start a relay, if none runs", fix: &fix{kind: fixRescan}})
	}
	if at := r.Postgres.deadStreamCreated; name == b.names.DeadStream() && at != nil {
		switch {
		case !at.Equal(info.Created.Truncate(time.Microsecond)):
			r.add(Finding{Level: Notice, Code: "letters_replayed", Where: name, What: "the stream is not the one that dead letters were sent to",
				Relay: "replays all letters from the table within 5 s", You: "start a relay, if none runs"})
		case info.State.Msgs < uint64(r.Postgres.deadLettered):
			r.add(Finding{Level: Problem, Code: "letters_missing", Where: name,
				What:  fmt.Sprintf("%d dead letters, but %d tasks are dead", info.State.Msgs, r.Postgres.deadLettered),
				Relay: "nothing by itself: letters that somebody deleted are not sent again", You: "run this command with --fix to have them sent again",
				fix: &fix{kind: fixLetters}})
		}
	}
}

// lane fills in what the stream holds of a lane.
func (b *broker) lane(l *Lane) *jetstream.ConsumerInfo {
	l.Messages = b.subjects[b.names.Subject(l.BizType, l.Priority)]
	c := b.consumers[b.names.Consumer(l.BizType, l.Priority)]
	if c != nil {
		l.Consumer, l.Pending, l.AckPending, l.Redelivered = true, c.NumPending, c.NumAckPending, c.NumRedelivered
	}
	return c
}

// A message is what the headers of one say.
type message struct {
	installation string
	id           int64
	generation   int
	createdUS    int64
}

const (
	batch      = 1000
	batchBytes = 8 << 20
	laneBytes  = 64 << 20 // of one lane's messages; what is beyond is not compared
)

// messages reads the messages of a subject, the oldest first. whole is false when there are too many.
func (b *broker) messages(ctx context.Context, subject string) (got []message, whole bool, err error) {
	inbox := b.nc.NewInbox()
	sub, err := b.nc.SubscribeSync(inbox)
	if err != nil {
		return nil, false, err
	}
	defer func() { _ = sub.Unsubscribe() }()
	next, size := uint64(1), 0
	for {
		q, err := json.Marshal(map[string]any{"seq": next, "next_by_subj": subject, "batch": batch, "max_bytes": batchBytes})
		if err != nil {
			return nil, false, err
		}
		if err := b.nc.PublishRequest(b.names.API()+"DIRECT.GET."+b.names.Stream(), inbox, q); err != nil {
			return nil, false, err
		}
		more := false
		for {
			m, err := sub.NextMsgWithContext(ctx)
			if err != nil {
				return nil, false, fmt.Errorf("read messages of %s: %w", subject, err)
			}
			if status := m.Header.Get("Status"); status != "" {
				if status == "204" || status == "404" { // the end of the batch, or nothing there
					break
				}
				return nil, false, fmt.Errorf("read messages of %s: %s %s", subject, status, m.Header.Get("Description"))
			}
			seq, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
			if err != nil {
				return nil, false, fmt.Errorf("read messages of %s: no sequence", subject)
			}
			next, more = seq+1, true
			size += len(m.Data)
			got = append(got, parse(m.Header))
		}
		if !more {
			return got, true, nil
		}
		if len(got) >= lookLimit || size >= laneBytes {
			return got, false, nil
		}
	}
}

func parse(h nats.Header) (m message) {
	m.installation = h.Get(outbox.HeaderInstallation)
	m.id, _ = strconv.ParseInt(h.Get(outbox.HeaderID), 10, 64)
	m.generation, _ = strconv.Atoi(h.Get(outbox.HeaderGeneration))
	m.createdUS, _ = strconv.ParseInt(h.Get(outbox.HeaderCreatedAt), 10, 64)
	return m
}
