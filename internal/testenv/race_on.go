//go:build race

package testenv

// Race: a test binary with the race detector builds the project's binaries with it too.
const Race = true
