package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// RunOnce publishes all that is due at this moment, then returns what it did: for cron, or a scheduling platform that
// takes the relay's place. Lanes that a running relay holds are left to it and counted in LanesElsewhere; lanes that
// cannot take more now are counted in LanesWaiting.
func (r *Relay) RunOnce(ctx context.Context) (Counts, error) {
	if !r.started.CompareAndSwap(false, true) {
		return Counts{}, errors.New("relay: Run or RunOnce was called before; make a new Relay")
	}
	stop, err := r.start(ctx)
	if err != nil {
		return Counts{}, err
	}
	defer stop()
	err = r.onePass(ctx)
	return r.Counts(), err
}

func (r *Relay) onePass(ctx context.Context) error {
	for _, step := range []func(context.Context) error{
		r.readSettings, r.discoverLanes, // no heartbeat: others would share their lanes with a relay that is about to go
		func(ctx context.Context) error { return r.shareLanes(ctx, true) },
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	renewed, idle := time.Now(), time.Now()
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		if time.Since(renewed) > laneRenew {
			if err := r.renewLanes(ctx); err != nil {
				return err
			}
			renewed = time.Now()
		}
		before := r.Counts()
		if !r.nc.IsConnected() {
			return errNATSAway
		}
		r.resend(time.Now())
		busy, _, err := r.readPages(ctx)
		if err != nil {
			return err
		}
		lanes, types, priorities, _ := r.heldLanes(func(l *lane) bool { return l.waitUntil.IsZero() && r.settings.mayPublish(l.laneKey) })
		n := 0
		if len(types) > 0 {
			if n, _, err = r.takeList(ctx, lanes, types, priorities); err != nil {
				return err
			}
		}
		r.pub.drain(ctx, publishTimeout)
		if err := r.endLooks(ctx); err != nil {
			return err
		}
		if err := r.buryRefused(ctx); err != nil {
			return err
		}
		wait, err := r.serveDeadLetters(ctx)
		if err != nil {
			return fmt.Errorf("dead letters: %w", err)
		}
		bulk, open, err := r.stepBulk(ctx)
		if err != nil {
			return err
		}
		after := r.Counts()
		stored := after.Published + after.Republished - before.Published - before.Republished
		// Rows of the list that a full lane did not take are no progress: they are back on it.
		if busy || wait == 0 || bulk.looked > 0 || stored > 0 || n > 0 && after.LanesWaiting == 0 {
			idle = time.Now()
			continue
		}
		if n == 0 && !open && r.quiet() || time.Since(idle) > 2*waitLongest {
			return nil
		}
		r.rest(ctx, waitFirst, waitFirst)
	}
}

// quiet reports that no lane has anything open.
func (r *Relay) quiet() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.lanes {
		if l.round != nil || len(l.again) > 0 || len(l.pages) > 0 {
			return false
		}
	}
	return true
}
