#!/usr/bin/env bash
# Makes the virtual environment with all extras, pinned by constraints.txt. Called by `make`.
# With the argument `node`: the Node client of the API instead, which one of the tests runs.
# With `site` or `fuzz`: what `make site` or `make fuzz-http` need besides.
# With `browser`: Chromium, for `make test-browser`; HEADWATER_CHROMIUM names another one.
#   PYTHON       interpreter to use (>= 3.11)          VENV  where the environment goes
#   TORCH_INDEX  a wheel index for torch alone; empty takes the default index
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} TORCH_INDEX=${TORCH_INDEX:-}

need() { # need PROGRAM PACKAGE...: a program from the system's packages
  local program=$1; shift
  command -v "$program" >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing $* (for $program)"
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  else
    echo "setup: $program is missing; run: sudo apt-get install $*" >&2
    exit 1
  fi
}

if [ "${1:-}" = node ]; then
  need node nodejs
  need npm npm
  need curl curl
  npm ci --loglevel=error --no-audit --no-fund --prefix tests/node
  exit
fi

extra() { # extra NAME COMMAND: an optional dependency group, unless its command is there
  [ -x "$VENV/bin/$2" ] ||
    "$VENV/bin/python" -m pip --disable-pip-version-check install -q -c constraints.txt -e ".[$1]"
}

if [ "${1:-}" = site ]; then
  extra docs zensical
  exit
fi

if [ "${1:-}" = fuzz ]; then
  extra fuzz schemathesis
  exit
fi

if [ "${1:-}" = browser ]; then
  need "${HEADWATER_CHROMIUM:-chromium}" chromium
  exit
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: $PYTHON is older than 3.11; set PYTHON=..." >&2
  exit 2
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" || {
  need "$PYTHON-venv" python3-venv
  "$PYTHON" -m venv "$VENV"
}
echo "setup: installing torch and the other packages of constraints.txt into $VENV" \
  "(once, minutes; a smaller torch: make setup TORCH_INDEX=URL)"
pip=("$VENV/bin/python" -m pip --disable-pip-version-check install -q -c constraints.txt)
# torch comes first and alone: it is the one package whose build depends on the machine
if [ -n "$TORCH_INDEX" ]; then
  "${pip[@]}" --index-url "$TORCH_INDEX" torch
else
  "${pip[@]}" torch
fi
"${pip[@]}" -e '.[worker,redis-server,dev]'
echo "setup: done in $VENV"
