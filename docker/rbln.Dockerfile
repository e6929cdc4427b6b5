# syntax=docker/dockerfile:1.10.0
# The serving stack for RBLN NPUs with the harness beside it, each in an environment of its own: `harness run` starts a
# fresh server for every run. The vendor's compiler and runtime come from its own package index; address and credentials
# are build secrets, mounted while pip runs and in no layer:
#   docker build -f docker/rbln.Dockerfile -t rbln-stack \
#     --secret id=rbln_index_url,src=$HOME/.rbln/index-url --secret id=rbln_netrc,src=$HOME/.rbln/netrc .
# rbln_index_url: one line, the address of the index. rbln_netrc: machine, login and password, as ~/.netrc.
FROM python:3.11.10-slim-bookworm AS stack
ARG VLLM_RBLN_VERSION=0.12.0
ARG OPTIMUM_RBLN_VERSION=0.12.0
ARG REBEL_COMPILER_VERSION=0.12.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python -m venv /opt/stack
RUN --mount=type=secret,id=rbln_index_url,required=true \
    --mount=type=secret,id=rbln_netrc,target=/root/.netrc,required=true \
    PIP_EXTRA_INDEX_URL="$(cat /run/secrets/rbln_index_url)" /opt/stack/bin/pip install \
      "vllm-rbln==${VLLM_RBLN_VERSION}" "optimum-rbln==${OPTIMUM_RBLN_VERSION}" \
      "rebel-compiler==${REBEL_COMPILER_VERSION}"

FROM python:3.11.10-slim-bookworm AS harness
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/harness
COPY requirements.lock ./
RUN /opt/harness/bin/pip install --require-hashes --no-deps -r requirements.lock
COPY pyproject.toml README.md ./
COPY plans ./plans
COPY patches ./patches
COPY harness ./harness
RUN /opt/harness/bin/pip install --no-deps .

FROM python:3.11.10-slim-bookworm
# The sampler is compiled by torch when the server starts, which needs a C++ compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=stack /opt/stack /opt/stack
COPY --from=harness /opt/harness /opt/harness
COPY plans /opt/plans
# The stack's vllm is found on PATH, the harness by its full name below.
ENV PATH=/opt/harness/bin:/opt/stack/bin:$PATH PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 \
    HOME=/cache XDG_CACHE_HOME=/cache
# Device files belong to root unless the host says otherwise; run as another user with --user where it does.
RUN mkdir --mode=1777 /work /cache
WORKDIR /work
ENTRYPOINT ["harness"]
CMD ["doctor"]
