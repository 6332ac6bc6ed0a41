package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/natscli"
)

// named is how many tasks a finding names; --fix takes them all.
const named = 20

// compareLane tells the lane's rows and messages apart, and reports what one side has and the other lacks.
func (e *examination) compareLane(ctx context.Context, l *Lane) error {
	open, more, err := e.table.open(ctx, l)
	if err != nil {
		return err
	}
	l.AtLeast = more
	for _, o := range open {
		l.Open++
		switch {
		case o.live:
			l.Running++
		case o.owner != "":
			l.LeaseEnded++
		}
		if o.lookInMS != nil {
			l.OnList++
		}
		if o.message {
			l.Published++
		}
		if o.owner != "" && o.live {
			e.hold(o)
		}
	}
	if e.broker == nil || e.broker.tasks == nil {
		return nil
	}
	info := e.broker.lane(l)
	e.judgeConsumer(l, info)
	if more || l.Messages > lookLimit {
		return nil // counted on both sides; too much to name
	}
	if l.Published == 0 && l.Messages == 0 {
		l.Compared = true
		return nil
	}
	lost, err := e.lost(ctx, l, open)
	if err != nil || len(lost) == 0 {
		return err
	}
	// Once more: a follower that was asked may not have had the newest messages yet.
	if err := wait(ctx, time.Second); err != nil {
		return err
	}
	again, err := e.lost(ctx, l, open)
	if err != nil {
		return err
	}
	lost = slices.DeleteFunc(lost, func(id int64) bool { return !slices.Contains(again, id) })
	e.reportLost(l, open, lost)
	return nil
}

// lost lists rows whose message should be in the stream and is not. They are read before the stream and once more
// after it: a row that has not moved in between had its message all the time, if it ever had.
func (e *examination) lost(ctx context.Context, l *Lane, open map[int64]row) ([]int64, error) {
	messages, whole, err := e.broker.messages(ctx, e.broker.names.Subject(l.BizType, l.Priority))
	if err != nil {
		return nil, err
	}
	if !whole {
		return nil, nil
	}
	l.Compared, l.Stale, l.Foreign = true, 0, 0
	there := make(map[int64]bool, len(messages))
	var ids []int64
	for _, m := range messages {
		switch m.installation {
		case e.report.installation:
		case "": // published by hand
			l.Stale++
			continue
		default:
			l.Foreign++
			continue
		}
		if o, ok := open[m.id]; ok && o.createdUS == m.createdUS && o.generation == m.generation {
			there[m.id] = true
			continue
		}
		ids = append(ids, m.id)
	}
	var missing []int64
	for id, o := range open {
		// One that runs under a lease that holds is settled without its message.
		if o.message && !o.live && !there[id] {
			missing = append(missing, id)
		}
	}
	now, err := e.table.states(ctx, append(slices.Clone(missing), ids...))
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		if s, ok := now[id]; !ok || s.finished {
			l.Stale++
		}
	}
	missing = slices.DeleteFunc(missing, func(id int64) bool {
		s, ok := now[id]
		return !ok || s.finished || s.live || s.generation != open[id].generation
	})
	slices.Sort(missing)
	return missing, nil
}

func (e *examination) reportLost(l *Lane, open map[int64]row, lost []int64) {
	l.Lost = int64(len(lost))
	if len(lost) == 0 {
		return
	}
	f := Finding{Level: Problem, Code: "message_lost", Where: l.key().String(),
		What: fmt.Sprintf("%s published and unfinished, and the stream has no message of %s", count(l.Lost, "task is", "tasks are"), them(l.Lost)),
		You:  "nothing, or run this command with --fix to have them published again now", fix: &fix{kind: fixLook, ids: lost}}
	var looks []int64
	for i, id := range lost {
		if i < named {
			f.IDs = append(f.IDs, ID(id))
		}
		if at := open[id].lookInMS; at != nil {
			looks = append(looks, *at)
		}
	}
	switch {
	case len(looks) == 0:
		f.Relay = fmt.Sprintf("finds them when the lane's older messages are gone (it compares every %v), at the latest an hour after, and publishes them again", e.every)
	case len(looks) == len(lost):
		f.Relay = fmt.Sprintf("looks at them again in %v to %v, and publishes them", ago(max(slices.Min(looks), 0)), ago(max(slices.Max(looks), 0)))
	default:
		f.Relay = fmt.Sprintf("looks at %d of them again in %v to %v, and finds the others when the lane's older messages are gone", len(looks), ago(max(slices.Min(looks), 0)), ago(max(slices.Max(looks), 0)))
	}
	e.report.add(f)
}

// judgeConsumer reports what is wrong between the lane's messages and its consumer.
func (e *examination) judgeConsumer(l *Lane, c *jetstream.ConsumerInfo) {
	where := l.key().String()
	if c == nil {
		if l.Messages > 0 && l.LiveWorkers > 0 {
			e.report.add(Finding{Level: Problem, Code: "consumer_missing", Where: where,
				What:  fmt.Sprintf("%s, and no consumer delivers them", count(int64(l.Messages), "message is there", "messages are there")),
				Relay: "nothing: workers make the consumer anew within 10 s, and it delivers all that is there",
				You:   "look at the log of a worker of the type, if it stays so"})
		}
		return
	}
	if limit := e.broker.tasks.CachedInfo().Config.MaxMsgsPerSubject; limit > 0 && l.Messages >= uint64(limit) {
		l.full = true
		e.report.add(Finding{Level: Notice, Code: "lane_full", Where: where, What: fmt.Sprintf("the lane holds %d messages, as many as it may", l.Messages),
			Relay: "publishes on as workers take messages away; the rest waits in the table", You: "nothing, or start more workers of the type"})
	}
	if c.Paused && !l.Paused {
		e.report.add(Finding{Level: Problem, Code: "consumer_paused", Where: where,
			What:  fmt.Sprintf("its consumer is paused for another %v, but its type is not", c.PauseRemaining.Round(time.Second)),
			Relay: "nothing", You: e.nats("consumer", "resume", c.Stream, c.Name)})
	}
	if c.Config.MaxDeliver != -1 {
		e.report.add(Finding{Level: Notice, Code: "consumer_setting", Where: where,
			What:  fmt.Sprintf("its consumer gives up after %d deliveries", c.Config.MaxDeliver),
			Relay: "nothing: the next worker that starts puts it back", You: e.nats("consumer", "edit", c.Stream, c.Name, "--max-deliver=-1")})
	}
	if known := c.NumPending + uint64(c.NumAckPending); l.Messages > known {
		l.orphan = true // looked at again in judgeOrphans
	}
}

// nats is a line for the nats CLI.
func (e *examination) nats(args ...string) string {
	return natscli.Line(natscli.Server{}.Command(e.broker.names, args...))
}

// judgeOrphans reports lanes of which the stream holds more than the consumer knows, and makes sure of it first: on a
// busy lane the numbers are not of one moment.
func (e *examination) judgeOrphans(ctx context.Context) error {
	if !slices.ContainsFunc(e.report.Lanes, func(l Lane) bool { return l.orphan }) {
		return nil
	}
	if err := wait(ctx, time.Second); err != nil {
		return err
	}
	for i := range e.report.Lanes {
		l := &e.report.Lanes[i]
		if !l.orphan {
			continue
		}
		orphans, err := e.broker.orphans(ctx, l)
		if err != nil {
			return err
		}
		if orphans == 0 {
			continue
		}
		e.report.add(Finding{Level: Problem, Code: "message_orphaned", Where: l.key().String(),
			What:  fmt.Sprintf("%s in the stream that the consumer has done with: it never delivers them", count(int64(orphans), "message is", "messages are")),
			Relay: "deletes the consumer when that has been so for two ack waits; workers make it anew, and it delivers all",
			You:   "nothing, or run this command with --fix to have it done now",
			fix:   &fix{kind: fixConsumer, lane: l.key()}})
	}
	return nil
}

// orphans counts messages that the consumer does not know of, if nothing moves while they are counted.
func (b *broker) orphans(ctx context.Context, l *Lane) (uint64, error) {
	subject, name := b.names.Subject(l.BizType, l.Priority), b.names.Consumer(l.BizType, l.Priority)
	before, err := b.tasks.Consumer(ctx, name)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	info, err := b.tasks.Info(ctx, jetstream.WithSubjectFilter(subject))
	if err != nil {
		return 0, err
	}
	after, err := b.tasks.Consumer(ctx, name)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	x, y := before.CachedInfo(), after.CachedInfo()
	holds, known := info.State.Subjects[subject], y.NumPending+uint64(y.NumAckPending)
	if x.Delivered.Consumer != y.Delivered.Consumer || x.AckFloor.Consumer != y.AckFloor.Consumer || holds <= known {
		return 0, nil
	}
	return holds - known, nil
}

func (l *Lane) key() laneKey { return laneKey{l.BizType, l.Priority} }

func count(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func them(n int64) string {
	if n == 1 {
		return "it"
	}
	return "them"
}

// wait is a pause between two looks.
func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
