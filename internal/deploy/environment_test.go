package deploy_test

import (
	"testing"

	"github.com/taskrelay/taskrelay/internal/config"
)

// The binaries refuse unknown and wrong variables, so a mistake in compose.yaml would show at the start only.
func TestEnvironmentOfComposeIsAccepted(t *testing.T) {
	services := load(t, "*").Services
	for name, check := range map[string]func() error{
		"relay": func() error { _, err := config.LoadRelay(); return err },
		"worker": func() error {
			c, err := config.LoadWorker()
			if err == nil && len(c.Types) == 0 {
				t.Error("worker: no biz type, it would not start")
			}
			return err
		},
		"migrate": func() error { _, err := config.LoadCLI(); return err },
	} {
		t.Run(name, func(t *testing.T) {
			for variable, value := range services[name].Environment {
				if value == nil {
					t.Errorf("%s has no value", variable)
					continue
				}
				t.Setenv(variable, *value)
			}
			if err := check(); err != nil {
				t.Error(err)
			}
		})
	}
}
