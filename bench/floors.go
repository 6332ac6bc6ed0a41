package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	floorBatch  = 500
	floorWindow = 4096 // publishes without an answer
)

// floors measures what the parts of any such system cost on this machine at the least: a row by COPY, a row by a HOT
// update in batches, a message published, a message consumed and acked. They run in this process, which is the client.
func floors(ctx context.Context, b *bench) error {
	s, _ := findSystem("taskrelay") // for its database and nats-server
	for run := range b.runs {
		p, err := b.open(ctx, s)
		if err != nil {
			return err
		}
		err = b.floorsOn(ctx, p, run)
		p.close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) floorsOn(ctx context.Context, p *place, run int) error {
	nc, err := nats.Connect(p.natsAt)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(floorWindow), jetstream.WithPublishAsyncTimeout(30*time.Second))
	if err != nil {
		return err
	}
	steps := []struct {
		name string
		do   func() error
	}{
		{"floor-copy", func() error { return copyRows(ctx, p.pool, b.tasks) }},
		{"floor-hot-update", func() error { return updateRows(ctx, p.pool, b.tasks) }},
		{"floor-publish", func() error { return publishMessages(ctx, js, b.tasks) }},
		{"floor-consume-ack", func() error { return consumeMessages(ctx, js, b.tasks) }},
	}
	_, err = p.pool.Exec(ctx, `CREATE TABLE floor (id bigint PRIMARY KEY, status text NOT NULL, lease_until timestamptz, payload json NOT NULL)
WITH (fillfactor = 50)`)
	if err != nil {
		return err
	}
	_, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: "FLOOR", Subjects: []string{"floor.>"}, Retention: jetstream.WorkQueuePolicy})
	if err != nil {
		return err
	}
	for _, step := range steps {
		b.results.begin(step.name, "machine", run+1, b.runs)
		from, err := p.sampleSelf(ctx)
		if err != nil {
			return err
		}
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		to, err := p.sampleSelf(ctx)
		if err != nil {
			return err
		}
		r := cost(from, to, b.tasks)
		r.Scenario, r.System = step.name, "machine"
		b.results.add(r)
	}
	return nil
}

// sampleSelf is sample with this process as the client.
func (p *place) sampleSelf(ctx context.Context) (sample, error) {
	s, err := p.sample(ctx)
	if err != nil {
		return s, err
	}
	s.client, err = cpuTime(os.Getpid(), false)
	return s, err
}

func copyRows(ctx context.Context, pool *pgxpool.Pool, n int) error {
	i := 0
	_, err := pool.CopyFrom(ctx, pgx.Identifier{"floor"}, []string{"id", "status", "payload"}, pgx.CopyFromFunc(func() ([]any, error) {
		if i++; i > n {
			return nil, nil
		}
		return []any{int64(i), "pending", payload{N: i, Pad: pad}}, nil
	}))
	return err
}

func updateRows(ctx context.Context, pool *pgxpool.Pool, n int) error {
	ids := make([]int64, 0, floorBatch)
	for i := 1; i <= n; i++ {
		ids = append(ids, int64(i))
		if len(ids) < floorBatch && i < n {
			continue
		}
		tag, err := pool.Exec(ctx, `UPDATE floor AS f SET status = 'running', lease_until = now()
FROM unnest($1::bigint[]) AS u(id) WHERE f.id = u.id AND f.status = 'pending'`, ids)
		if err != nil {
			return err
		}
		if int(tag.RowsAffected()) != len(ids) {
			return fmt.Errorf("updated %d rows of %d", tag.RowsAffected(), len(ids))
		}
		ids = ids[:0]
	}
	return nil
}

func publishMessages(ctx context.Context, js jetstream.JetStream, n int) error {
	body := []byte(`{"n":10000,"pad":"` + pad + `"}`)
	for range n {
		if _, err := js.PublishAsync("floor.a", body, jetstream.WithStallWait(30*time.Second)); err != nil {
			return err
		}
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-js.PublishAsyncComplete():
	}
	s, err := js.Stream(ctx, "FLOOR")
	if err != nil {
		return err
	}
	if got := s.CachedInfo().State.Msgs; got != uint64(n) {
		return fmt.Errorf("stream holds %d messages, want %d", got, n)
	}
	return nil
}

func consumeMessages(ctx context.Context, js jetstream.JetStream, n int) error {
	c, err := js.CreateOrUpdateConsumer(ctx, "FLOOR", jetstream.ConsumerConfig{Durable: "floor", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 20_000})
	if err != nil {
		return err
	}
	for got := 0; got < n; {
		batch, err := c.Fetch(min(floorBatch, n-got), jetstream.FetchMaxWait(10*time.Second))
		if err != nil {
			return err
		}
		before := got
		for m := range batch.Messages() {
			if err := m.Ack(); err != nil {
				return err
			}
			got++
		}
		if got == before {
			return errors.Join(fmt.Errorf("only %d of %d messages came", got, n), batch.Error())
		}
	}
	return nil
}
