// Package process says which process this is, in the words that relay and worker write into their tables and logs.
package process

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
)

// Name is unique per process and run, and tells a person where to look.
func Name() string {
	var b [3]byte
	_, _ = rand.Read(b[:]) // never fails
	return fmt.Sprintf("%s-%d-%s", Host(), os.Getpid(), hex.EncodeToString(b[:]))
}

// Host is this machine's name.
func Host() string {
	host, err := os.Hostname()
	if err != nil {
		return "unknown"
	}
	return host
}
