# llama-server with the patch series. CPU by default; for CUDA build with
#   --build-arg BUILD_IMAGE=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#   --build-arg RUN_IMAGE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg CMAKE_ARGS=-DGGML_CUDA=ON
# The CPU build is tuned for the machine that builds it; for another one: --build-arg CMAKE_ARGS=-DGGML_NATIVE=OFF
ARG BUILD_IMAGE=debian:bookworm-slim
ARG RUN_IMAGE=debian:bookworm-slim

FROM ${BUILD_IMAGE} AS build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates cmake g++ git libssl-dev make ninja-build python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY polykv_proxy polykv_proxy
COPY patches patches
COPY llama.cpp llama.cpp
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir .
ARG CMAKE_ARGS=
RUN POLYKV_CACHE=/cache POLYKV_CMAKE_ARGS="${CMAKE_ARGS}" /venv/bin/polykvctl engine build \
 && cp "$(POLYKV_CACHE=/cache POLYKV_CMAKE_ARGS="${CMAKE_ARGS}" /venv/bin/polykvctl engine path)" /llama-server

FROM ${RUN_IMAGE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates curl libgomp1 libssl3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin engine \
 && install -d -o engine -g engine -m 0700 /states
COPY --from=build /llama-server /usr/local/bin/llama-server
USER engine
VOLUME /states
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=3s --start-period=10m --retries=3 CMD curl -fsS http://127.0.0.1:8080/health
ENTRYPOINT ["llama-server"]
CMD ["--help"]
