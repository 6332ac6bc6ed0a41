package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	streamTick      = 5 * time.Second
	unknownTypeTick = 20 * time.Second
)

// streamConfigs are the three streams as the relay makes them. No MaxAge on tasks: one that expired in silence would be
// lost work. The server remembers a message id for 30 s only (about 230 B each): ids are an optimisation, the claim is
// what keeps a task from running twice.
func (r *Relay) streamConfigs() []jetstream.StreamConfig { return streamConfigs(r.cfg, r.installation) }

func streamConfigs(cfg RelayConfig, installation string) []jetstream.StreamConfig {
	names := Names{Namespace: cfg.Namespace}
	mine := map[string]string{MetadataInstallation: installation}
	base := jetstream.StreamConfig{Storage: jetstream.FileStorage, Replicas: cfg.Replicas, AllowDirect: true, Metadata: mine}
	tasks, dead, events := base, base, base

	tasks.Name, tasks.Subjects = names.Stream(), []string{names.subject("tasks.*.*")}
	tasks.Description = "taskrelay: tasks on their way to workers"
	tasks.Retention, tasks.Duplicates = jetstream.WorkQueuePolicy, 30*time.Second
	tasks.Discard, tasks.DiscardNewPerSubject, tasks.MaxMsgsPerSubject = jetstream.DiscardNew, true, cfg.MaxPerSubject

	dead.Name, dead.Subjects = names.DeadStream(), []string{names.subject("dead.*.*")}
	dead.Description = "taskrelay: the dead letter of each dead task"
	dead.Retention, dead.MaxMsgsPerSubject, dead.Duplicates = jetstream.LimitsPolicy, 1, 30*time.Second

	events.Name, events.Subjects = names.EventStream(), []string{names.subject("events.*.*")}
	events.Description = "taskrelay: failed, dead and compensation_failed, for notifiers"
	events.Retention, events.MaxAge, events.Duplicates = jetstream.LimitsPolicy, 7*24*time.Hour, 2*time.Minute
	return []jetstream.StreamConfig{tasks, dead, events}
}

// ensureStreams creates the streams that are missing and refuses those that are not ours or would lose tasks.
// Other settings that an operator changed are reported, never changed back.
func (r *Relay) ensureStreams(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r.mu.Lock()
	letters := r.deadHighest // before we ask, or a letter stored meanwhile would look like a loss
	r.mu.Unlock()
	var unsafe error
	for _, want := range r.streamConfigs() {
		s, err := r.js.Stream(ctx, want.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			s, err = r.js.CreateStream(ctx, want)
			if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // by another relay, just now
				s, err = r.js.Stream(ctx, want.Name)
			} else if err == nil {
				r.log.Info().Str("stream", want.Name).Msg("stream created")
			}
		}
		if err != nil {
			return r.explainStream(ctx, want, err)
		}
		if err := r.checkStream(ctx, want, s.CachedInfo().Config); err != nil {
			if _, ok := errors.AsType[unsafeStreamError](err); !ok {
				return err
			}
			unsafe = cmp.Or(unsafe, err)
		}
		if want.Name == r.names.Stream() {
			r.mu.Lock()
			r.sizeLimit = s.CachedInfo().Config.MaxMsgSize
			r.mu.Unlock()
			if err := r.checkLoss(ctx, s.CachedInfo()); err != nil {
				return err
			}
		}
		if want.Name == r.names.DeadStream() {
			r.mu.Lock()
			r.deadCreated = s.CachedInfo().Created
			r.mu.Unlock()
			if s.CachedInfo().State.LastSeq < letters {
				if err := r.forgetLetters(ctx); err != nil {
					return err
				}
			}
		}
	}
	r.mu.Lock()
	r.streamsKnown, r.unsafe = unsafe == nil, unsafe
	r.mu.Unlock()
	return unsafe
}

// An unsafeStreamError says that a stream would lose tasks with the settings it has. As long as it does, nothing is
// published; tasks wait in the table, and the looks at the stream go on until somebody has mended it.
type unsafeStreamError struct{ error }

// halted reports whether nothing may be published now.
func (r *Relay) halted() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unsafe != nil
}

// explainStream names the other stream when subjects overlap (10065).
func (r *Relay) explainStream(ctx context.Context, want jetstream.StreamConfig, err error) error {
	var e *jetstream.APIError
	if errors.As(err, &e) && e.ErrorCode == 10065 {
		names := r.js.StreamNames(ctx, jetstream.WithStreamListSubject(want.Subjects[0]))
		var others []string
		for n := range names.Name() {
			others = append(others, n)
		}
		return fatalError{fmt.Errorf("stream %s cannot be created: %s already takes the subjects %s: delete it, or set a NAMESPACE of our own",
			want.Name, strings.Join(others, ", "), want.Subjects[0])}
	}
	return fmt.Errorf("create stream %s: %w", want.Name, err)
}

func (r *Relay) checkStream(ctx context.Context, want, have jetstream.StreamConfig) error {
	owner, ok := have.Metadata[MetadataInstallation]
	if ok && owner != r.installation {
		return fatalError{fmt.Errorf("stream %s belongs to installation %s, this database is %s: one stream serves one installation; use another NATS_URL or set NAMESPACE (or delete the stream, if that database is gone)",
			want.Name, owner, r.installation)}
	}
	if unsafe := unsafeSettings(want, have); len(unsafe) > 0 {
		return unsafeStreamError{fmt.Errorf("stream %[1]s would lose tasks, nothing is published: %[2]s: mend it with \"%[3]s stream edit %[1]s\", or delete it and the relay makes it anew",
			want.Name, strings.Join(unsafe, ", "), r.names.natsCLI())}
	}
	if !ok { // made by hand with good settings: it becomes ours
		have.Metadata = maps.Clone(have.Metadata)
		if have.Metadata == nil {
			have.Metadata = map[string]string{}
		}
		have.Metadata[MetadataInstallation] = r.installation
		if _, err := r.js.UpdateStream(ctx, have); err != nil {
			return fmt.Errorf("mark stream %s as ours: %w", want.Name, err)
		}
	}
	r.reportDrift(want, have)
	return nil
}

// unsafeSettings lists what would drop messages in silence or hide our subjects.
func unsafeSettings(want, have jetstream.StreamConfig) (unsafe []string) {
	if want.Retention != have.Retention {
		unsafe = append(unsafe, fmt.Sprintf("retention is %v, must be %v", have.Retention, want.Retention))
	}
	if want.Retention == jetstream.WorkQueuePolicy {
		if have.Discard != want.Discard {
			unsafe = append(unsafe, "discard policy is old, must be new (--discard new)")
		}
		// A lane that is full would lose its oldest message for each new one. They are found again, but by a look that
		// waits longer each time.
		if want.DiscardNewPerSubject && !have.DiscardNewPerSubject && have.MaxMsgsPerSubject > 0 {
			unsafe = append(unsafe, "discard per subject is off, must be on (--discard-per-subject)")
		}
		if have.MaxAge != 0 {
			unsafe = append(unsafe, fmt.Sprintf("max age is %v, must be none (--max-age 0)", have.MaxAge))
		}
	}
	for _, s := range want.Subjects {
		if !slices.ContainsFunc(have.Subjects, func(h string) bool { return covers(h, s) }) {
			unsafe = append(unsafe, fmt.Sprintf("subjects are %v, must have %s", have.Subjects, s))
		}
	}
	if have.NoAck {
		unsafe = append(unsafe, "no-ack is set")
	}
	return unsafe
}

// covers reports whether the subject filter a takes all that b does.
func covers(a, b string) bool {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	for i, t := range as {
		if t == ">" {
			return i < len(bs)
		}
		if i >= len(bs) || t != "*" && t != bs[i] {
			return false
		}
	}
	return len(as) == len(bs)
}

// streamDrift lists settings that are not as the relay would make them, and lose nothing: wanted and actual, by name.
func streamDrift(want, have jetstream.StreamConfig) map[string][2]any {
	drift := map[string][2]any{}
	add := func(name string, w, h any) {
		if w != h {
			drift[name] = [2]any{w, h}
		}
	}
	// We set no limits of these three. A lane waits where one is reached, but a message that is larger than
	// max_msg_size makes its task dead.
	const none = int64(-1)
	add("max_msgs", none, cmp.Or(have.MaxMsgs, none))
	add("max_bytes", none, cmp.Or(have.MaxBytes, none))
	add("max_msg_size", none, cmp.Or(int64(have.MaxMsgSize), none))
	if want.MaxMsgsPerSubject > 0 { // the server says -1 for no limit
		add("max_msgs_per_subject", want.MaxMsgsPerSubject, have.MaxMsgsPerSubject)
	}
	add("discard_new_per_subject", want.DiscardNewPerSubject, have.DiscardNewPerSubject)
	add("replicas", want.Replicas, have.Replicas)
	add("duplicate_window", want.Duplicates, have.Duplicates)
	add("allow_direct", want.AllowDirect, have.AllowDirect)
	add("storage", want.Storage, have.Storage)
	return drift
}

func (r *Relay) reportDrift(want, have jetstream.StreamConfig) {
	for name, v := range streamDrift(want, have) {
		key := want.Name + "." + name + "=" + fmt.Sprint(v[1])
		if _, said := r.said.LoadOrStore(key, true); said {
			continue
		}
		r.log.Warn().Str("stream", want.Name).Str("setting", name).Interface("configured", v[0]).Interface("actual", v[1]).
			Msg("stream setting differs, left as it is")
	}
}

// watchStreams looks every few seconds whether the streams are there and ours, makes them anew when they were deleted,
// and reports tasks that wait for a worker nobody has started.
func (r *Relay) watchStreams(ctx context.Context) (time.Duration, error) {
	if !r.nc.IsConnected() {
		return streamTick, nil
	}
	if err := r.ensureStreams(ctx); err != nil {
		r.mu.Lock()
		r.streamsKnown = false
		r.mu.Unlock()
		r.reported = time.Time{} // with the servers away workers could not say that they are alive either
		return 0, err
	}
	r.mu.Lock()
	created := r.deadCreated
	r.mu.Unlock()
	if err := r.replayLetters(ctx, created); err != nil {
		return 0, err
	}
	if now := time.Now(); r.reported.IsZero() {
		r.reported = now // workers that start with us have not registered yet
	} else if now.Sub(r.reported) >= unknownTypeTick {
		r.reported = now
		if err := r.reportUnknownTypes(ctx); err != nil {
			return 0, err
		}
	}
	return streamTick, nil
}

const knownTypesSQL = `-- taskrelay: types of live workers
SELECT DISTINCT t FROM {{schema}}.worker AS w CROSS JOIN LATERAL unnest(w.biz_types) AS t
WHERE w.seen_at > now() - interval '30 seconds'`

// reportUnknownTypes names types whose messages wait although no live worker knows them.
func (r *Relay) reportUnknownTypes(ctx context.Context) error {
	known := map[string]bool{}
	err := r.query(ctx, knownTypesSQL, nil, func(rows pgx.Rows) error {
		var t string
		err := rows.Scan(&t)
		known[t] = true
		return err
	})
	if err != nil {
		return fmt.Errorf("types of live workers: %w", err)
	}
	held, _, _, _ := r.heldLanes(func(l *lane) bool { return !known[l.bizType] })
	if len(held) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	s, err := r.js.Stream(ctx, r.names.Stream())
	if err != nil {
		return fmt.Errorf("look for tasks without workers: %w", err)
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(r.names.subject("tasks.>")))
	if err != nil {
		return fmt.Errorf("look for tasks without workers: %w", err)
	}
	for _, l := range held {
		if n := info.State.Subjects[r.names.Subject(l.bizType, l.priority)]; n > 0 {
			r.log.Warn().Str("biz_type", l.bizType).Str("priority", l.priority).Uint64("count", n).
				Msg("tasks wait: no live worker knows their type; start one that has it")
		}
	}
	return nil
}
