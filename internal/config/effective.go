package config

import (
	"os"
	"slices"
	"strings"
)

// Setting is one variable as it is in effect in this environment.
type Setting struct {
	Name    string   `json:"name"` // with its prefix
	Value   string   `json:"value"`
	Source  string   `json:"source"`             // environment, default, or unset
	ReadBy  []string `json:"read_by"`            // the binaries
	BizType string   `json:"biz_type,omitempty"` // of the stock worker
	Desc    string   `json:"meaning"`
}

// Effective lists every variable of every binary, then those of each type of TASKRELAY_BIZ_TYPES. It checks nothing: of a
// value that is refused the operator wants to see what was given. Secrets and what may hold one (user, password and query
// of an address) are left out.
func Effective() []Setting {
	var list []Setting
	index := map[string]int{}
	for _, binary := range []struct {
		name string
		list []Variable
	}{{"relay", RelayVariables()}, {"worker", WorkerVariables()}, {"taskrelay", CLIVariables()}} {
		for _, v := range binary.list {
			if i, ok := index[v.Name]; ok {
				list[i].ReadBy = append(list[i].ReadBy, binary.name)
				continue
			}
			index[v.Name] = len(list)
			s := v.setting(v.Name)
			s.ReadBy = []string{binary.name}
			list = append(list, s)
		}
	}
	var types List
	if types.Set(os.Getenv(Prefix+"BIZ_TYPES")) != nil {
		return list
	}
	for _, bizType := range types {
		for _, v := range BizTypeVariables() {
			s := v.setting(bizTypePrefix(bizType) + strings.TrimPrefix(v.Name, bizPrefix+"<TYPE>"))
			s.ReadBy, s.BizType = []string{"worker"}, bizType
			list = append(list, s)
		}
	}
	return list
}

func (v Variable) setting(name string) Setting {
	s := Setting{Name: name, Desc: v.Desc}
	value, set := os.LookupEnv(name)
	switch {
	case set:
		s.Source, s.Value = "environment", v.shown(value)
	case v.Default != "":
		s.Source, s.Value = "default", v.Default
	default:
		s.Source = "unset"
		if v.Required {
			s.Source = "required, unset"
		}
	}
	return s
}

// shown is a given value without its secrets. The type of the field says what it may hold.
func (v Variable) shown(value string) string {
	switch v.field.Interface().(type) {
	case Secret:
		if value == "" {
			return ""
		}
		return redacted
	case URL:
		return URL(value).Redacted()
	}
	return value
}

// LoadAll reads the environment as each of the given binaries would (relay, worker, taskrelay) and returns what is wrong
// with it, by binary.
func LoadAll(binaries ...string) map[string]error {
	wrong := map[string]error{}
	for name, load := range map[string]func() error{
		"relay":     func() error { _, err := LoadRelay(); return err },
		"worker":    func() error { _, err := LoadWorker(); return err },
		"taskrelay": func() error { _, err := LoadCLI(); return err },
	} {
		if err := load(); err != nil && slices.Contains(binaries, name) {
			wrong[name] = err
		}
	}
	return wrong
}
