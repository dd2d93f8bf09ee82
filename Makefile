# `make quickstart` sets everything up and runs the whole pipeline on the CPU; `make test` passes the tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# OpenMP threads that spin while they wait slow a busy small machine down several times.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0

.PHONY: quickstart test remake check install clean

quickstart: install
	$(BIN)/tmax run configs/quickstart.yaml
	$(BIN)/tmax report runs/quickstart

test: install
	$(BIN)/pytest tests -m "not remake"

# The tiny policy that comes with tmax: does the command still make one as good? Some twenty minutes.
remake: install
	$(BIN)/pytest tests/integration/test_tiny.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/unit -n 2

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml scripts/install.sh
	bash scripts/install.sh $(PYTHON) $(VENV)
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
