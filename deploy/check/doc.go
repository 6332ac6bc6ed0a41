// Package check tests the files of deploy/observability with the libraries of Prometheus: that every rule parses and
// fires when it should, and that every query, of a rule or of the dashboard, names a metric that there is.
//
// It is a module of its own, so that Prometheus is no dependency of the product. It imports the engine, the parser and
// the rule format, but not package rules, which brings the clients of three clouds: what an alert's "for" means is in
// evaluate.go. [15 s to build, promtool takes minutes.] The test file is in promtool's own format.
package check
