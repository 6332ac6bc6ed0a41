package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
)

// A stream has lost messages when it was created anew, or when it hands out a sequence again: its last one, or one that
// it acknowledges now, is at or below one that it had acknowledged before. Whoever sees it counts a loss in the table
// installation; every relay then reconciles all its lanes from the start.

const streamStateSQL = `-- taskrelay: stream state
SELECT i.stream_created, (SELECT max(l.max_seq) FROM {{schema}}.lane AS l WHERE l.losses = i.losses) FROM {{schema}}.installation AS i`

const countLossSQL = `-- taskrelay: count loss
UPDATE {{schema}}.installation AS i SET losses = i.losses + 1, stream_created = $1::timestamptz
WHERE i.losses = $2::int AND (i.stream_created IS DISTINCT FROM $1::timestamptz OR $3::boolean)
RETURNING i.losses`

const adoptStreamSQL = `-- taskrelay: adopt stream
UPDATE {{schema}}.installation AS i SET stream_created = $1::timestamptz WHERE i.stream_created IS NULL`

// checkLoss compares the stream with what is known of it.
func (r *Relay) checkLoss(ctx context.Context, info *jetstream.StreamInfo) error {
	created := info.Created.Truncate(time.Microsecond)
	var known *time.Time
	var highest *int64
	err := r.query(ctx, streamStateSQL, nil, func(rows pgx.Rows) error { return rows.Scan(&known, &highest) })
	if err != nil {
		return fmt.Errorf("stream state: %w", err)
	}
	if known == nil {
		if err := r.exec(ctx, adoptStreamSQL, created); err != nil {
			return fmt.Errorf("adopt stream: %w", err)
		}
		return nil
	}
	r.mu.Lock()
	rewound := r.rewound
	r.mu.Unlock()
	// info was read before the table: what the table knows by now may be newer only if it is still growing.
	if highest != nil && uint64(*highest) > info.State.LastSeq {
		s, err := r.js.Stream(ctx, r.names.Stream())
		if err != nil {
			return fmt.Errorf("stream state: %w", err)
		}
		rewound = rewound || uint64(*highest) > s.CachedInfo().State.LastSeq
	}
	if known.Equal(created) && !rewound {
		return nil
	}
	r.mu.Lock()
	losses := r.settings.losses
	r.mu.Unlock()
	if err := r.exec(ctx, countLossSQL, created, losses, rewound); err != nil {
		return fmt.Errorf("count loss: %w", err)
	}
	r.log.Warn().Str("stream", r.names.Stream()).Bool("created_anew", !known.Equal(created)).Bool("rewound", rewound).
		Msg("stream has lost messages, comparing all lanes with it")
	if err := r.readSettings(ctx); err != nil {
		return err
	}
	if created.Before(*known) || known.Equal(created) { // an older copy of the store: the dead stream is older too
		if err := r.forgetLetters(ctx); err != nil {
			return err
		}
	}
	r.mu.Lock()
	r.rewound, r.highest = false, 0
	for _, l := range r.lanes {
		r.restartLow(l)
	}
	r.mu.Unlock()
	select {
	case r.compare <- struct{}{}:
	default:
	}
	return nil
}

// noteSequence takes an answer's sequence; r.mu is held. before is the highest one known when the message was sent.
func (r *Relay) noteSequence(l *lane, sequence, before uint64, duplicate bool) {
	l.seq = max(l.seq, sequence) // a duplicate names the first copy, and a mark must wait for that one
	if duplicate {
		return
	}
	if sequence <= before && !r.rewound {
		r.rewound = true
	}
	r.highest = max(r.highest, sequence)
}
