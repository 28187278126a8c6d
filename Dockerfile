# Two images from one file; each carries the list of what is in it: /opt/headwater/sbom.cdx.json (CycloneDX).
#   docker build -t headwater .                          gateway and fake workers, without torch
#   docker build -t headwater-worker --target worker .   real workers
#     (on a CPU: --build-arg APT_PACKAGES="gcc libc6-dev", twice the speed of decoding)
# TORCH_INDEX names another wheel index for torch (CPU or CUDA builds); empty takes the default one.
# PYTHON_IMAGE pins the base by digest: --build-arg PYTHON_IMAGE=python:3.11-slim@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
# the packages go where no pip is left beside them; what lists them stays in this stage
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/headwater && \
    python -m venv --without-pip /opt/sbom && \
    python -m pip --python /opt/sbom/bin/python install -q -c constraints.txt cyclonedx-bom==7.5.0

FROM build AS build-gateway
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY gateway gateway
COPY worker worker
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip --python /opt/headwater/bin/python install -q -c constraints.txt . && \
    /opt/sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
      -o /opt/headwater/sbom.cdx.json /opt/headwater/bin/python

FROM build AS build-torch
ARG TORCH_INDEX=""
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip --python /opt/headwater/bin/python install -q -c constraints.txt \
      ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch

FROM build-torch AS build-worker
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY gateway gateway
COPY worker worker
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip --python /opt/headwater/bin/python install -q -c constraints.txt ".[worker]" && \
    /opt/sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
      -o /opt/headwater/sbom.cdx.json /opt/headwater/bin/python

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="Headwater" \
      org.opencontainers.image.description="Prefix-aware load balancer for LLM inference" \
      org.opencontainers.image.licenses="Apache-2.0"
# models and ledgers live under /data; everything else may be read-only
ENV PATH=/opt/headwater/bin:$PATH HOME=/data XDG_CACHE_HOME=/data/cache XDG_STATE_HOME=/data/state \
    PYTHONUNBUFFERED=1
RUN mkdir -p /data/cache /data/state && chown -R 10001:10001 /data
VOLUME /data
ENTRYPOINT ["headwater"]

FROM runtime AS worker
# Debian packages for real workers on a CPU: with a C compiler they compile their own kernels.
ARG APT_PACKAGES=""
RUN if [ -n "$APT_PACKAGES" ]; then \
      apt-get update -q && apt-get install -qy --no-install-recommends $APT_PACKAGES && \
      rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build-worker /opt/headwater /opt/headwater
USER 10001:10001

FROM runtime AS gateway
COPY --from=build-gateway /opt/headwater /opt/headwater
USER 10001:10001
