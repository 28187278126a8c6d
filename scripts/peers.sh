#!/usr/bin/env bash
# Makes the virtual environments of `bench/peers`: the routers that Headwater is measured beside, the
# load generator and the stand-ins for workers. Prints their folder; what is there already is kept.
#   usage: scripts/peers.sh [FOLDER]          PYTHON  interpreter to use
#                                             PEERS   which of base sgl vllmr dyn lite (all but lite)
set -euo pipefail
FOLDER=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/headwater/peers}
PYTHON=${PYTHON:-python3}
PEERS=${PEERS:-base sgl vllmr dyn}

missing=()
for program in nginx wrk taskset; do
  command -v "$program" >/dev/null || missing+=("$program")
done
if ((${#missing[@]})) && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  apt-get install -y -q "${missing[@]/taskset/util-linux}" >&2 || true
  hash -r
fi
for program in nginx wrk taskset; do
  command -v "$program" >/dev/null || { echo "peers: $program is missing" >&2; exit 1; }
done

# The routers' wheels name torch and more as their needs, which serving does not.
packages() {
  case $1 in
    base) echo "aiohttp uvloop httptools granian orjson xxhash httpx psutil uvicorn starlette numpy msgspec" ;;
    sgl | vllmr) echo "aiohttp fastapi orjson setproctitle uvicorn requests" ;;
    dyn) echo "pydantic uvloop" ;;
    lite) echo "--only-binary :all: litellm[proxy]==1.105.7" ;;
    *) echo "peers: there is no peer '$1'" >&2; exit 1 ;;
  esac
}
alone() {
  case $1 in
    sgl) echo "sglang-router==0.3.2" ;;
    vllmr) echo "vllm-router==0.1.17" ;;
    dyn) echo "ai-dynamo-runtime==1.6.1" ;;
  esac
}

for peer in $PEERS; do
  wanted=$(packages "$peer")
  [[ -e $FOLDER/$peer/.made ]] && continue
  "$PYTHON" -m venv "$FOLDER/$peer"
  one=$(alone "$peer")
  [[ -z $one ]] || "$FOLDER/$peer/bin/pip" install -q --no-deps "$one" >&2
  # shellcheck disable=SC2086 # a list
  "$FOLDER/$peer/bin/pip" install -q $wanted >&2
  touch "$FOLDER/$peer/.made"
done
echo "$FOLDER"
