package config

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestEffectiveSettingsNameTheirSourceAndHideSecrets(t *testing.T) {
	setenv(t, map[string]string{
		"DATABASE_URL": "postgres://app:hunter2@db:5432/shop?sslpassword=hunter2", "LOG_LEVEL": "debug",
		"BIZ_TYPES": "A", "BIZ_A_TARGET": "https://u:hunter2@h/x?token=hunter2", "BIZ_A_SECRET": "hunter2", "NOTIFY_WEBHOOK_SECRET": "hunter2",
	})
	list := Effective()
	text, err := json.Marshal(list)
	if err != nil || strings.Contains(string(text), "hunter2") {
		t.Fatalf("%v, a secret is printed: %s", err, text)
	}
	got := map[string]Setting{}
	for _, s := range list {
		if _, twice := got[s.Name]; twice {
			t.Errorf("%s is listed twice", s.Name)
		}
		got[s.Name] = s
	}
	for name, want := range map[string]Setting{
		"DATABASE_URL":          {Value: "postgres://xxxxx@db:5432/shop", Source: "environment"},
		"NATS_URL":              {Source: "required, unset"},
		"LOG_LEVEL":             {Value: "debug", Source: "environment"},
		"WORKER_LEASE":          {Value: "30s", Source: "default"},
		"NATS_CREDS":            {Source: "unset"},
		"NOTIFY_WEBHOOK_SECRET": {Value: "[redacted]", Source: "environment"},
		"BIZ_A_TARGET":          {Value: "https://xxxxx@h/x", Source: "environment", BizType: "A"},
		"BIZ_A_SECRET":          {Value: "[redacted]", Source: "environment", BizType: "A"},
		"BIZ_A_TIMEOUT":         {Value: "60s", Source: "default", BizType: "A"},
	} {
		if s := got[Prefix+name]; s.Value != want.Value || s.Source != want.Source || s.BizType != want.BizType {
			t.Errorf("%s: got %q from %q of type %q, want %q from %q", name, s.Value, s.Source, s.BizType, want.Value, want.Source)
		}
	}
	if s := strings.Join(got[Prefix+"DATABASE_URL"].ReadBy, " "); s != "relay worker taskrelay" {
		t.Errorf("read by %q", s)
	}
	// Nothing is left out.
	for _, all := range [][]Variable{RelayVariables(), WorkerVariables(), CLIVariables()} {
		for _, v := range all {
			if _, ok := got[v.Name]; !ok {
				t.Errorf("%s is missing", v.Name)
			}
		}
	}
}
