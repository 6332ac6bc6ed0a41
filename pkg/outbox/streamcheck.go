package outbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// StreamCheck is what a relay of this configuration would find about one of its streams.
type StreamCheck struct {
	Stream  string
	Missing bool     // the relay makes it when it starts
	Foreign string   // the other installation it belongs to: the relay would not start
	Unsafe  []string // settings that lose tasks: the relay waits until they are mended
	Differs []string // settings that somebody changed: the relay leaves them
}

// CheckStreams compares the streams with what a relay of cfg makes them like. It changes nothing. installation is the id
// of this installation, from the table of that name; "" does not compare owners.
func CheckStreams(ctx context.Context, nc *nats.Conn, cfg RelayConfig, installation string) ([]StreamCheck, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("check streams: %w", err)
	}
	js, err := (Names{Namespace: cfg.Namespace, APIPrefix: cfg.APIPrefix}).JetStream(nc)
	if err != nil {
		return nil, fmt.Errorf("check streams: %w", err)
	}
	var checks []StreamCheck
	for _, want := range streamConfigs(cfg, installation) {
		c := StreamCheck{Stream: want.Name}
		s, err := js.Stream(ctx, want.Name)
		switch {
		case errors.Is(err, jetstream.ErrStreamNotFound):
			c.Missing = true
		case err != nil:
			return checks, fmt.Errorf("check stream %s: %w", want.Name, err)
		default:
			have := s.CachedInfo().Config
			if owner := have.Metadata[MetadataInstallation]; owner != "" && installation != "" && owner != installation {
				c.Foreign = owner
			}
			c.Unsafe = unsafeSettings(want, have)
			drift := streamDrift(want, have)
			for _, name := range slices.Sorted(maps.Keys(drift)) {
				c.Differs = append(c.Differs, fmt.Sprintf("%s is %v, the relay would make it %v", name, drift[name][1], drift[name][0]))
			}
		}
		checks = append(checks, c)
	}
	return checks, nil
}
