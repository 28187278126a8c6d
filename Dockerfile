# One image for the gateway and the workers; EXTRAS=worker adds torch and transformers.
#   docker build -t headwater .                                    gateway and fake workers
#   docker build -t headwater-worker --build-arg EXTRAS=worker .   real workers
#     (on a CPU: --build-arg APT_PACKAGES="gcc libc6-dev", twice the speed of decoding)
# TORCH_INDEX names another wheel index for torch (CPU or CUDA builds); empty takes the default one.
FROM python:3.11-slim AS build
ARG EXTRAS=""
ARG TORCH_INDEX=""
WORKDIR /src
RUN python -m venv /opt/headwater
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$EXTRAS" = worker ]; then \
      /opt/headwater/bin/pip install -q -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY gateway gateway
COPY worker worker
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/headwater/bin/pip install -q -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.11-slim
# Debian packages for real workers on a CPU: with a C compiler they compile their own kernels.
ARG APT_PACKAGES=""
RUN if [ -n "$APT_PACKAGES" ]; then \
      apt-get update -q && apt-get install -qy --no-install-recommends $APT_PACKAGES && \
      rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/headwater /opt/headwater
# models and ledgers live under /data; everything else may be read-only
ENV PATH=/opt/headwater/bin:$PATH HOME=/data XDG_CACHE_HOME=/data/cache XDG_STATE_HOME=/data/state \
    PYTHONUNBUFFERED=1
RUN mkdir -p /data/cache /data/state && chown -R 10001:10001 /data
USER 10001:10001
VOLUME /data
ENTRYPOINT ["headwater"]
