# Targets for development. Each target is one or two commands that can also be run directly.
# Tools and builds are kept in a cache that all checkouts share; see scripts/test.

export EXEC_SERVER_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/exec-server
export CARGO_TARGET_DIR ?= $(EXEC_SERVER_CACHE)/target

# Seconds for each fuzz target.
FUZZ_SECONDS ?= 60
# How long `make soak` runs.
SOAK ?= 1h
# More options for the benchmark, such as --quick.
BENCH_ARGS ?=

# Features of packages besides the default ones. `fleet`: several rendezvous servers that act as one.
FEATURES ?= fleet

# Target triple of this machine; +crt-static requires an explicit target.
HOST_TARGET ?= $(shell rustc -vV | sed -n 's/^host: //p')

.DEFAULT_GOAL := help
.PHONY: help build static dist man deb cargo-deb start check test interop interop-matrix conformance bench soak fuzz demo clean

help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

build: ## Build the server with the options of a release
	cargo build --release --bin exec-server --features "$(FEATURES)"

static: ## Build the server as one file without shared libraries
	RUSTFLAGS="-C target-feature=+crt-static" cargo build --release --bin exec-server --features "$(FEATURES)" --target $(HOST_TARGET)
	scripts/static $(CARGO_TARGET_DIR)/$(HOST_TARGET)/release/exec-server

dist: ## Static binaries for x86_64 and arm64 with tarballs, packages, an image and checksums in target/dist
	FEATURES="$(FEATURES)" scripts/dist

man: build ## Write the manual pages and completions to target/man
	mkdir -p target/man
	$(CARGO_TARGET_DIR)/release/exec-server man --out target/man
	for shell in bash zsh fish; do \
	    $(CARGO_TARGET_DIR)/release/exec-server completions $$shell > target/man/exec-server.$$shell; done

deb: cargo-deb man ## Build the Debian package; needs cargo-deb
	cargo deb -p exec-server --no-build --strip

cargo-deb:
	@cargo deb --version >/dev/null 2>&1 || { echo "missing cargo-deb: cargo install --locked cargo-deb" >&2; exit 1; }

start: ## Start a server and show how to use it
	scripts/start

check: ## Check formatting, lints, wording, dependencies and documentation
	scripts/test check

test: ## Run everything that CI runs
	scripts/test

interop: ## Test with the real Codex CLI, which is installed on first use
	scripts/test interop

interop-matrix: ## Test with every published Codex CLI from 0.165.0 on, or VERSIONS="0.166.0 0.169.0"
	scripts/interop-matrix $(VERSIONS)

conformance: ## Run the conformance suite in CONFORMANCE_SUITE
	scripts/test conformance

bench: build ## Measure this server and the Codex CLI's server
	cargo build --release -p exec-server-bench
	$(CARGO_TARGET_DIR)/release/exec-server-bench --peer "$$(scripts/codex) exec-server" $(BENCH_ARGS)

soak: build ## Run mixed work for SOAK (default 1h); fail if memory, descriptors or latency grow
	cargo build --release -p exec-server-bench
	$(CARGO_TARGET_DIR)/release/exec-server-bench --soak $(SOAK)

fuzz: ## Run each fuzz target for FUZZ_SECONDS; needs a C++ compiler
	FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/test fuzz

demo: ## Show the real Codex CLI on this server
	cargo build --bin exec-server
	CODEX_BIN="$$(scripts/codex)" cargo run -q -p exec-server-testkit --example demo -- \
	    $(CARGO_TARGET_DIR)/debug/exec-server

clean: ## Remove build output; keep installed tools
	cargo clean
