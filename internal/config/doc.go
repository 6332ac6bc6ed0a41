// Package config reads the configuration of the binaries from the environment.
//
// Properties:
//   - Every variable begins with TASKRELAY_ and stands in one struct, with its default, unit and meaning in the
//     field's tags. The -h table, docs/configuration.md and what is read come from the same tags.
//   - One environment file serves all binaries: a process accepts the variables of the others.
//   - Nothing is guessed. A variable that is unknown, set but empty, unparsable or out of range is an [Error]
//     that names it and says what is expected.
//   - A secret is never part of an error, a log line or a print of a struct.
package config
