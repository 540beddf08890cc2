# The proxy alone. Needs an engine: POLYKV_UPSTREAM_URL.
FROM debian:bookworm-slim
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin polykv \
 && install -d -o polykv -g polykv -m 0700 /state
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY polykv_proxy polykv_proxy
COPY patches patches
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir . && rm -rf /src/*
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    POLYKV_HOST=0.0.0.0 \
    POLYKV_PORT=8090 \
    POLYKV_STATE=/state/pools.db
USER polykv
VOLUME /state
EXPOSE 8090
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
  CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['POLYKV_PORT'] + '/polykv/health', timeout=2)"]
ENTRYPOINT ["polykvctl"]
CMD ["serve"]
