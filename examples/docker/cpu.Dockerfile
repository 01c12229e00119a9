# Lamina's server on CPUs. From the checkout:
#     docker build --file examples/docker/cpu.Dockerfile --target serve --tag lamina:cpu .
#     docker run --publish 127.0.0.1:8000:8000 --volume ./model:/model:ro --volume lamina-cache:/cache \
#         --env LAMINA_API_KEY=a-key-of-yours lamina:cpu
# An image that has the model, and all that is compiled for this kind of CPU, starts warm anywhere alike:
#     docker build --file examples/docker/cpu.Dockerfile --build-context model=./model --tag lamina:warm .
FROM debian:bookworm-slim AS base
# The C++ compiler and Python's headers stay: a first start compiles the model's pieces and the kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ libgomp1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

FROM base AS wheel
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM base AS serve
ARG TORCH=2.13.0
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==$TORCH"
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013
RUN wheel=$(echo /wheels/*.whl) && pip install "${wheel}[serve]" uvloop
RUN useradd --uid 1000 --create-home lamina && install --directory --owner=lamina --mode=700 /cache
USER 1000
WORKDIR /home/lamina
ENV LAMINA_CACHE_DIR=/cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Exec form: the server is process 1 and gets SIGTERM, upon which it lets running answers finish.
ENTRYPOINT ["lamina", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--open-routes", "/health"]

FROM serve AS warmed
# The named build context.
# hadolint ignore=DL3022
COPY --from=model --chown=1000 . /model
RUN lamina warmup /model && lamina warmup /model --check
