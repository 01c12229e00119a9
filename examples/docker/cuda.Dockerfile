# Lamina's server on NVIDIA GPUs. From the checkout:
#     docker build --file examples/docker/cuda.Dockerfile --tag lamina:cuda .
#     docker run --gpus all --publish 127.0.0.1:8000:8000 --volume ./model:/model:ro --volume lamina-cache:/cache \
#         --env LAMINA_API_KEY=a-key-of-yours lamina:cuda
# What is compiled for the model and GPU is kept in the volume /cache, so the second start is warm.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS base
# nvcc compiles the kernels, the C++ compiler what Triton launches, on a first start or below.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

FROM base AS wheel
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM base AS serve
ARG TORCH=2.11.0
RUN pip install --extra-index-url https://download.pytorch.org/whl/cu130 "torch==$TORCH"
COPY --from=wheel /wheels /wheels
# ray as well for a Ray cluster.
ARG EXTRAS=serve,gpu
# hadolint ignore=DL3013
RUN wheel=$(echo /wheels/*.whl) && pip install "${wheel}[$EXTRAS]" uvloop
# Ubuntu's image has a user of id 1000 already.
RUN useradd --uid 10001 --create-home lamina && install --directory --owner=lamina --mode=700 /cache
USER 10001
WORKDIR /home/lamina
ENV LAMINA_CACHE_DIR=/cache
# Of the GPUs that are to serve; others compile theirs on a first start. A new volume at /cache begins with them.
ARG ARCH="sm_90a"
RUN python -m lamina.custom_ops --arch "$ARCH"
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["lamina", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--open-routes", "/health"]
