//go:build !linux

package testenv

import "testing"

// A Disk is a small file system of one test, which can be full.
type Disk struct{ Dir string }

// SmallDisk needs Linux.
func SmallDisk(t testing.TB, _ int64) *Disk {
	t.Helper()
	t.Fatal("a file system that is full can be made on Linux alone: run this test there (make test in a container)")
	return nil
}

// Fill leaves that much room.
func (d *Disk) Fill(testing.TB, int, int64) {}

// Free makes room again.
func (d *Disk) Free(testing.TB) {}
