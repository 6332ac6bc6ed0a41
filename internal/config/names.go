package config

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"
)

// What Kubernetes injects into a pod for a Service whose name begins with taskrelay.
var kubernetes = regexp.MustCompile(
	`^TASKRELAY_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$`)

// checkNames refuses variables that no binary reads and those that are set but empty.
func checkNames(env map[string]string) error {
	known := knownNames()
	types, typesSet := env[Prefix+"BIZ_TYPES"]
	prefixes := map[string]bool{}
	candidates := slices.Collect(maps.Keys(known))
	for biz := range strings.SplitSeq(types, ",") {
		if biz = strings.TrimSpace(biz); biz != "" {
			prefix := bizTypePrefix(biz)
			prefixes[prefix] = true
			for _, key := range bizKeys() {
				candidates = append(candidates, prefix+"_"+key)
			}
		}
	}
	slices.Sort(candidates) // a tie is broken the same way each time

	var errs []error
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if known[name] {
			if strings.TrimSpace(env[name]) == "" {
				errs = append(errs, empty(name))
			}
			continue
		}
		prefix, isBiz := cutBizKey(name)
		switch {
		case isBiz && typesSet && !prefixes[prefix]:
			errs = append(errs, &Error{fmt.Errorf("%s: no type of TASKRELAY_BIZ_TYPES (%s) has this prefix%s", name, types, nearest(name, candidates))})
		case isBiz && strings.TrimSpace(env[name]) == "":
			errs = append(errs, empty(name))
		case isBiz || kubernetes.MatchString(name):
		case strings.HasPrefix(name, Prefix+"TEST_"): // of the tests, and of taskrelay dev: where Postgres is
		default:
			errs = append(errs, &Error{fmt.Errorf("%s: unknown variable%s", name, nearest(name, candidates))})
		}
	}
	return joined(errs)
}

func empty(name string) error {
	return &Error{fmt.Errorf("%s: set but empty: give it a value, or leave it unset to get the default", name)}
}

func knownNames() map[string]bool {
	known := map[string]bool{}
	for _, list := range [][]Variable{RelayVariables(), WorkerVariables(), CLIVariables()} {
		for _, v := range list {
			known[v.Name] = true
		}
	}
	return known
}

// bizKeys lists the ends of the variables of a biz type: TARGET, MAX_ATTEMPTS…
func bizKeys() []string {
	var keys []string
	for _, v := range BizTypeVariables() {
		keys = append(keys, strings.TrimPrefix(v.Name, bizPrefix+"<TYPE>_"))
	}
	return keys
}

// cutBizKey splits TASKRELAY_BIZ_ORDER_MAX_DELAY into TASKRELAY_BIZ_ORDER and whether it ends in a known key.
// No key is the end of another one, so there is one way to split.
func cutBizKey(name string) (prefix string, ok bool) {
	for _, key := range bizKeys() {
		if p, found := strings.CutSuffix(name, "_"+key); found && strings.HasPrefix(p, bizPrefix) && len(p) > len(bizPrefix) {
			return p, true
		}
	}
	return "", false
}

// nearest names the candidate that was probably meant, if any is near enough.
func nearest(name string, candidates []string) string {
	best, distance := "", len(name)
	for _, c := range candidates {
		if d := levenshtein.ComputeDistance(name, c); d < distance {
			best, distance = c, d
		}
	}
	if best == "" {
		return ""
	}
	return ": did you mean " + best + "?"
}
