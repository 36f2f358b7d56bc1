# One word per task. `make ci` is what CI runs, step by step, on any machine.
VENV    ?= .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
# What pip is told for torch; empty, the version the project is tested with, in the build that fits the machine.
TORCH   ?=
# Which extra of pyproject.toml: dev, or dev-all with mlflow, wandb, deepspeed, transformers and what is measured beside us.
EXTRA   ?= dev
# Tests of one file stay in one process, and two files run at a time. WORKERS=0 is one process, for a debugger.
WORKERS ?= 2
# Slow tests mostly wait, for timeouts and for processes to start: two at a time keep two cores half busy.
SLOW_WORKERS ?= 2
MIN_TESTS := tests/unit/test_layout.py tests/unit/test_batches.py tests/unit/test_config.py tests/unit/test_train.py tests/ranks/test_run_ranks.py
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.PHONY: accelerator all-reduces applications bench build campaign check check-min check-tests ci clean collectives course cuda-symbols device-matrix docs docs-version documents drills drills-on-device faults figures forks fuzz \
  gpu-smoke horovod image labs large-model layers ledger lint lock matrix migrations muon mutants mutation nvme on-device pages parameter-server patterns plan-memory plan-published plan-time played ray recording rehearsals release resume-matrix save-plan scaling setup setup-min simulations site-check slow streams targets tensorflow test tune tune-fashion tune-overhead tune-quality tune-targets tune-waiting tune-winners tune-workers types verdicts wheel-check

setup: $(VENV)/ready-$(EXTRA)     ## make the environment, with the versions of constraints.txt

setup-min:                        ## the least that runs a test: the core and pytest
	$(MAKE) setup EXTRA=test

# Compiled at the end on all cores, where pip takes one; some packages ship files that are no Python of this version.
# Ours too: where PYTHONDONTWRITEBYTECODE is set, each of a test's processes would compile them again.
$(VENV)/ready-$(EXTRA): pyproject.toml constraints.txt .ci/install-torch
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	.ci/install-torch "$(TORCH)" $(PIP)
	$(PIP) --editable ".[$(EXTRA)]"
	$(BIN)/python -m compileall -qq -j 0 $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") src tests || true
	touch $@

lock:                             ## write constraints.txt: the newest versions that fit together, for every Python and system
	test -x build/lock/bin/python || $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade uv
	.ci/lock build/lock/bin/uv > build/constraints.txt
	mv build/constraints.txt constraints.txt

ci:                               ## all that CI runs, what takes one core side by side; .ci/run makes its environment first
	$(MAKE) --jobs 3 --output-sync=target check-tests build wheel-check types docs lint layers accelerator
	$(MAKE) --jobs 2 --output-sync=target slow drills on-device

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

layers:                           ## imports only point down
	$(BIN)/lint-imports

check: lint types layers check-tests  ## everything that can be said in ten minutes

check-tests:                      ## every test that takes less than ten seconds
	$(BIN)/pytest -m "not slow and not long and not alone" -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(BIN)/pytest -m "alone and not slow" $$(grep -rl "mark[.]alone" tests --include='test_*.py')

check-min:                        ## a first green test: the core, and two ranks that train; needs setup-min only
	$(BIN)/pytest $(MIN_TESTS)

slow:                             ## the tests that check leaves out: longer trainings on real ranks
	$(BIN)/pytest -m "slow and not long" -n $(SLOW_WORKERS) --dist loadfile

build:                            ## wheel and sdist, into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist

wheel-check: build                ## the wheel in an environment of its own, and the README's quick start with it
	.ci/wheel-check $(PYTHON) build/wheel-check

image:                            ## the image of deploy/Dockerfile, and the README's quick start in it; ENGINE=podman for podman
	.ci/image-check

release:                          ## what a release publishes, into dist/: built twice alike, tried from the wheel, bill of materials, checksums
	.ci/release $(PYTHON) build/release

accelerator:                      ## the test device (tests/accelerator), built once and kept in build/accelerator
	$(BIN)/python tests/accelerator/build.py build/accelerator

on-device: accelerator            ## the tests on the test device
	PYTHONPATH=build/accelerator $(BIN)/pytest tests/accelerator -m "not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

course:                           ## every template, solution and wrong attempt of `drivetrain learn` through its check (minutes)
	$(BIN)/python -m tests.learn.course

labs:                             ## the labs of `drivetrain learn` on clusters of two hosts: solutions, templates, wrong attempts (root; half an hour)
	$(BIN)/pytest -m long tests/learn/test_labs.py

gpu-smoke:                        ## on a machine with GPUs, in ten minutes: parity, resume, a kill, bitwise, overhead; one report
	$(BIN)/python -m tests.gpu_smoke build/gpu-smoke.md

cuda-symbols:                     ## a CUDA build of torch, without a GPU: the names we ask for, what must not wake the driver (6 GB)
	tests/cuda_symbols/run.sh $(PYTHON) build/cuda-symbols

test:                             ## all tests
	$(BIN)/pytest

docs:                             ## the site, warnings as errors, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Two packages that drive a browser and nobody else needs, in an environment of their own (build/); the browser is the system's.
SITE_CHECK := build/site-check/bin/python
BROWSER    ?= /usr/bin/chromium
site-check: docs                  ## every page in a browser: axe, width, requests; pictures of top-level pages in build/site-pictures (minutes)
	test -x $(SITE_CHECK) || $(PYTHON) -m venv build/site-check
	$(SITE_CHECK) -m pip install --quiet --disable-pip-version-check playwright axe-playwright-python
	$(SITE_CHECK) tests/pages/site_check.py site build/site-pictures --browser $(BROWSER)

docs-version: docs                ## the site as this release's, on the branch gh-pages beside those of earlier ones (not pushed)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike deploy --update-aliases $$(sed -n 's/__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' src/drivetrain/_version.py) latest
	$(BIN)/mike set-default --allow-empty latest

pages:                            ## what the code writes: commands, config keys, exit codes, the lectures' pictures; and measured tables
	$(BIN)/python -m tests.pages
	$(BIN)/python -m tests.pages.tables

# $(call play,PAGE,FOLDER,FLAGS): the commands of a page, run in a folder of their own beside the examples
play = rm -rf $(2) && mkdir -p $(2) && cp -r examples $(2) && \
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/pages/play.py $(1) $(2) $(3)

# Pages whose commands run on any machine. `make played-tour` runs those of docs/tour.md; `make played-tour WRITE=--write` puts what
# they print on the page.
PLAYED := checkpoints config evaluation exports index optimization recovery rehearse report simulate stopping tour
$(PLAYED:%=played-%): played-%:
	$(MAKE) setup EXTRA=dev-all
	$(call play,docs/$*.md,build/played/$*,$(WRITE))

played: $(PLAYED:%=played-%)      ## the commands of these pages, one page after the other, as the pages say (minutes)

# The commands of an application's README, run in order; each must end as the page says. `make application-images WRITE=--write` puts
# what they print on the page.
APPLICATIONS := contrastive finetuning images language recommender
$(APPLICATIONS:%=application-%): application-%:
	$(MAKE) setup EXTRA=dev-all
	$(call play,examples/applications/$*/README.md,build/applications/$*,$(WRITE))

applications: $(APPLICATIONS:%=application-%)  ## all of examples/applications, one after the other, as their pages say (half an hour)

recording:                        ## two real runs, one of them killed, as the picture of the home page and of links to it
	$(BIN)/python -m tests.pages.recording
	$(BIN)/python -m tests.pages.card

horovod:                          ## Horovod for this torch, built once (ten minutes) and kept in build/horovod
	deploy/horovod/build.sh $(BIN)/python build/horovod
	$(BIN)/python -m pip install --quiet build/horovod/horovod-*.whl

nvme:                             ## DeepSpeed's async_io, compiled once (minutes; needs libaio-dev), and training on a disk
	PATH="$(abspath $(BIN)):$$PATH" DS_ACCELERATOR=cpu $(BIN)/python -c \
	  "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"
	$(BIN)/pytest tests/ranks/test_nvme.py

ray:                              ## everything on real Ray clusters: crashed hosts, elastic, the Jobs API (needs root)
	$(PIP) --editable ".[ray]"
	$(BIN)/pytest tests/ray

targets:                          ## the same examples on every target, next to one process, into docs/targets.md (needs root)
	$(PIP) --editable ".[ray]"
	$(BIN)/python -m tests.targets.table docs/targets.md benchmarks/results/targets

drills:                           ## the first 8 drills of the campaign, as CI runs them
	rm -rf build/drills
	$(BIN)/python -m tests.drills.campaign 8 --output build/drills

drills-on-device: accelerator     ## the first 20 on the test device; results land in benchmarks/results/
	rm -rf benchmarks/results/faults-on-device
	PYTHONPATH=build/accelerator $(BIN)/python -m tests.drills.campaign 20 --output benchmarks/results/faults-on-device

campaign:                         ## all 300; results land in benchmarks/results/
	rm -rf benchmarks/results/faults
	$(BIN)/python -m tests.drills.campaign 300 --output benchmarks/results/faults

ledger:                           ## 20 runs of every kind: does the ledger add up to the wall clock?
	rm -rf benchmarks/results/ledger
	$(BIN)/python -m tests.drills.ledger_check benchmarks/results/ledger

parameter-server:                 ## parameter servers next to ddp and local SGD, ten seeds, on equal and unequal ranks (minutes)
	$(BIN)/python -m benchmarks parameter-server --output benchmarks/results/parameter_server

streams:                          ## every stream and sampler, counted sample by sample through kills and resizes, into docs/streams.md
	$(BIN)/python -m tests.streams.table benchmarks/results/streams docs/streams.md

tune:                             ## a study with its driver and trials killed, on one worker, two, and every target: the same winner?
	$(BIN)/pytest -m long tests/tune

# Here and in tune-quality, a study that the results have is not run again, so the results go first.
tune-targets:                     ## every search on local, hosts, Slurm and Ray: the same winner? (needs root)
	$(PIP) --editable ".[ray]"
	rm -f benchmarks/results/tune/targets.json
	$(BIN)/python -m tests.tune.on_targets benchmarks/results/tune

tune-workers:                     ## 32 trials by halving and as a population, on 1, 2, 3 workers and with kills: the same winner? (an hour)
	$(BIN)/python -m tests.tune.workers benchmarks/results/tune

tune-waiting:                     ## how long workers wait for a deterministic schedule, simulated by its own decisions
	$(BIN)/python -m benchmarks.tune.waiting benchmarks/results/tune

tune-quality:                     ## what ours, Optuna and Ray Tune find with the same number of training steps, and what early stopping saves (minutes)
	rm -f benchmarks/results/tune/quality.json
	$(BIN)/python -m benchmarks.tune.quality benchmarks/results/tune

tune-fashion:                     ## studies on Fashion-MNIST, 2 ranks a trial: random, TPE, halving in both forms, a population (minutes)
	$(BIN)/python -m benchmarks.tune.fashion benchmarks/results/tune

tune-winners:                     ## how often the winner changes with the number of workers: ours, Optuna, Ray Tune if it is there (minutes)
	$(BIN)/python -m benchmarks.tune.winners benchmarks/results/tune

tune-overhead:                    ## a study's own cost beside Optuna alone and Ray Tune, if it is there; 10,000 trials in one study
	$(BIN)/python -m benchmarks.tune.overhead benchmarks/results/tune

forks:                            ## 50 forks of a population beside their donors, and 20 kills during forks, into benchmarks/results/tune
	$(BIN)/python -m tests.tune.forks benchmarks/results/tune

# Libraries that nobody else needs together, so it has an environment of its own (build/).
MIGRATIONS := build/migrations-venv/bin/python
migrations:                       ## scripts of other libraries and the same here, losses side by side, into docs/migrate
	test -x $(MIGRATIONS) || $(PYTHON) -m venv build/migrations-venv
	.ci/install-torch "$(TORCH)" $(MIGRATIONS) -m pip install --quiet --constraint constraints.txt
	$(MIGRATIONS) -m pip install --quiet --constraint constraints.txt --editable ".[deepspeed,examples,ray]" accelerate lightning ninja transformers
	$(MIGRATIONS) -m benchmarks.migrations benchmarks/results/migrations
	$(MIGRATIONS) -m benchmarks.migrations --pages

# train.py in a checkout of karpathy/nanoGPT and transformers' run_clm_no_trainer.py: named here, they are run as well.
ORIGINALS ?=
patterns:                         ## known training patterns before and after, killed and resumed, into docs/migrate/patterns.md
	test -x $(MIGRATIONS) || $(PYTHON) -m venv build/migrations-venv
	.ci/install-torch "$(TORCH)" $(MIGRATIONS) -m pip install --quiet --constraint constraints.txt
	$(MIGRATIONS) -m pip install --quiet --constraint constraints.txt --editable ".[bench,examples]" datasets peft torchmetrics transformers
	$(MIGRATIONS) -m benchmarks.patterns benchmarks/results/patterns
	test -z "$(ORIGINALS)" || $(MIGRATIONS) -m benchmarks.patterns.originals benchmarks/results/patterns $(ORIGINALS)
	$(MIGRATIONS) -m benchmarks.patterns --page

mutants:                          ## planted bugs, and where the parity certificate finds them
	$(BIN)/python -m tests.parity.table benchmarks/results/mutants

# It forks after the imports and changes files, so it has an environment and copies of its own (build/).
SAMPLE   ?= 1000
MUTATION := build/mutation-venv/bin/python
mutation:                         ## mutants of checkpoints, data and supervision: which go unnoticed? SAMPLE=all: every one
	test -x $(MUTATION) || $(BIN)/python -m venv build/mutation-venv
	$(MUTATION) -m pip install --quiet mutmut==3.8.0
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
	  `$(MUTATION) -c "import site; print(site.getsitepackages()[0])"`/project.pth
	$(MUTATION) -m tests.mutation.campaign benchmarks/results/mutation --sample $(SAMPLE)

verdicts:                         ## planted faults and clean runs, and what diagnose says of them (an hour)
	$(BIN)/python -m tests.verdicts.campaign benchmarks/results/verdicts

faults:                           ## planted faults on real hosts, and what the doctor says of each, into docs/doctor.md
	$(BIN)/python -m tests.doctor.table docs/doctor.md

fuzz:                             ## 20,000 hostile run directories, checkpoints, jobs, hosts files and configs (minutes)
	$(BIN)/python -m tests.fuzz.campaign 20000

bench:                            ## the measurements; results land in benchmarks/results/
	$(BIN)/python -m benchmarks overhead --output benchmarks/results/overhead
	$(BIN)/python -m benchmarks bitwise --output benchmarks/results/bitwise
	$(BIN)/python -m benchmarks sentinel --output benchmarks/results/sentinel
	$(BIN)/python -m benchmarks replay --output benchmarks/results/replay
	$(BIN)/python -m benchmarks stream --output benchmarks/results/stream
	$(BIN)/python -m benchmarks recording --output benchmarks/results/recording
	$(BIN)/python -m benchmarks axes --output benchmarks/results/axes
	$(BIN)/python -m benchmarks save --output benchmarks/results/save
	$(BIN)/python -m benchmarks recovery --output benchmarks/results/recovery
	$(BIN)/python -m benchmarks supervision --output benchmarks/results/supervision
	$(BIN)/python -m benchmarks start --output benchmarks/results/start
	$(BIN)/python -m benchmarks scale --output benchmarks/results/scale
	$(BIN)/python -m benchmarks reading --output benchmarks/results/reading
	$(BIN)/python -m benchmarks first-weights --output benchmarks/results/first-weights
	$(BIN)/python -m benchmarks save-plan --output benchmarks/results/save-plan
	$(BIN)/python -m benchmarks slow-link --output benchmarks/results/slow-link
	$(BIN)/python -m benchmarks ray --output benchmarks/results/ray

figures:                          ## which figures are older than the code they speak of, the most outdated first
	$(BIN)/python -m benchmarks.figures

collectives:                      ## `bench collectives` next to plain loops, on 2 to 8 ranks, on shaped links (minutes; needs root)
	$(BIN)/python -m benchmarks collectives --output benchmarks/results/collectives

all-reduces:                      ## the course's all-reduces by size, on eight hosts with limited links (minutes; needs root)
	$(BIN)/python -m benchmarks all-reduces --output benchmarks/results/all-reduces

SCALING_RANKS ?= 8
scaling:                          ## `bench scaling` on SCALING_RANKS emulated ranks, beside whatever is installed (minutes)
	mkdir -p benchmarks/results/scaling
	$(BIN)/drivetrain bench scaling --nproc-per-node $(SCALING_RANKS) --emulate-compute 100 \
	  --json benchmarks/results/scaling/found.json --plot benchmarks/results/scaling/plot.png

# TensorFlow is large and nobody else's: an environment of its own (build/), and no part of CI.
TENSORFLOW := build/tensorflow/bin/python
tensorflow:                       ## TensorFlow in an environment of its own, and its tests: two workers, one killed (minutes)
	test -x $(TENSORFLOW) || $(PYTHON) -m venv build/tensorflow
	.ci/install-torch "$(TORCH)" $(TENSORFLOW) -m pip install --quiet --constraint constraints.txt
	$(TENSORFLOW) -m pip install --quiet --constraint constraints.txt --editable ".[tensorflow,test]"
	$(TENSORFLOW) -m pytest tests/tensorflow tests/unit/test_tensorflow.py

large-model:                      ## 607 million parameters on four ranks: memory from the start over a kill to the final files
	$(BIN)/python -m benchmarks large-model --output benchmarks/results/large-model

save-plan:                        ## a save's plan and index at 4,096 ranks × 1,000 tensors: seconds and memory of any one process
	$(BIN)/python -m benchmarks save-plan --output benchmarks/results/save-plan

rehearsals:                       ## our GPT and Llama at 8, 256 and 4,096 ranks, fsdp × tp × pp
	$(BIN)/python -m tests.rehearse.table benchmarks/results/rehearse

simulations:                      ## published runs against the simulator, and goodput by size
	$(BIN)/drivetrain simulate --published benchmarks/results/simulate

muon:                             ## how far Muon on shards is from whole matrices, under torch's and ours
	$(BIN)/python -m tests.ranks.muon benchmarks/results/muon/distances.md

matrix:                           ## every layout against one process, written to docs/parity-matrix.md
	$(BIN)/python -m tests.ranks.matrix docs/parity-matrix.md benchmarks/results/parity

documents:                        ## what other documents print, tried as printed; the table in docs/from-the-documents.md (minutes)
	$(BIN)/pytest tests/documents -m "slow or not slow"
	$(BIN)/python -m tests.documents.table docs/from-the-documents.md

resume-matrix:                    ## what may change between two attempts, and what happens then, into docs/checkpoints.md
	$(BIN)/python -m tests.resume.table docs/checkpoints.md

device-matrix: accelerator        ## every layout on the test device against the CPU, written to docs/device-matrix.md
	PYTHONPATH=build/accelerator $(BIN)/python -m tests.accelerator.table docs/device-matrix.md benchmarks/results/device-matrix

plan-memory:                      ## predicted memory next to measured (half an hour): predict, train every case, compare
	rm -rf benchmarks/results/plan-memory/round-*
	$(BIN)/python -m benchmarks.plan.memory predict benchmarks/results/plan-memory
	$(BIN)/python -m benchmarks.plan.memory measure benchmarks/results/plan-memory
	$(BIN)/python -m benchmarks.plan.memory report benchmarks/results/plan-memory

plan-time:                        ## predicted step times next to measured ones, on links of three speeds (needs root)
	$(BIN)/python -m benchmarks plan-time --output benchmarks/results/plan-time

plan-published:                   ## predictions next to public training reports
	$(BIN)/python -m benchmarks.plan.published benchmarks/results/plan-published

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache
