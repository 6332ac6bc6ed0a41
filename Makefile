# What a person or CI runs. Each target installs what it needs and this machine lacks: into ./.bin, and Postgres from
# the distribution.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN         := $(CURDIR)/.bin
NATSCLI     := v0.5.0
STATICCHECK := v0.8.2
GOSEC       := v2.30.0
GOVULNCHECK := v1.9.0
VERSION     ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
DEMO_FLAGS  ?=
BENCH_FLAGS ?=
TEST_FLAGS  ?= -timeout 12m
DURATION    ?= 60s
SEED        ?= 1
RATE        ?= 120

export PATH := $(BIN):$(PATH)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: postgres $(BIN)/nats build ## see the whole path at work: one process, a throw-away Postgres, an embedded NATS
	@$(BIN)/taskrelay dev --demo $(DEMO_FLAGS)

.PHONY: test
test: postgres pgbouncer faketime ## run all tests, on real servers that the tests start themselves
	go test $(TEST_FLAGS) ./...

.PHONY: build
build: ## build relay, worker and taskrelay into ./.bin
	@mkdir -p $(BIN)
	@# Plain flags, so that tests find the same packages in the build cache. The image is built by the Dockerfile.
	go build -ldflags "-X main.version=$(VERSION)" -o $(BIN)/ ./cmd/...

.PHONY: race
race: postgres pgbouncer faketime ## run all tests with the race detector
	go test -race $(TEST_FLAGS) ./...

.PHONY: chaos
chaos: postgres ## break everything for DURATION with SEED and prove that nothing is lost (DURATION=60s SEED=7 RATE=120)
	@mkdir -p $(BIN)
	go test -c -o $(BIN)/chaos ./tests/faults
	@# A program of its own, so that its last line and its exit code (1: a violation) are the last word.
	@cd tests/faults && $(BIN)/chaos -test.v -test.timeout 0 -test.run TestNothingIsLostWhateverDies -duration $(DURATION) -seed $(SEED) -rate $(RATE)

# The long forms of what make test has in short: every outage of Postgres, a cluster of three nats-servers taken down in
# each way, clocks that are set to and fro, wrong clocks of processes, the version before this one beside it. About ten
# minutes. SOAK=TestPostgresOutages: one of them.
SOAK ?= TestReplicatedStreams|TestPostgresOutages|StandbyIsPromoted|TestPostgresClockIsSet|TestProcessClocksAreWrong|TestSIGTERM|TestPreviousVersion
.PHONY: soak
soak: postgres pgbouncer faketime ## the long forms of the tests of clusters, databases, clocks and deploys
	go test -tags soak -count=1 -v -timeout 40m ./tests -run '$(SOAK)' -soak

.PHONY: recovery
recovery: postgres ## measure how long a wiped stream takes to be filled again with 50,000 tasks (the contract: 60 s)
	go test -tags measure -count=1 -v -run TestStreamOfFiftyThousandTasksWiped ./tests

# FULL=1: all scenarios with 100,000 tasks. OUT=file.json: the medians as JSON. BENCH_FLAGS: see .bin/bench -h.
.PHONY: load-bulk
load-bulk: postgres ## requeue 50,000 dead tasks in bulk beside normal traffic and compare its p95 (TASKS=50000 RATE=500 CALM=30)
	go test -tags load ./tests -run TestBulkLeavesNormalTrafficItsLatency -count=1 -v -timeout 30m

.PHONY: bench
bench: postgres ## measure taskrelay beside River and the machine's floors (FULL=1, OUT=file.json)
	@mkdir -p $(BIN)
	cd bench && go build -o $(BIN)/bench .
	@$(BIN)/bench $(if $(FULL),-full) $(if $(OUT),-out $(OUT)) $(BENCH_FLAGS)

# The tests of the main job, with race-enabled binaries too. All of ./tests take three times as long: make race.
CORE := TestVerify|TestInsertByPsql|TestRetriesUseOneKey|TestCompensation|TestKilled|TestWorkerSettles|TestWorkerRetries|TestLostStream|TestStopped
.PHONY: race-core
race-core: postgres ## run the core end-to-end tests with the race detector
	go test -race $(TEST_FLAGS) -run '$(CORE)' ./tests

.PHONY: observe
observe: ## test the alert rules and the dashboard (deploy/observability), with the libraries of Prometheus
	cd deploy/check && go test ./...

.PHONY: plans
plans: postgres ## look at the plans of all hot statements on 1,000,000 rows
	go test $(TEST_FLAGS) -v -run TestPlansDoNotDependOnStatistics ./tests -plan-rows 1000000

# Its database of known holes is at vuln.go.dev, so this needs the network; a machine without it fails here and says so. What
# gosec finds and is meant is said in the line of code, by #nosec with the reason.
.PHONY: security
security: $(BIN)/govulncheck-$(GOVULNCHECK) $(BIN)/gosec-$(GOSEC) ## look for known holes in what is built in (govulncheck) and for mistakes in the code (gosec)
	$(BIN)/gosec-$(GOSEC) -quiet -exclude-generated ./cmd/... ./pkg/... ./internal/... ./schema/... ./deploy/
	$(BIN)/govulncheck-$(GOVULNCHECK) ./...

.PHONY: vet
vet: ## go vet
	go vet ./...

.PHONY: lint
lint: vet $(BIN)/staticcheck-$(STATICCHECK) ## vet, gofmt, staticcheck, and whether go.mod is tidy
	@unformatted=$$(gofmt -l $$(git ls-files --cached --others --exclude-standard '*.go')); \
	if [ -n "$$unformatted" ]; then echo "not formatted, run gofmt -w:"; echo "$$unformatted"; exit 1; fi
	$(BIN)/staticcheck-$(STATICCHECK) ./...
	go mod tidy -diff
	cd bench && go vet ./...

.PHONY: ci
ci: ## what CI runs
	bash .ci/run

.PHONY: postgres
postgres: ## install the programs of a Postgres server when there are none (starts nothing)
	@scripts/ensure-postgres

.PHONY: pgbouncer
pgbouncer: ## install the program pgbouncer when it is missing (starts nothing); a test puts it before Postgres
	@scripts/ensure-pgbouncer

.PHONY: faketime
faketime: ## install libfaketime when it is missing; a test sets the clock of a Postgres with it
	@scripts/ensure-faketime

.PHONY: tools
tools: $(BIN)/nats $(BIN)/staticcheck-$(STATICCHECK) ## install the nats CLI and staticcheck into ./.bin

.PHONY: clean
clean: ## remove ./.bin
	rm -rf $(BIN)

$(BIN)/nats:
	@echo "installing the nats CLI $(NATSCLI) into ./.bin (a minute or two, once)"
	@mkdir -p $(BIN)
	GOBIN=$(BIN) go install github.com/nats-io/natscli/nats@$(NATSCLI)

# The version is in the file's name, so that a new one here is installed.
$(BIN)/staticcheck-$(STATICCHECK):
	@mkdir -p $(BIN)
	GOBIN=$(BIN) go install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK)
	@mv $(BIN)/staticcheck $@

$(BIN)/gosec-$(GOSEC):
	@mkdir -p $(BIN)
	GOBIN=$(BIN) go install github.com/securego/gosec/v2/cmd/gosec@$(GOSEC)
	@mv $(BIN)/gosec $@

$(BIN)/govulncheck-$(GOVULNCHECK):
	@mkdir -p $(BIN)
	GOBIN=$(BIN) go install golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK)
	@mv $(BIN)/govulncheck $@
