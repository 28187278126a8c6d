#!/usr/bin/env bash
# Mutation tests of the modules that must not be wrong:
# usage: scripts/mutants.sh PYTHON MANY [WORD]. mutmut makes single faults in a copy of the project
# and runs the tests that reach each. Of each module (only of those whose path has WORD in it) MANY
# are drawn, always the same ones. It lists those that no test noticed.
set -eu
cd "$(dirname "$0")/.."
python=$(realpath --no-symlinks "$1")  # from here; what follows runs elsewhere
many=$2
word=${3:-}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check mutmut==3.8.1
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" > "$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
mutmut="nice -n 15 $folder/venv/bin/mutmut"

# A module and the tests that are for it. A tree of its own for each: mutmut runs every test that
# reaches a fault, and a router's tests reach the hashes, too.
try() {
    local module=$1 tests=("${@:2}")
    [[ $module == *"$word"* ]] || return 0
    local tree=$folder/${module//\//_}
    mkdir "$tree"
    git ls-files -z shared gateway worker tests bench pyproject.toml README.md LICENSE |
        xargs -0 cp --parents -t "$tree"
    cd "$tree"
    {
        printf '\n[tool.mutmut]\nsource_paths = ["%s"]\n' "$module"
        echo 'also_copy = ["shared", "gateway", "worker", "tests", "bench", "pyproject.toml"]'
        echo 'pytest_add_cli_args_test_selection = ['
        printf '  "%s",\n' "${tests[@]}"
        echo ']'
    } >> pyproject.toml
    $mutmut run --max-children 1 nothing > made.txt 2>&1 || true  # makes the mutants, runs none
    "$python" -P - "$many" > drawn.txt <<'PYTHON'
import json, pathlib, random, sys

draw = random.Random(1)
for meta in sorted(pathlib.Path("mutants").rglob("*.py.meta")):
    names = sorted(json.loads(meta.read_text())["exit_code_by_key"])
    print(*draw.sample(names, min(int(sys.argv[1]), len(names))), sep="\n")
PYTHON
    [ -s drawn.txt ] || { tail -n 20 made.txt >&2; return 1; }
    xargs $mutmut run --max-children 1 < drawn.txt > run.txt 2>&1 || true
    "$python" -P - <<'PYTHON'
import json, pathlib

for meta in sorted(pathlib.Path("mutants").rglob("*.py.meta")):
    ends = json.loads(meta.read_text())["exit_code_by_key"]
    done = {name: code for name, code in ends.items() if code is not None}
    alive = sorted(name for name, code in done.items() if code in (0, 33))
    print(f"{meta.relative_to('mutants')!s:32} {len(done) - len(alive)} of {len(done)} noticed")
    print(*(f"    {name}" for name in alive), sep="\n")
PYTHON
    cd "$OLDPWD"
}

try shared/blocks.py tests/shared/test_blocks.py tests/properties/test_hashing.py
try shared/paging.py tests/shared/test_paging.py tests/shared/test_paging_host.py
try gateway/routing/cost.py tests/gateway/test_policies.py tests/properties/test_cost_formula.py
try gateway/router.py tests/gateway/test_host_tier.py tests/gateway/test_reasons.py \
    tests/gateway/test_router_adapters.py tests/gateway/test_router_guards.py \
    tests/gateway/test_router_leases.py tests/gateway/test_router_members.py \
    tests/gateway/test_router_placement.py tests/gateway/test_router_views.py \
    tests/gateway/test_trust.py
