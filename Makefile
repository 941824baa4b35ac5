# Both main targets do all their own set-up, can be run again at any time, and need nothing but Python >= 3.10.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
ARGS   ?=
# Processes of `make test`, each with ranks of its own; a file stays in one of them.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile

# Whose instructions the kernels of `make test` may use (CPU=avx2): rounding, and so a test that leans on it, depends on
# the processor. MKL heeds MKL_ENABLE_INSTRUCTIONS on Intel's processors only, MKL_CBWR on all. Ranks inherit them.
CPU := own
CPUS := own libraries avx2 baseline
CPU_own :=
CPU_libraries := MKL_CBWR=COMPATIBLE MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
CPU_avx2 := ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
CPU_baseline := ATEN_CPU_CAPABILITY=default $(CPU_libraries)
ifeq ($(filter $(CPU),$(CPUS)),)
$(error CPU=$(CPU): expected one of $(CPUS))
endif

# `make test QUICK=1`: one test of every promise, listed in a file.
QUICK ?=
TESTS := $(if $(QUICK),@tests/promises.txt,--ignore=tests/clients)
WHOLE := pytest with $(WORKERS) workers, each with ranks of its own, then a part again on the emulated accelerator, ruff and mypy
ABOUT := $(if $(QUICK),One test of every promise: about two minutes on two quiet cores,The whole suite: $(WHOLE). Ten to twenty minutes on two cores; make test QUICK=1: about two)

# What runs on the emulated accelerator: all that is general, and of that in every run of the tests what depends on streams,
# copies to and from host memory, and NCCL's ways. Each line is a file and the tests of it.
ON_ACCELERATOR := tests/training tests/engine tests/optim tests/wrapper tests/checkpoint
of = $(addprefix tests/$(strip $(1)).py::test_,$(2))
SOME_ON_ACCELERATOR := \
	$(call of,training/test_parity,strategies_of_all_front_ends hybrid_strategies_on_any_mesh offloaded_parameters) \
	$(call of,training/test_low_precision,microbatches_add_up_in_the_reduce_dtype \
		calls_before_one_backward_add_up_in_the_reduce_dtype) \
	$(call of,training/test_exceptions,step_after_a_failure pending_gradients_and_failures \
		backward_after_one_that_raised all_gather_that_fails) \
	$(call of,engine/test_collectives,two_losses_on_one_graph) \
	$(call of,engine/test_offload,parity parity_on_two_axes gradients_are_added optimizer_in_a_hook \
		last_backward_at_the_end some_units_offload a_fraction) \
	$(call of,engine/test_hsdp,interleavings microbatches_add_up_in_the_reduce_dtype) \
	$(call of,engine/test_ragged,parameters_of_all_kinds subgroups) \
	$(call of,checkpoint/test_save_load,any_kind_continues_what_another_saved background_saves_use_the_same_memory_again) \
	$(call of,training/test_copies_and_pickling,deepcopy) \
	$(call of,test_tracing,a_trace what_a_trace_refuses)

.PHONY: help train test test-accelerator test-clients fuzz golden lint docs bench gpu clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

train: $(STAMP)  ## train a small GPT on real text, sharded over local ranks (ARGS="--steps 20" passes options)
	$(VENV)/bin/fullshard train $(ARGS)

test: $(STAMP)   ## run the whole test suite, then ruff and mypy (QUICK=1: one test of every promise)
	$(if $(ARGS),,@echo "$(ABOUT).")
	$(CPU_$(CPU)) $(VENV)/bin/python -m pytest $(PARALLEL) $(TESTS) $(ARGS)
	$(if $(ARGS)$(QUICK),,FULLSHARD_TEST_DEVICE=emulated $(CPU_$(CPU)) $(VENV)/bin/python -m pytest -q $(PARALLEL) $(SOME_ON_ACCELERATOR))
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test-accelerator: $(STAMP)  ## tests of engine, optimizers, wrapper and checkpoints on the emulated accelerator, with race checks
	FULLSHARD_TEST_DEVICE=emulated $(VENV)/bin/python -m pytest $(or $(ARGS),$(ON_ACCELERATOR))

test-clients: $(CLIENTS_STAMP)  ## programs that use torch's FSDP, on fullshard: accelerate, transformers, PEFT, Lightning, ...
	$(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

fuzz: $(STAMP)   ## many random models and histories against unsharded ones (N=2000 SEED=0; ARGS=--shrink)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.fuzz $(or $(N),200) --seed $(or $(SEED),0) $(ARGS)

golden: $(STAMP)  ## write the golden traces anew: the order of collectives, buffers and phases, in tests/golden/traces
	FULLSHARD_GOLDEN=rewrite OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/golden $(ARGS)

lint: $(STAMP)   ## format and check the code
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/mypy

docs: $(DOCS_STAMP)  ## build the site into site/, where any warning is an error (ARGS=serve: serve it instead)
	$(VENV)/bin/mkdocs $(or $(ARGS),build --strict --quiet)

bench: $(STAMP)  ## the CPU benchmarks; results go to bench/results/ and docs/performance/benchmarks.md
	$(VENV)/bin/python -m bench all --write-document $(ARGS)

# On the interpreter at hand, whose torch knows the GPU: constraints.txt pins torch without CUDA.
gpu:             ## what only a real GPU can show, in ten minutes; results go to bench/results/ and docs/performance/gpu.md
	PYTHONPATH=src $(PYTHON) -m bench gpu $(ARGS)
	NCCL_BUFFSIZE=524288 NCCL_MAX_CTAS=2 FULLSHARD_TEST_DEVICE=cuda PYTHONPATH=src timeout --signal=INT 350 $(PYTHON) -m pytest -q tests/devices $(ON_ACCELERATOR)

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) $(CLIENTS) site .mypy_cache .ruff_cache .pytest_cache .hypothesis

# One install for every target. The stamp is written last, so an interrupted install is done again.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("fullshard needs Python 3.10 or newer, found %s (set PYTHON=...)" % sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# An environment of their own: these programs want hundreds of MB, and `make test` is to run without them.
$(CLIENTS_STAMP): pyproject.toml constraints.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,clients]'
	touch $@
