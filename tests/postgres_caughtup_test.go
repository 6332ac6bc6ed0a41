//go:build soak

package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// The standby has everything, and keeps its own address: both are in the URL. Nothing is lost and nothing runs twice.
func TestCaughtUpStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	p := testenv.OwnPostgres(t)
	db := testenv.DBOn(t, p)
	s := testenv.Standby(t, p)
	// The standby first: it must not be taken for the primary.
	hosts := fmt.Sprintf("@127.0.0.1:%d,127.0.0.1:%d/", s.Port, p.Port)
	db.URL = strings.Replace(db.URL, fmt.Sprintf("@127.0.0.1:%d/", p.Port), hosts, 1) + "&target_session_attrs=primary"
	db.Pool = openPool(t, db.URL, nil)
	e := testenv.NewEnv(t, db, testenv.NATS(t))
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 20 * time.Millisecond})
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=60s")
	all := []*testenv.Process{e.StartRelay(vars...), e.StartWorker(vars...)}
	l := startLoad(t, e, sink, "ORDER_PAYMENT", 20*time.Millisecond)
	l.warmUp(50)
	if err := p.Shutdown(); err != nil { // waits until the standby has all
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Promote(ctx); err != nil {
		t.Fatal(err)
	}
	l.recovery("caught-up standby, from its promotion", time.Now(), 15*time.Second)
	equal(t, "tasks lost", l.verdict(1), 0)
	stillRunning(t, all...)
}
