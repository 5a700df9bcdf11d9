# One line per target: what CI runs and what you type are the same commands.
# DURATION and SEED steer chaos and fuzz; SEED=0 lets the chaos run draw a seed, which it prints first.
DURATION ?= 1m
SEED     ?= 0
KILLS    ?= 50
LINT     := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

.PHONY: help quick test race chaos fuzz bench lint

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quick: ## what to run after every change: seconds
	go test -short ./...

test: ## everything but chaos at length: two to three minutes
	go test ./...

race: ## twice, in random order, with the race detector
	go test -race -count=2 -shuffle=on ./...

chaos: ## random faults for DURATION, replayed by SEED; consumers killed KILLS times at each point
	go test . -count=1 -v -timeout 0 -parallel 4 -run 'TestChaos' -chaos.for=$(DURATION) -chaos.seed=$(SEED)
	go test ./consumer -count=1 -run 'TestKilledConsumer' -kill.n=$(KILLS)

fuzz: ## every Fuzz function of every package for DURATION each
	@set -e; go vet ./...; for p in $$(go list ./...); do for f in $$(go test -list '^Fuzz' "$$p" | grep '^Fuzz' || true); do echo "== $$p $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(DURATION) "$$p"; done; done

bench: ## every benchmark, with allocations
	go test -run '^$$' -bench . -benchmem ./...

lint: ## go vet and golangci-lint, through the Go toolchain alone
	go vet ./... && go run $(LINT) run
