package testenv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"unsafe"
)

// A Disk is a small file system of one test, which can be full: its writers get ENOSPC. Where none may be mounted (a
// container without the right to), the process that writes to Dir gets a limit on the size of its files instead, and
// EFBIG.
type Disk struct {
	Dir string

	mounted bool
	pid     int // whose files are limited
}

// SmallDisk makes a file system of the given size in memory.
func SmallDisk(t testing.TB, size int64) *Disk {
	t.Helper()
	d := &Disk{Dir: tempDir(t)}
	err := syscall.Mount("tmpfs", d.Dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", size))
	switch {
	case err == nil:
		d.mounted = true
		t.Cleanup(func() { _ = syscall.Unmount(d.Dir, syscall.MNT_DETACH) })
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		t.Logf("no file system may be mounted here (%v): the size of files is limited instead", err)
	default:
		t.Fatalf("mount a small file system: %v", err)
	}
	return d
}

func (d *Disk) ballast() string { return filepath.Join(d.Dir, "ballast") }

// Fill leaves that much room to the process, which writes to Dir.
func (d *Disk) Fill(t testing.TB, pid int, room int64) {
	t.Helper()
	if !d.mounted {
		d.pid = pid
		limitFiles(t, pid, uint64(room))
		return
	}
	var s syscall.Statfs_t
	if err := syscall.Statfs(d.Dir, &s); err != nil {
		t.Fatal(err)
	}
	free := int64(s.Bavail) * s.Bsize
	if free <= room {
		t.Fatalf("the disk has room for %d bytes, want more than %d", free, room)
	}
	if err := os.WriteFile(d.ballast(), make([]byte, free-room), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Free makes room again.
func (d *Disk) Free(t testing.TB) {
	t.Helper()
	if !d.mounted {
		limitFiles(t, d.pid, ^uint64(0))
		return
	}
	if err := os.Remove(d.ballast()); err != nil {
		t.Fatal(err)
	}
}

// limitFiles sets the soft limit alone, which can be raised again.
func limitFiles(t testing.TB, pid int, size uint64) {
	t.Helper()
	limit := syscall.Rlimit{Cur: size, Max: ^uint64(0)}
	_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(pid), syscall.RLIMIT_FSIZE, uintptr(unsafe.Pointer(&limit)), 0, 0, 0)
	if errno != 0 {
		t.Fatalf("limit the files of process %d: %v", pid, errno)
	}
}
