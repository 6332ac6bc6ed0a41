package main

import "context"

// scenario is a part of the benchmark that can be run by itself.
type scenario struct {
	name  string
	short bool // in the short form
	run   func(ctx context.Context, b *bench) error
}

var scenarios = []scenario{
	{"floors", true, floors},
	{"drain", true, drainOf(func(int) drainPlan { return drainPlan{name: "drain"} })},
	{"enqueue", true, enqueueing},
	{"latency", true, latency},
	{"steady", false, steady},
	{"scheduled", false, drainOf(func(tasks int) drainPlan { return drainPlan{name: "scheduled", future: 10 * tasks} })},
	{"snapshot", false, drainOf(func(tasks int) drainPlan { return drainPlan{name: "snapshot", churn: 3 * tasks} })},
	{"retry", false, drainOf(func(int) drainPlan { return drainPlan{name: "retry", fail: true} })},
	{"types", false, drainOf(func(int) drainPlan { return drainPlan{name: "types", idle: 299} })},
	// RETAIN_*: ten times as many old rows lie there, and go as the relay finds the time.
	{"finished", false, drainOf(func(tasks int) drainPlan { return drainPlan{name: "finished", old: 10 * tasks} })},
	{"retention", false, drainOf(func(tasks int) drainPlan { return drainPlan{name: "retention", old: 10 * tasks, purge: true} })},
	{"idle", false, idle},
}

func drainOf(plan func(tasks int) drainPlan) func(context.Context, *bench) error {
	return func(ctx context.Context, b *bench) error { return b.drains(ctx, plan(b.tasks)) }
}

func scenarioNames() (names []string) {
	for _, s := range scenarios {
		names = append(names, s.name)
	}
	return names
}
