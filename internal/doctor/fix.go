package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

type fixKind int

const (
	fixLook       fixKind = iota // look at these rows now
	fixRescan                    // compare all lanes from the start
	fixLetters                   // replay dead letters
	fixConsumer                  // delete a consumer that does not know its messages
	fixReposition                // give rows of another cluster a new place
)

// fix is what would mend a finding.
type fix struct {
	kind fixKind
	ids  []int64
	lane laneKey
}

// A Change runs f in a transaction that names who changes something.
type Change func(ctx context.Context, f func(pgx.Tx) error) error

// lookBatch bounds one transaction: it holds the locks of its rows.
const lookBatch = 1000

// Fix has the relay do at once what it would do about the findings of r, and notes in r.Fixed what was asked for. It
// reports whether that covers every problem; what is left is for a person.
func Fix(ctx context.Context, r *Report, s Servers, cfg outbox.RelayConfig, change Change, reason string) (all bool) {
	all = true
	rescanned := false
	for _, f := range r.Findings {
		if f.fix == nil {
			all = all && f.Level != Problem
			continue
		}
		did := Fixed{Code: f.Code, Where: f.Where}
		var err error
		if f.fix.kind == fixRescan && rescanned {
			did.Did = "asked for already"
		} else {
			did.Did, err = f.fix.apply(ctx, s, cfg, change, reason)
			rescanned = rescanned || f.fix.kind == fixRescan && err == nil
		}
		if err != nil {
			did.Error, all = err.Error(), false
		}
		r.Fixed = append(r.Fixed, did)
	}
	if s.NATS != nil && len(r.Fixed) > 0 {
		if err := outbox.WakeUp(s.NATS, cfg.Namespace); err == nil { // only sooner by some milliseconds
			_ = s.NATS.FlushTimeout(time.Second)
		}
	}
	return all
}

func (f *fix) apply(ctx context.Context, s Servers, cfg outbox.RelayConfig, change Change, reason string) (string, error) {
	call := func(sql string, args ...any) (string, error) {
		var got *string
		err := change(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, cfg.Schema.Render(sql), args...).Scan(&got) })
		if err != nil || got == nil {
			return "", err
		}
		return *got, nil
	}
	switch f.kind {
	case fixLook:
		n := 0
		for ids := f.ids; len(ids) > 0; {
			some := ids[:min(len(ids), lookBatch)]
			ids = ids[len(some):]
			err := change(ctx, func(tx pgx.Tx) error {
				var changed int
				err := tx.QueryRow(ctx, cfg.Schema.Render(`SELECT count(*) FILTER (WHERE l.changed) FROM {{schema}}.look_again($1::bigint[], $2::text) AS l`), some, reason).Scan(&changed)
				n += changed
				return err
			})
			if err != nil {
				return "", err
			}
		}
		return fmt.Sprintf("%d of %d tasks put on the work list for now; the others have moved on", n, len(f.ids)), nil
	case fixRescan:
		n, err := call(`SELECT {{schema}}.rescan($1::text)::text`, reason)
		return "asked all relays to compare every lane from the start (loss " + n + ")", err
	case fixLetters:
		_, err := call(`SELECT {{schema}}.replay_letters($1::text)::text`, reason)
		return "asked a relay to send all dead letters again", err
	case fixReposition:
		did, err := Reposition(ctx, s, cfg, change, false, reason)
		return fmt.Sprintf("gave %d rows a new place", did.Rows), err
	case fixConsumer:
		names := outbox.Names{Namespace: cfg.Namespace, APIPrefix: cfg.APIPrefix}
		js, err := names.JetStream(s.NATS)
		if err != nil {
			return "", err
		}
		name := names.Consumer(f.lane.bizType, f.lane.priority)
		err = change(ctx, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, cfg.Schema.Render(`SELECT {{schema}}.audit_consumer($1::text, $2::text, $3::text)`), f.lane.bizType, name, reason); err != nil {
				return err
			}
			err := js.DeleteConsumer(ctx, names.Stream(), name) // when it fails, nothing is written down either
			if errors.Is(err, jetstream.ErrConsumerNotFound) {
				return nil
			}
			return err
		})
		if err != nil {
			return "", err
		}
		return "deleted consumer " + name + ": workers make it anew, and it delivers all that is there", nil
	}
	return "", fmt.Errorf("unknown fix %d", f.kind)
}

// Reposition is outbox's, with a line in the audit when it did something.
func Reposition(ctx context.Context, s Servers, cfg outbox.RelayConfig, change Change, force bool, reason string) (outbox.Repositioned, error) {
	did, err := cfg.Schema.Reposition(ctx, s.Pool, force)
	if err != nil || !did.Cluster && !did.ForeignRows {
		return did, err
	}
	err = change(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, cfg.Schema.Render(`SELECT {{schema}}.audit_reposition($1::text, $2::jsonb)`), reason, did)
		return err
	})
	return did, err
}
