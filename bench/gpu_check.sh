#!/usr/bin/env bash
# The engine on one GPU, in under 8 minutes: right, how fast, and beside its peers. See docs/gpu.md.
#
#   bench/gpu_check.sh [--dry-run] [--wheels DIR] [--out FILE.json]
#
# --dry-run: tiny sizes on the CPU. --wheels: where pure or binary wheels lie for what is missing on
# a machine without a network. Exit code 1 if a correctness stage fails, else 0.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python="${PYTHON:-python3}" arguments=() wheels=""
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="$2"; shift 2 ;;
    *) arguments+=("$1"); shift ;;
  esac
done
if [ -n "$wheels" ]; then
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
  "$python" -m pip install -q --no-index --no-deps --target "$place" "$wheels"/*.whl || exit 2
  export PYTHONPATH="$PYTHONPATH:$place"
fi
"$python" -P bench/gpu_check.py "${arguments[@]}"
