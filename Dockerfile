# A tinsmith server on CPUs: docs/howto/containers.md. Everything that must last is in the volume /data.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/tinsmith
WORKDIR /source
# PyTorch first: it is large and changes rarely. The index has builds without CUDA.
COPY constraints.txt ./
RUN /opt/tinsmith/bin/pip install --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml README.md LICENSE ./
COPY tools/project_urls.py tools/
COPY src src
RUN /opt/tinsmith/bin/pip install --constraint constraints.txt '.[server,postgres]'

FROM python:${PYTHON}-slim
RUN groupadd --gid 10001 tinsmith \
    && useradd --uid 10001 --gid tinsmith --no-create-home --home-dir /data --shell /usr/sbin/nologin tinsmith \
    && install -d -o tinsmith -g tinsmith -m 700 /data
COPY --from=build /opt/tinsmith /opt/tinsmith
# Caches (models from the hub, compiled kernels) belong to the volume, too: the image's own files cannot be written.
ENV PATH=/opt/tinsmith/bin:$PATH \
    HOME=/data \
    NUMBA_CACHE_DIR=/data/kernels \
    TINSMITH_DATA_DIR=/data \
    TINSMITH_HOST=0.0.0.0 \
    TINSMITH_PORT=8000 \
    TINSMITH_LOG_FORMAT=json
USER tinsmith
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["tinsmith"]
CMD ["serve"]
