package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of CPU time in /proc: USER_HZ, 100 on every architecture that Go runs on.
const tick = 10 * time.Millisecond

// cpuTime is the CPU time that a process has used; children that it has waited for included when asked for.
func cpuTime(pid int, children bool) (time.Duration, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, fmt.Errorf("CPU time: %w", err)
	}
	own, waited, _, err := parseStat(string(text))
	if err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	if children {
		own += waited
	}
	return own, nil
}

// parseStat reads /proc/<pid>/stat: user + system time, the same of children waited for, and the parent.
func parseStat(text string) (own, waited time.Duration, parent int, err error) {
	// The second field is the program's name in parentheses, which may hold spaces and parentheses.
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(f) < 15 {
		return 0, 0, 0, fmt.Errorf("unexpected line %q", text)
	}
	var n [4]int64
	for i := range n {
		if n[i], err = strconv.ParseInt(f[11+i], 10, 64); err != nil {
			return 0, 0, 0, err
		}
	}
	if parent, err = strconv.Atoi(f[1]); err != nil {
		return 0, 0, 0, err
	}
	return time.Duration(n[0]+n[1]) * tick, time.Duration(n[2]+n[3]) * tick, parent, nil
}

// postgresCPU is the CPU time of a postmaster and of all its children, those that have ended included: their time
// passes to the postmaster when it waits for them.
func postgresCPU(postmaster int) (time.Duration, error) {
	sum, err := cpuTime(postmaster, true)
	if err != nil {
		return 0, err
	}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended since
		}
		own, waited, parent, err := parseStat(string(text))
		if err == nil && parent == postmaster {
			sum += own + waited
		}
	}
	return sum, nil
}

// peakMemory is the most physical memory that a process has held, in bytes.
func peakMemory(pid int) (int64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, err
	}
	return parsePeak(string(text))
}

func parsePeak(status string) (int64, error) {
	for line := range strings.SplitSeq(status, "\n") {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no VmHWM in the status of a process")
}
