package dev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// lockDir takes the directory for this process. The kernel lets go of the lock when the process ends, however it
// ends. Without it a second nats-server starts happily on the same store and both corrupt it.
func lockDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, "taskrelay.lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data directory: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("another taskrelay dev uses %s: stop it, or give another --data-dir", dir)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}
