# The worker (the default) and the replay tools beside it.
#
#   docker build -t freshet .
#   docker build -t freshet --build-arg TORCH_INDEX=<url> .    take torch from this index, for example PyTorch's
#                                                              CPU index; empty = plain pip, which on Linux
#                                                              x86-64 brings the CUDA build
FROM python:3.12-slim AS build
ARG TORCH_INDEX=""
RUN python -m venv /opt/freshet
ENV PATH=/opt/freshet/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# In a layer of its own: it is the largest and changes the least. Its dependencies come with the next one, from
# pip's own index: an index of torch builds need not have the versions that constraints.txt asks for.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --no-deps -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY model model
COPY worker worker
COPY replay replay
RUN pip install --no-cache-dir -c constraints.txt .

FROM python:3.12-slim
RUN groupadd --gid 10001 freshet \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp freshet \
    && install --directory --owner freshet --group freshet /var/lib/freshet
COPY --from=build /opt/freshet /opt/freshet
# Writes go to /var/lib/freshet (keep it on a volume) and /tmp alone, so the root filesystem can be read-only.
# The working directory is writable; PYTHONSAFEPATH keeps modules from being imported from there.
ENV PATH=/opt/freshet/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    NUMBA_CACHE_DIR=/tmp/numba \
    FRESHET_CHECKPOINT__DIR=/var/lib/freshet/checkpoints
WORKDIR /var/lib/freshet
USER 10001:10001
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('FRESHET_HTTP__PORT', 8080)), timeout=4); c.request('GET', '/healthz'); sys.exit(c.getresponse().status != 200)"]
# Exec form: SIGTERM reaches the worker itself, which saves, publishes and closes before it ends.
ENTRYPOINT ["python", "-m", "worker"]
