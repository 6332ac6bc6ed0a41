package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/taskrelay/taskrelay/internal/config"
)

// healthcheckCommand is for the health checks of container images that hold no shell and no HTTP client.
func (a *app) healthcheckCommand() *cobra.Command {
	var addr string
	var live bool
	c := &cobra.Command{
		Use:   "healthcheck",
		Short: "Ask a relay or worker on this machine whether it is ready",
		Long: `healthcheck asks /readyz of a relay or worker, prints its answer, and exits 0 when it is ready, 6 when it is not,
7 when nothing answers. It needs neither Postgres nor NATS.`,
		Example: "  taskrelay healthcheck\n  taskrelay healthcheck --live --addr 127.0.0.1:9091",
		Args:    args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			if addr == "" {
				var err error
				if addr, err = config.AdminAddr(); err != nil {
					return err
				}
			}
			path := "/readyz?verbose"
			if live {
				path = "/livez"
			}
			ctx, cancel := a.limit(c, 3*time.Second)
			defer cancel()
			return a.healthcheck(ctx, "http://"+addr+path)
		},
	}
	c.Flags().StringVar(&addr, "addr", "", "its admin address [TASKRELAY_ADMIN_ADDR]")
	c.Flags().BoolVar(&live, "live", false, "ask whether it is alive, whatever Postgres and NATS do")
	return c
}

func (a *app) healthcheck(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	// No proxy: it is about this machine.
	res, err := (&http.Client{Transport: &http.Transport{}}).Do(req)
	if err != nil {
		return &exitError{exitConnect, err}
	}
	defer res.Body.Close()
	text, err := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	if err != nil {
		return &exitError{exitConnect, err}
	}
	answer := strings.TrimSpace(string(text))
	if res.StatusCode != http.StatusOK {
		return &exitError{exitUnhealthy, fmt.Errorf("not well (%s): %s", res.Status, answer)}
	}
	fmt.Fprintln(a.out, answer)
	return nil
}
