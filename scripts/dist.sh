#!/usr/bin/env bash
# Builds wheel and sdist from what is committed, the same bytes wherever and whenever: usage: scripts/dist.sh DIR
#   PYTHON  interpreter to use    REF  what to build (HEAD)
# The archive of the commit, its time for every file and a pinned hatchling leave nothing to the machine.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} REF=${REF:-HEAD}
mkdir -p "${1:?usage: scripts/dist.sh DIR}"
target=$(cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

mkdir "$scratch/source"
git archive "$REF" | tar -x -C "$scratch/source"
"$PYTHON" -m venv "$scratch/env"
"$scratch/env/bin/python" -m pip --disable-pip-version-check install -q -c "$scratch/source/constraints.txt" hatchling
cd "$scratch/source"
SOURCE_DATE_EPOCH=$(git -C "$OLDPWD" log -1 --format=%ct "$REF") \
  "$scratch/env/bin/python" -m hatchling build -d "$target"
cd "$target"
sha256sum -- *.whl *.tar.gz >SHA256SUMS
cat SHA256SUMS
