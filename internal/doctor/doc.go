// Package doctor compares what the table holds with what the stream holds, and says what is missing where.
//
// Properties:
//   - It changes nothing but in [Fix], and there it asks for what the relay would do anyway, only sooner. Each request is
//     a guess about messages: it raises no generation, so a message that is there after all stays good.
//   - It looks at the table before and after it has read the stream, and at the stream twice where something seems to be
//     missing: what moves meanwhile is not taken for lost.
//   - What it costs is bounded: of each lane it reads 10,000 rows and as many messages, by indexes only.
//   - With one of the two servers away it says what the other one shows.
package doctor
