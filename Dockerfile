# syntax=docker/dockerfile:1
# Stillroom on the CPU. No generator's weights: mount a checkpoint, or name one of the hub and mount its cache.
#   docker build -t stillroom .
#   docker build -t stillroom --build-arg EXTRAS=postgresql .     # with optional parts, separated by commas
#   docker run --rm -v stillroom:/data stillroom keys add me --keys /data/keys.json
#   docker run --rm -p 8321:8321 -v stillroom:/data stillroom serve --keys /data/keys.json

FROM python:3.12-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/stillroom
ENV PATH=/opt/stillroom/bin:$PATH
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src ./src
ARG EXTRAS=""
# Torch's CPU build, in the range that pyproject.toml allows: PyPI's has CUDA with it, some gigabytes.
RUN pip install --index-url https://download.pytorch.org/whl/cpu 'torch>=2.6,<2.14' \
    && pip install ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.12-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /home/stillroom --shell /usr/sbin/nologin stillroom \
    && install --directory --owner stillroom --group stillroom /data
COPY --from=build /opt/stillroom /opt/stillroom
# Compiled kernels and cost profiles are the machine's, so they live with the data and survive the container.
# (TOKENIZERS_PARALLELISM is no token.)
# hadolint ignore=DL3064
ENV PATH=/opt/stillroom/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false \
    XDG_CACHE_HOME=/data/cache \
    NUMBA_CACHE_DIR=/data/cache/numba \
    HF_HOME=/data/cache/huggingface \
    STILLROOM_KB=/data/kb \
    STILLROOM_SERVER__HOST=0.0.0.0
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8321
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8321/healthz', timeout=4)"]
ENTRYPOINT ["stillroom"]
CMD ["serve"]
