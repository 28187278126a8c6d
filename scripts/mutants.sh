#!/usr/bin/env bash
# Mutation tests of the modules that must not be wrong: usage: scripts/mutants.sh PYTHON MANY.
# mutmut makes single faults in a copy of the project and runs the tests that reach each; MANY of
# every module are drawn, always the same ones. It lists those that no test noticed.
set -eu
cd "$(dirname "$0")/.."
python=$1
many=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check mutmut==3.8.1
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" > "$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
mkdir "$folder/tree"
git ls-files -z shared gateway worker tests bench pyproject.toml README.md LICENSE |
    xargs -0 cp --parents -t "$folder/tree"
cd "$folder/tree"
cat >> pyproject.toml <<'EOF'

[tool.mutmut]
source_paths = ["shared/blocks.py", "shared/paging.py", "gateway/routing/cost.py", "gateway/router.py"]
pytest_add_cli_args_test_selection = [
  "tests/shared/test_blocks.py", "tests/shared/test_paging.py", "tests/gateway/test_policies.py",
  "tests/gateway/test_router_adapters.py", "tests/gateway/test_router_guards.py",
  "tests/gateway/test_router_leases.py", "tests/gateway/test_router_placement.py",
]
also_copy = ["shared", "gateway", "worker", "tests", "bench", "pyproject.toml"]
EOF
mutmut="nice -n 15 $folder/venv/bin/mutmut"
$mutmut run --max-children 1 nothing > made.txt 2>&1 || true  # makes the mutants, runs none
"$python" -P - "$many" > drawn.txt <<'EOF'
import json, pathlib, random, sys

draw = random.Random(1)
for meta in sorted(pathlib.Path("mutants").rglob("*.py.meta")):
    names = sorted(json.loads(meta.read_text())["exit_code_by_key"])
    print(*draw.sample(names, min(int(sys.argv[1]), len(names))), sep="\n")
EOF
[ -s drawn.txt ] || { tail -n 20 made.txt >&2; exit 1; }
xargs $mutmut run --max-children 1 < drawn.txt > run.txt 2>&1 || true
"$python" -P - <<'EOF'
import json, pathlib

for meta in sorted(pathlib.Path("mutants").rglob("*.py.meta")):
    ends = json.loads(meta.read_text())["exit_code_by_key"]
    done = {name: code for name, code in ends.items() if code is not None}
    alive = sorted(name for name, code in done.items() if code in (0, 33))
    print(f"{meta.relative_to('mutants')!s:32} {len(done) - len(alive)} of {len(done)} noticed")
    print(*(f"    {name}" for name in alive), sep="\n")
EOF
