#!/usr/bin/env bash
# All tests but the slow suites: usage: scripts/test.sh PYTHON [pytest arguments].
# First what computes only, on all cores; then what starts processes and mostly waits for them: three at
# a time keep two cores busy, where two leave half of them idle.
set -u
cd "$(dirname "$0")/.."
python=$1
shift
ran=0
failed=0
suite() {
    "$python" -P -m pytest "$@"
    local code=$?
    # 5: a selection (-k) may leave nothing of one part, but not of all
    if [ "$code" -eq 0 ]; then ran=1; elif [ "$code" -ne 5 ]; then ran=1 failed=$code; fi
}
OMP_NUM_THREADS=1 suite tests/architecture tests/contracts tests/gateway tests/monitoring \
    tests/properties tests/shared tests/worker --numprocesses auto "$@"
suite tests/cases tests/integration --numprocesses 3 --dist loadfile "$@"
[ "$ran" -eq 1 ] || { echo "no test was selected" >&2; exit 5; }
exit "$failed"
