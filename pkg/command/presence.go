package command

import (
	"context"
	"os"
	"time"

	"github.com/taskrelay/taskrelay/internal/pg"
	"github.com/taskrelay/taskrelay/internal/process"
)

const presenceTick = 10 * time.Second

// registerSQL makes the types of this worker known, in their order so that two workers that start do not deadlock.
// What an operator has set stays.
const registerSQL = `-- taskrelay: register biz types
INSERT INTO {{schema}}.biz_type AS b (biz_type, known_by, known_at, default_priority, notifier, title, runbook_url, compensates)
SELECT m.biz_type, $2::text, now(), nullif(m.priority, ''), nullif(m.notifier, ''), nullif(m.title, ''),
  nullif(m.runbook_url, ''), m.compensates
FROM unnest($1::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::boolean[])
  AS m(biz_type, priority, notifier, title, runbook_url, compensates)
ORDER BY m.biz_type
ON CONFLICT (biz_type) DO UPDATE
SET known_by = excluded.known_by, known_at = excluded.known_at,
  default_priority = coalesce(b.default_priority, excluded.default_priority),
  notifier = coalesce(b.notifier, excluded.notifier),
  title = coalesce(b.title, excluded.title),
  runbook_url = coalesce(b.runbook_url, excluded.runbook_url),
  compensates = b.compensates OR excluded.compensates`

const sayAliveSQL = `-- taskrelay: worker alive
INSERT INTO {{schema}}.worker AS w (name, host, pid, version, biz_types, running)
VALUES ($1::text, $2::text, $3::int, $4::text, $5::text[], $6::int)
ON CONFLICT (name) DO UPDATE
SET host = excluded.host, pid = excluded.pid, version = excluded.version, biz_types = excluded.biz_types,
  running = excluded.running, seen_at = now()`

const sayGoneSQL = `-- taskrelay: worker gone
DELETE FROM {{schema}}.worker AS w
WHERE w.name = $1::text OR w.seen_at < now() - interval '1 day'`

// register makes the worker's types known; it is part of starting.
func (w *Worker) register(ctx context.Context) error {
	n := len(w.dispatchers)
	types, priorities, notifiers := make([]string, n), make([]string, n), make([]string, n)
	titles, runbooks, compensates := make([]string, n), make([]string, n), make([]bool, n)
	for i, d := range w.dispatchers {
		b := d.b
		types[i], priorities[i], notifiers[i] = b.bizType, b.priority, b.notifier
		titles[i], runbooks[i], compensates[i] = b.title, b.runbookURL, b.compensate != nil
	}
	if err := pg.Exec(ctx, w.pool, w.sql.register, types, w.cfg.Name, priorities, notifiers, titles, runbooks, compensates); err != nil {
		return err
	}
	return w.sayAlive(ctx)
}

// sayAlive keeps the worker's row fresh and reads what operators have set.
func (w *Worker) sayAlive(ctx context.Context) error {
	types := make([]string, len(w.dispatchers))
	running := 0
	for i, d := range w.dispatchers {
		types[i] = d.b.bizType
		running += d.busy()
	}
	if err := pg.Exec(ctx, w.pool, w.sql.sayAlive, w.cfg.Name, process.Host(), os.Getpid(), w.cfg.Version, types, running); err != nil {
		return err
	}
	return w.readSwitches(ctx, types)
}

// presenceLoop says every ten seconds that the worker is alive. It is also what tells Ready that Postgres answers.
func (w *Worker) presenceLoop(ctx context.Context) {
	for {
		sleep(ctx, presenceTick)
		if ctx.Err() != nil {
			return
		}
		tryCtx, cancel := context.WithTimeout(ctx, presenceTick)
		err := w.sayAlive(tryCtx)
		cancel()
		if err != nil && ctx.Err() == nil {
			w.health.set("postgres", err, 0)
			w.complain("presence", func() { w.log.Warn().Err(err).Msg("worker could not say that it is alive") })
			continue
		}
		w.health.clear("postgres")
	}
}

// sayGone takes the worker's row away.
func (w *Worker) sayGone(ctx context.Context) {
	if err := pg.Exec(ctx, w.pool, w.sql.sayGone, w.cfg.Name); err != nil {
		w.log.Warn().Err(err).Msg("worker could not say that it is gone")
	}
}
