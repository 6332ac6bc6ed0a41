// Package schema creates and upgrades taskrelay's tables, functions, views and roles.
//
// Properties:
//   - Migrations are plain SQL files, embedded, forward-only. Each is expand/contract: binaries of the version
//     before go on working while and after it is applied, so a newer schema is accepted and only an older one refused.
//   - Any number of processes may migrate at once; one does the work, all succeed.
//   - Migrating needs a direct connection: the lock is a session lock, which a pooler in transaction mode breaks.
//     That is detected and refused. Everything else in taskrelay works through such a pooler.
//   - The result of [SQL] run by psql equals the result of [Migrate], the version rows included.
//
// Two installations in one database are two schemas.
//
//	applied, err := schema.Migrate(ctx, pool, schema.Options{})
package schema
