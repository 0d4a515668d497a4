# Builds its own .venv from the pinned lock, so a system Python that refuses `pip install` is no obstacle.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
READY := $(VENV)/.ready

.PHONY: demo test test-vllm check bench soak format clean

demo: $(READY)
	$(BIN)/python -m specpipe decode proposer=ngram

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Several GB and some minutes: what goes to vLLM, in vLLM itself, on the CPU.
test-vllm: $(READY) $(VLLM)/.ready
	$(BIN)/python -m pytest -s tests/vllm/check_vllm.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

bench: $(READY)
	$(BIN)/python benchmarks/forward.py
	$(BIN)/python benchmarks/loop.py

# Some 20 minutes, not part of the tests: 2,000 random requests in one process, memory and greedy texts checked.
soak: $(READY)
	$(BIN)/python benchmarks/soak.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The three that go are not needed, and the builds for a GPU that pip finds do not fit torch for CPUs.
$(VLLM)/.ready: tests/vllm/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) outputs dist build .pytest_cache .mypy_cache .ruff_cache
