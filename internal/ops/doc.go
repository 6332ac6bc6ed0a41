// Package ops takes operator actions over NATS, as a service of nats.go's micro package: "nats micro ls" finds it, and
// "nats request taskrelay.ops.requeue '{"ids": ["1"], "reason": "bank is back"}'" uses it.
//
// Properties:
//   - The actions are the functions of the schema, with their names: guarded by state, fenced by generation, audited.
//   - Whoever may publish to a subject may do what it does. So it is off by default, and NATS permissions decide who.
//   - A request that cannot be understood changes nothing. One that is repeated is harmless: the state guards it.
//   - Of several relays one answers each request.
//   - It never ends its relay: what is refused or does not answer is said, and all else goes on.
package ops
