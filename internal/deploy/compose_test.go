package deploy_test

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

const root = "../.."

// load reads compose.yaml as docker compose would: against the schema, so a misspelled key fails.
func load(t *testing.T, profiles ...string) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{filepath.Join(root, "compose.yaml")}, cli.WithProfiles(profiles))
	if err != nil {
		t.Fatal(err)
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return project
}

func TestComposeFileHasTheWholePath(t *testing.T) {
	got := slices.Sorted(maps.Keys(load(t).Services))
	want := []string{"migrate", "nats", "postgres", "relay", "worker"}
	if !slices.Equal(got, want) {
		t.Errorf("without a profile: got services %v, want %v", got, want)
	}
	if _, ok := load(t, "demo").Services["producer"]; !ok {
		t.Error("profile demo: no producer")
	}
}

func TestComposePortsAreOpenToThisMachineOnly(t *testing.T) {
	ports := 0
	for name, service := range load(t, "*").Services {
		for _, port := range service.Ports {
			ports++
			if port.HostIP != "127.0.0.1" {
				t.Errorf("%s: port %s is bound to %q, want 127.0.0.1", name, port.Published, port.HostIP)
			}
		}
	}
	if ports == 0 {
		t.Error("no port at all: nobody can reach Postgres or NATS")
	}
}

func TestComposeServicesTellTheirHealthAndWaitForWhatTheyNeed(t *testing.T) {
	project := load(t, "*")
	for _, name := range []string{"postgres", "nats", "relay", "worker"} {
		if check := project.Services[name].HealthCheck; check == nil || len(check.Test) == 0 {
			t.Errorf("%s has no health check", name)
		}
	}
	for name, service := range project.Services {
		for needed, how := range service.DependsOn {
			want := types.ServiceConditionHealthy
			if needed == "migrate" {
				want = types.ServiceConditionCompletedSuccessfully
			}
			if how.Condition != want {
				t.Errorf("%s waits for %s by %s, want %s", name, needed, how.Condition, want)
			}
		}
	}
	if !slices.Contains(project.Services["nats"].Command, "--jetstream") {
		t.Error("nats runs without JetStream")
	}
	for _, name := range []string{"postgres", "nats"} {
		if volumes := project.Services[name].Volumes; len(volumes) == 0 || volumes[0].Type != types.VolumeTypeVolume {
			t.Errorf("%s keeps its data in no volume", name)
		}
	}
}

// The image holds the binaries of cmd/ and nothing else, so these are all that a command can name.
func TestCommandsOfTheImageExist(t *testing.T) {
	for name, service := range load(t, "*").Services {
		if service.Build == nil {
			continue
		}
		programs := []string{service.Command[0]}
		if service.HealthCheck != nil {
			programs = append(programs, service.HealthCheck.Test[1])
		}
		for _, program := range programs {
			if info, err := os.Stat(filepath.Join(root, "cmd", program)); err != nil || !info.IsDir() {
				t.Errorf("%s runs %q, but there is no cmd/%s", name, program, program)
			}
		}
	}
}

func TestImageIsStaticAndNotRoot(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	final := string(text[strings.LastIndex(string(text), "\nFROM "):])
	if !regexp.MustCompile(`(?m)^USER [1-9][0-9]*:[1-9][0-9]*$`).MatchString(final) {
		t.Error("the final stage has no numeric USER that is not root")
	}
	if !strings.Contains(final, "ca-certificates.crt") {
		t.Error("the final stage has no certificates: HTTPS targets would fail")
	}
	if !strings.Contains(string(text), "CGO_ENABLED=0") {
		t.Error("the build is not static")
	}

	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	want := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(string(mod))[1]
	if !strings.Contains(string(text), "FROM golang:"+want+"-") {
		t.Errorf("the image is not built with Go %s, which go.mod asks for", want)
	}
}

// What a service of the observability profile mounts is in the repository, and Prometheus asks relay and worker where they
// listen.
func TestComposeObservabilityFindsItsFiles(t *testing.T) {
	project := load(t, "observability")
	mounts := 0
	for _, name := range []string{"prometheus", "grafana"} {
		for _, v := range project.Services[name].Volumes {
			mounts++
			if info, err := os.Stat(v.Source); err != nil || info.IsDir() {
				t.Errorf("%s mounts %s, which is no file of the repository: %v", name, v.Source, err)
			}
			if !v.ReadOnly {
				t.Errorf("%s may write %s", name, v.Source)
			}
		}
	}
	if mounts < 5 {
		t.Errorf("got %d mounts, want the configuration of both", mounts)
	}
	scrapes, err := os.ReadFile(filepath.Join(root, "deploy", "observability", "prometheus.yml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"relay", "worker"} {
		addr := project.Services[name].Environment["TASKRELAY_ADMIN_ADDR"]
		if addr == nil || !strings.Contains(string(scrapes), `"`+name+*addr+`"`) {
			t.Errorf("prometheus.yml does not scrape %s at its admin address", name)
		}
	}
}
