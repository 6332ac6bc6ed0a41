package demo

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The business has its own tables beside taskrelay's: a task is written in the transaction that writes these rows.
const tablesSQL = `
CREATE SCHEMA IF NOT EXISTS demo;
CREATE TABLE IF NOT EXISTS demo.orders (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer       text   NOT NULL,
    amount_cents   bigint NOT NULL,
    refunded_cents bigint NOT NULL DEFAULT 0,
    receipt        text,
    paid_at        timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS demo.refunds (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id     bigint NOT NULL REFERENCES demo.orders,
    channel      text   NOT NULL,
    amount_cents bigint NOT NULL,
    reference    text,
    asked_at     timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS demo.accounts (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    status   text NOT NULL DEFAULT 'asked' CHECK (status IN ('asked', 'open', 'withdrawn', 'cancelled')),
    iban     text,
    asked_at timestamptz NOT NULL DEFAULT now()
);`

func createTables(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, tablesSQL); err != nil {
		return fmt.Errorf("create the demo's tables: %w", err)
	}
	return nil
}
