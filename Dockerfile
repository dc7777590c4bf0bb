# The proxy in a container:
#
#   docker build -t compaction-proxy .
#   docker run --stop-timeout 35 -p 127.0.0.1:8787:8787 -v compaction-proxy:/var/lib/compaction-proxy compaction-proxy
#
# With your own configuration, which user 10001 must be able to read:
#
#   docker run --stop-timeout 35 -p 127.0.0.1:8787:8787 -v compaction-proxy:/var/lib/compaction-proxy \
#       -v "$PWD/config.yaml:/etc/compaction-proxy.yaml:ro" -e OPENAI_API_KEY \
#       compaction-proxy serve --host 0.0.0.0 --config /etc/compaction-proxy.yaml
#
# The timeout is longer than server.drain, so open responses can finish.

# Pin the base image by digest for a release; docs/container.md shows how.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS packages
RUN python -m venv --without-pip /opt/venv
COPY requirements-runtime.lock /tmp/requirements.lock
# Wheels only: a source archive would fetch build tools that no hash covers. The removed folder has LiteLLM's web pages.
RUN python -m pip --python /opt/venv/bin/python install --no-cache-dir --disable-pip-version-check --no-compile \
        --no-deps --only-binary :all: --require-hashes -r /tmp/requirements.lock \
    && rm -r /opt/venv/lib/python*/site-packages/litellm/proxy/_experimental/out
# Python checks bytecode by the source's time unless told otherwise, and layers round times. A fixed seed and one process
# make builds reproducible.
RUN PYTHONHASHSEED=0 python -m compileall -q -f --invalidation-mode unchecked-hash /opt/venv/lib

FROM ${PYTHON_IMAGE}
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=
LABEL org.opencontainers.image.title="compaction-proxy" \
      org.opencontainers.image.description="A reverse proxy for the APIs of OpenAI and Anthropic that keeps long conversations within the context window." \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=packages /opt/venv /opt/venv
COPY proxy /opt/compaction-proxy/proxy

# Compile to bytecode now, because the proxy's user can't write outside its volume. The base image has no bytecode of the
# standard library.
RUN PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0 python -m compileall -q -f --invalidation-mode unchecked-hash \
        -x '/(site|dist)-packages/' /opt/compaction-proxy "$(dirname "$(python -c 'import os; print(os.__file__)')")"

# The proxy's state. A named volume inherits this folder's owner at its first use. A mounted folder of the host must
# belong to user 10001.
RUN mkdir -m 0700 /var/lib/compaction-proxy && chown 10001:10001 /var/lib/compaction-proxy
VOLUME /var/lib/compaction-proxy
# Paths in a configuration, such as sqlite:///state/compaction.db, are relative to the volume.
WORKDIR /var/lib/compaction-proxy

# The working directory is writable, so PYTHONSAFEPATH prevents imports from it.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/compaction-proxy \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LITELLM_LOCAL_MODEL_COST_MAP=True \
    HOME=/var/lib/compaction-proxy \
    XDG_STATE_HOME=/var/lib

# The condition is for the worker processes, which import this file, too.
RUN printf '%s\n' '#!/usr/bin/env python' 'from proxy.__main__ import main' 'if __name__ == "__main__":' '    main()' \
        > /usr/local/bin/compaction-proxy \
    && chmod 0755 /usr/local/bin/compaction-proxy

# The build fails if the model table or the tokenizers need the network, or if the packages don't load.
RUN ["python", "-c", "from proxy.limits.profiles import Profiles; from proxy.tokens.text import FILES, encoding; Profiles().load(); [encoding(name) for name in FILES]"]

# The user is a number, so that Kubernetes' runAsNonRoot can check it.
USER 10001:10001

EXPOSE 8787
# Publish port 8787 as any other port; inside the container it must not change. The empty ProxyHandler ignores HTTP_PROXY.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8787/readyz', timeout=3)"]

STOPSIGNAL SIGTERM
ENTRYPOINT ["compaction-proxy"]
CMD ["serve", "--host", "0.0.0.0"]
