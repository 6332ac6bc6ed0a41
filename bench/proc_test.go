package main

import (
	"os"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	own, waited, parent, err := parseStat("4242 (a (b) c d) S 17 4242 4242 0 -1 4194560 100 200 0 0 250 50 7 3 20 0 1 0 100 1000 10\n")
	if err != nil {
		t.Fatal(err)
	}
	if own != 3*time.Second || waited != 100*time.Millisecond || parent != 17 {
		t.Errorf("got %v, %v, parent %d, want 3s, 100ms, parent 17", own, waited, parent)
	}
	if _, _, _, err := parseStat("4242 (short) S 17"); err == nil {
		t.Error("a line that is cut: got no error")
	}
}

func TestOwnFigures(t *testing.T) {
	before, err := cpuTime(os.Getpid(), false)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	var after time.Duration
	for after <= before { // ends when a tick of CPU has been used, which this loop does
		for i := range 1_000_000 {
			sum += i ^ sum
		}
		if after, err = cpuTime(os.Getpid(), false); err != nil {
			t.Fatal(err)
		}
	}
	peak, err := peakMemory(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if peak < 1<<20 || peak > 1<<34 {
		t.Errorf("peak memory of a test: got %d bytes (checksum %d)", peak, sum)
	}
}

func TestParsePeak(t *testing.T) {
	got, err := parsePeak("Name:\tbench\nVmPeak:\t  999 kB\nVmHWM:\t   2048 kB\nVmRSS:\t 1 kB\n")
	if err != nil || got != 2<<20 {
		t.Errorf("got %d, %v, want %d", got, err, 2<<20)
	}
	if _, err := parsePeak("Name:\tbench\n"); err == nil {
		t.Error("no VmHWM: got no error")
	}
}
