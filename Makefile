# `make serve` and `make test` are all that is needed; both install into .venv first.
#   ARGS      options of `naiad serve`
#   PIP_ARGS  options of pip, e.g. --extra-index-url URL for PyTorch's small CPU build
#   WORKERS   tests that run side by side
#   PYTHON    the interpreter .venv is made with: 3.10, 3.11 or 3.12
SHELL := /bin/bash
WORKERS ?= 2
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.10,$(if $(shell python$(v) -c 'print(1)' 2>/dev/null),python$(v))) python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_APART := $(BIN)/python -m pytest --durations=20 -n $(WORKERS) --dist loadfile
CORE_TESTS := $(addprefix tests/,config engine engine_process frontend kv_cache sampling scheduler speculation tokenization)
TORCH_TESTS := $(addprefix tests/,engine engine_process kv_cache model_runner models sampling scheduler speculation)
CPP := $(wildcard kernels/naiad_kernels/native/src/*.h kernels/naiad_kernels/native/src/*.cpp tests/native/driver/*.cpp perf/peers/*.c)
REQUIREMENTS := requirements/torch.txt requirements/lock.txt requirements/server.txt

.PHONY: serve deploy-envoy deploy-haproxy deploy-vllm-router deploy-sglang-router test test-all test-deploy sanitize test-gpu memcheck-gpu test-clients fault fuzz fuzz-readers audit bench-gpu bench-peers check generated install lock \
	lock-deploy lock-peers lock-clients lock-quantize clean

serve: .venv/.installed
	exec $(BIN)/naiad serve $(ARGS)

# A proxy in front of replicas: ARGS="--replica HOST:OPENAI_PORT:GRPC_PORT --replica …"; docs/deployment.md.
deploy-envoy: .venv/.installed
	exec $(BIN)/python -m deploy.proxy envoy $(ARGS)

deploy-haproxy: .venv/.installed
	exec $(BIN)/python -m deploy.proxy haproxy $(ARGS)

deploy-vllm-router: .venv/.installed
	exec $(BIN)/python -m deploy.proxy vllm-router $(ARGS)

deploy-sglang-router: .venv/.installed
	exec $(BIN)/python -m deploy.proxy sglang-router $(ARGS)

# Tests with a server come after the others, that many of them at most side by side: their servers wait for
# things to happen in time.
test: .venv/.installed
	$(PYTEST_APART) -m "not slow and not sanitizer and not gpu and not server and not deploy" $(ARGS)
	$(PYTEST_APART) -m "server and not slow and not gpu" $(ARGS)

# What an engine computes is tested on the native kernels, and on torch's ops as where there is no compiler. The
# fuzz of the engine has a runner that computes nothing, so it runs once. The core is also run as `python -O` would,
# which leaves out the asserts of the product and keeps those of the tests.
# Without a reorder the files with slow tests come first (tests/conftest.py).
test-all: .venv/.installed sanitize
	$(PYTEST_APART) --no-loadscope-reorder -m "not sanitizer and not gpu and not server and not deploy" $(ARGS)
	$(PYTEST_APART) -m "not gpu and not server" --cpu-kernels torch $(TORCH_TESTS) \
		--ignore tests/engine/test_engine_fuzz.py $(ARGS)
	PYTHONOPTIMIZE=1 $(PYTEST_APART) -m "not slow and not gpu and not server" $(CORE_TESTS) $(ARGS)
	$(PYTEST_APART) --no-loadscope-reorder -m "server and not gpu" $(ARGS)
	$(BIN)/python -m pytest --durations=20 -m deploy tests/deployment $(ARGS)

# Replicas behind proxies, each with what the package index or the distribution has, and manifests without a
# cluster. One file at a time: three servers need the cores.
test-deploy: .venv/.installed
	$(BIN)/python -m pytest --durations=20 -m deploy tests/deployment $(ARGS)

# The kernel tests with addresses and undefined behaviour checked, then replayed tapes with threads checked.
# Nothing needs a leak: Python frees little at its end.
sanitize: .venv/.installed
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 $(PYTEST_APART) tests/native -m "not slow and not sanitizer" \
		--native-flags "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" $(ARGS)
	$(BIN)/python -m pytest --durations=20 tests/native -m sanitizer $(ARGS)

# Needs an NVIDIA GPU; docs/gpu-status.md says what has been run on one.
test-gpu: .venv/.installed
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Every tensor in an allocation of its own, so that what is read or written beside it is seen. Graphs can
# not be captured then.
memcheck-gpu: .venv/.installed
	@command -v compute-sanitizer >/dev/null || { echo "naiad: error: compute-sanitizer is not on PATH: install the CUDA toolkit" >&2; exit 1; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --padding 4096 --error-exitcode 1 \
		$(BIN)/python -m pytest -m gpu -k "not captured" $(or $(ARGS),tests/kernels)

# The tests of one of the sixty faults in docs/reliability.md: make fault N=22.
fault: .venv/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --fault $(N) $(ARGS)

# Random mixes of requests through all doors, each compared with what it gets alone. ARGS="--first-mix 10000"
# goes on with others; a mix that fails is printed as short as it can be.
fuzz: .venv/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist load tests/faults/test_mixes.py --mixes 10000 $(ARGS)

# Every reader of bytes, guided by the lines that they reach; needs Python 3.11 or 3.12. ARGS="gguf --runs 5000000"
# fuzzes one of them for longer.
fuzz-readers: .venv/.installed
	$(PIP) install -q --no-deps --require-hashes --upgrade --target build/fuzz/atheris -r requirements/fuzz.txt
	PYTHONPATH=build/fuzz/atheris $(BIN)/python tests/fuzz/fuzz_readers.py $(ARGS)

# Pins and hashes, licences, known vulnerabilities, for which it asks pypi.org.
audit: .venv/.installed
	test -x build/audit/bin/python || $(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes \
		-r requirements/audit.txt
	$(BIN)/python requirements/audit.py --pip-audit build/audit/bin/pip-audit

# Foreign clients of the OpenAI API, each in an environment of its own below build/clients (5 GB with Node and
# torch; vllm's is that of bench-peers). ARGS="-k litellm" runs one.
test-clients: .venv/.installed
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m pytest tests/clients $(ARGS)

bench-gpu: .venv/.installed
	$(BIN)/python -m perf.kernels.bench
	$(BIN)/python -m perf.engine.whole_model --models llama-3-8b,default

# Naiad beside other engines on a CPU, each in an environment of its own under build/peers. Use an otherwise
# idle machine, whose cores are kept awake meanwhile.
bench-peers: .venv/.installed
	$(BIN)/python -m perf.common.awake $(BIN)/python -m perf.peers.bench --pip-args="$(PIP_ARGS)" $(ARGS)

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/docs

# The config.pbtxt files and the tables of docs/compatibility.md and docs/openai.md, from the tables in the code.
generated: .venv/.installed
	$(BIN)/python -m naiad.frontend.generate
	$(BIN)/python -m naiad.openai_server.reference_page

install: .venv/.installed

# The lock names every other package with hashes, so nothing is resolved here.
.venv/.installed: $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' || { echo "naiad: error: $(PYTHON) is not Python 3.10, 3.11 or 3.12: install one and name it, make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "naiad: error: $(PYTHON) has no venv: install its package python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install $(PIP_ARGS) -r requirements/torch.txt
	$(PIP) install $(PIP_ARGS) --no-deps --require-hashes -r requirements/lock.txt
	$(PIP) install $(PIP_ARGS) --no-deps --require-hashes -r requirements/server.txt
	$(PIP) install --no-deps --no-build-isolation --no-index -e .
	touch $@

# Needs uv. Pins that still satisfy lock.in are kept.
lock:
	cd requirements && uv pip compile lock.in --universal --python-version 3.10 --generate-hashes \
		--no-emit-package torch --no-emit-index-url --no-emit-find-links --no-annotate \
		--custom-compile-command "make lock" -o lock.txt
	cd requirements && uv pip compile audit.in --universal --python-version 3.10 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make lock" -o audit.txt

lock-deploy:
	cd deploy/requirements && for each in *.in; do uv pip compile $$each --python-version 3.11 \
		--python-platform x86_64-manylinux_2_31 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-annotate --custom-compile-command "make lock-deploy" -o $${each%.in}.txt || exit 1; done

lock-peers:
	cd perf/peers/requirements && for peer in *.in; do uv pip compile $$peer --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-package torch --no-emit-index-url \
		--no-emit-find-links --no-annotate --custom-compile-command "make lock-peers" -o $${peer%.in}.txt || exit 1; done

lock-clients:
	cd tests/clients/requirements && for client in *.in; do uv pip compile $$client --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-package torch --no-emit-index-url \
		--no-emit-find-links --no-annotate --custom-compile-command "make lock-clients" -o $${client%.in}.txt || exit 1; done
	cd tests/clients/requirements && for client in */; do npm --prefix $$client install --package-lock-only \
		--ignore-scripts || exit 1; done

# What `naiad quantize --method gptq` and `awq` install.
lock-quantize:
	cd backend_src/naiad/cli/quantize/llm_compressor && uv pip compile lock.in --universal --python-version 3.10 \
		--generate-hashes --no-emit-package torch --no-emit-index-url --no-emit-find-links --no-annotate \
		--custom-compile-command "make lock-quantize" -o lock.txt

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
