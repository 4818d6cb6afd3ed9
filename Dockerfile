# The trainer and the dashboard: docker build -t groupwise .
FROM python:3.12-slim

# git for datasets that name a commit; a compiler for the kernels that Triton makes while it runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*

# Nobody inside needs to be root. The number is that of a first user outside, so volumes fit.
RUN useradd --uid 1000 --create-home groupwise \
    && mkdir -p /models /runs \
    && chown groupwise:groupwise /models /runs

WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt '.[math,quant,retrieval,track]'

USER groupwise
WORKDIR /runs
ENV HF_HOME=/models PYTHONUNBUFFERED=1
VOLUME ["/models", "/runs"]

HEALTHCHECK --interval=60s --timeout=20s --start-period=30s CMD ["groupwise", "--version"]
ENTRYPOINT ["groupwise"]
CMD ["--help"]
