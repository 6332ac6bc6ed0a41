package check

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

const manifests = "../kubernetes"

// scaledObject is what we use of KEDA's ScaledObject; its own package brings half of Kubernetes.
type scaledObject struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name, Namespace string
	} `json:"metadata"`
	Spec struct {
		ScaleTargetRef  struct{ Name string } `json:"scaleTargetRef"`
		MinReplicaCount *int32                `json:"minReplicaCount"`
		MaxReplicaCount *int32                `json:"maxReplicaCount"`
		CooldownPeriod  *int32                `json:"cooldownPeriod"`
		Triggers        []struct {
			Type     string            `json:"type"`
			Metadata map[string]string `json:"metadata"`
		} `json:"triggers"`
	} `json:"spec"`
}

type kustomization struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Namespace  string   `json:"namespace"`
	Resources  []string `json:"resources"`
	Images     []struct {
		Name   string `json:"name"`
		NewTag string `json:"newTag"`
	} `json:"images"`
}

// documents decodes every manifest into the type that it says it is, and fails on a key that the type does not have.
func documents(t *testing.T) (list []any, k kustomization) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(manifests, "*.yaml"))
	if err != nil || len(paths) < 5 {
		t.Fatalf("%d manifests, %v", len(paths), err)
	}
	var found []string
	for _, path := range paths {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if name := filepath.Base(path); name == "kustomization.yaml" {
			if err := yaml.UnmarshalStrict(raw, &k); err != nil {
				t.Fatal(err)
			}
			continue
		} else {
			found = append(found, name)
		}
		for _, text := range strings.Split(string(raw), "\n---\n") {
			var kind struct {
				APIVersion string `json:"apiVersion"`
				Kind       string `json:"kind"`
			}
			if err := yaml.Unmarshal([]byte(text), &kind); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			into, ok := map[string]any{"v1 Namespace": new(corev1.Namespace), "v1 ConfigMap": new(corev1.ConfigMap), "batch/v1 Job": new(batchv1.Job),
				"apps/v1 Deployment": new(appsv1.Deployment), "policy/v1 PodDisruptionBudget": new(policyv1.PodDisruptionBudget),
				"keda.sh/v1alpha1 ScaledObject": new(scaledObject)}[kind.APIVersion+" "+kind.Kind]
			if !ok {
				t.Fatalf("%s: no type for %s %s", path, kind.APIVersion, kind.Kind)
			}
			if err := yaml.UnmarshalStrict([]byte(text), into); err != nil {
				t.Errorf("%s: %v", path, err)
			}
			list = append(list, into)
		}
	}
	slices.Sort(found)
	resources := slices.Sorted(slices.Values(k.Resources))
	if !slices.Equal(found, resources) {
		t.Errorf("kustomization.yaml has %v, the folder %v", resources, found)
	}
	return list, k
}

// The restricted profile of Pod Security Standards, which the namespace enforces: pods that need more would not start.
func TestManifestsAreStrictAndRestricted(t *testing.T) {
	list, k := documents(t)
	pods := map[string]corev1.PodTemplateSpec{}
	disruptions, scaled := map[string]policyv1.PodDisruptionBudget{}, map[string]scaledObject{}
	replicas := map[string]*int32{}
	for _, d := range list {
		switch d := d.(type) {
		case *batchv1.Job:
			pods[d.Name] = d.Spec.Template
		case *appsv1.Deployment:
			pods[d.Name], replicas[d.Name] = d.Spec.Template, d.Spec.Replicas
			for key, value := range d.Spec.Selector.MatchLabels {
				if d.Spec.Template.Labels[key] != value {
					t.Errorf("%s selects %s=%s, its pods have %q", d.Name, key, value, d.Spec.Template.Labels[key])
				}
			}
		case *policyv1.PodDisruptionBudget:
			disruptions[d.Name] = *d
		case *scaledObject:
			scaled[d.Spec.ScaleTargetRef.Name] = *d
		}
	}
	if len(pods) != 3 {
		t.Fatalf("got %d pods, want migrate, relay and worker", len(pods))
	}
	for name, pod := range pods {
		s := pod.Spec.SecurityContext
		if s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("%s: not under the restricted profile: %+v", name, s)
		}
		if pod.Spec.AutomountServiceAccountToken == nil || *pod.Spec.AutomountServiceAccountToken {
			t.Errorf("%s has a token of the cluster, and needs none", name)
		}
		for _, c := range pod.Spec.Containers {
			s := c.SecurityContext
			if s == nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem ||
				s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
				t.Errorf("%s: container is not under the restricted profile: %+v", name, s)
			}
			if c.Image != k.Images[0].Name {
				t.Errorf("%s runs image %s, kustomization.yaml sets %s", name, c.Image, k.Images[0].Name)
			}
			if info, err := os.Stat("../../cmd/" + c.Command[0]); err != nil || !info.IsDir() {
				t.Errorf("%s runs %q, and there is no cmd/%s", name, c.Command[0], c.Command[0])
			}
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Limits.Memory().IsZero() {
				t.Errorf("%s: no request or limit", name)
			}
			if _, isDeployment := replicas[name]; isDeployment {
				if c.LivenessProbe == nil || c.LivenessProbe.HTTPGet.Path != "/livez" || c.ReadinessProbe == nil || c.ReadinessProbe.HTTPGet.Path != "/readyz" {
					t.Errorf("%s: its probes are not those of the admin server", name)
				}
			}
		}
	}
	for name := range replicas {
		if d, ok := disruptions[name]; !ok || d.Spec.Selector.MatchLabels["app.kubernetes.io/component"] != pods[name].Labels["app.kubernetes.io/component"] {
			t.Errorf("%s has no disruption budget of its own", name)
		}
	}
	if n := replicas["taskrelay-relay"]; n == nil || *n != 2 {
		t.Error("want 2 relays")
	}
	if n := replicas["taskrelay-worker"]; n != nil {
		t.Error("replicas of the worker would fight with KEDA")
	}
	if grace := pods["taskrelay-worker"].Spec.TerminationGracePeriodSeconds; grace == nil || *grace <= 25 {
		t.Error("a worker is killed before TASKRELAY_WORKER_GRACE (25 s) is over")
	}
	s := scaled["taskrelay-worker"]
	if len(s.Spec.Triggers) == 0 || s.Spec.MinReplicaCount == nil || *s.Spec.MinReplicaCount < 1 {
		t.Errorf("the worker is not scaled, or to nothing: %+v", s.Spec)
	}
	for _, trigger := range s.Spec.Triggers {
		if trigger.Type != "nats-jetstream" || trigger.Metadata["stream"] != "TASKS" || trigger.Metadata["consumer"] == "" || trigger.Metadata["lagThreshold"] == "" {
			t.Errorf("trigger %+v", trigger)
		}
	}
}
