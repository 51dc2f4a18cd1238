# An image with the CPU libraries, and torch as TORCH names it: docker build -t threefold .
# For GPUs begin with an image of CUDA that has nvcc, and set CUDA=ON.
FROM python:3.11-slim-bookworm
ARG TORCH=torch==2.13.0
ARG CUDA=OFF
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/threefold
COPY . .
RUN python -m pip install "$TORCH"
RUN python -m pip install --config-settings=cmake.define.THREEFOLD_CUDA="$CUDA" ".[s3,arrow,fast,plot]"
WORKDIR /work
RUN datakit --version && ckptkit --version && trainer --version
ENTRYPOINT ["/bin/bash", "-c", "exec \"$0\" \"$@\""]
CMD ["trainer", "--help"]
