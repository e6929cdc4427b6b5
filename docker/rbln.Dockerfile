# syntax=docker/dockerfile:1.10.0
# The serving stack for RBLN NPUs with the harness beside it, each in an environment of its own: `harness run` starts a
# fresh server for every run. Base, pins and indexes are those of harness/stacks/rbln/launch/requirements.py. The three
# indexes beside the public one are build secrets, one line each with an address (and user and password in it where a
# portal gives them), mounted while pip runs and in no layer:
#   docker build -f docker/rbln.Dockerfile -t rbln-stack \
#     --secret id=rbln_index_url,src=$HOME/.rbln/index-url --secret id=rbln_vllm_index_url,src=$HOME/.rbln/vllm-index-url \
#     --secret id=rbln_torch_index_url,src=$HOME/.rbln/torch-index-url .
FROM python:3.12.12-slim-trixie AS stack
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python -m venv /opt/stack
RUN --mount=type=secret,id=rbln_index_url,required=true \
    --mount=type=secret,id=rbln_vllm_index_url,required=true \
    --mount=type=secret,id=rbln_torch_index_url,required=true \
    PIP_EXTRA_INDEX_URL="$(cat /run/secrets/rbln_index_url) $(cat /run/secrets/rbln_vllm_index_url) \
      $(cat /run/secrets/rbln_torch_index_url)" /opt/stack/bin/pip install \
      "vllm-rbln==0.12.0" "optimum-rbln==0.12.0" "rebel-compiler>=0.12.0,<0.12.1"

FROM python:3.12.12-slim-trixie AS harness
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

FROM python:3.12.12-slim-trixie
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
