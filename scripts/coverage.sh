#!/usr/bin/env bash
# Branch coverage of the pure modules (listed in tests/architecture/test_purity.py) by the tests
# that start no process: usage: scripts/coverage.sh PYTHON [pytest arguments]. What runs a model is
# left out: it is not pure, and its tests take most of the time. A failed test is told at the end.
set -eu
cd "$(dirname "$0")/.."
python=$1
shift
data=$(mktemp)
trap 'rm -f "$data" "$data".*' EXIT
pure=$(PYTHONPATH=. "$python" -P -c '
from tests.architecture.test_purity import ROOT, pure_files
print(",".join(str(path.relative_to(ROOT)) for path in pure_files()))
')
export COVERAGE_FILE=$data
nice -n 15 "$python" -P -m coverage run --branch --include="$pure" -m pytest tests/gateway tests/shared \
    tests/properties tests/contracts tests/worker --ignore=tests/worker/model "$@" || failed=$?
"$python" -P -m coverage report --show-missing --skip-covered --sort=cover
exit "${failed:-0}"
