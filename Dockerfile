# The package with the tested versions of its dependencies. It runs the quickstart, unless it is given another command.
#   docker build -t dschat_ppo .                            for CPUs
#   docker build -t dschat_ppo --build-arg DEVICE=cuda .    for NVIDIA GPUs
#   docker run --rm -v "$PWD/output:/output" dschat_ppo
FROM python:3.11-slim-bookworm

# g++ compiles the operations for a CPU at the first run, and Triton's launchers on a GPU
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# cpu: PyTorch's small builds for CPUs; cuda: its usual builds, which bring the libraries of CUDA
ARG DEVICE=cpu
# an index of torch in place of that of DEVICE, such as one for an older driver
ARG TORCH_INDEX_URL=""

WORKDIR /opt/dschat_ppo
COPY . .
# Modules are compiled here: not every user of the container may write beside them.
RUN case "$DEVICE" in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        cuda) index="" ;; \
        *) echo "error: DEVICE=$DEVICE: expected cpu or cuda" >&2; exit 2 ;; \
    esac \
    && TORCH_INDEX_URL="${TORCH_INDEX_URL:-$index}" PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 \
        bash training_scripts/setup_venv.sh \
    && .venv/bin/python -m compileall -q dschat_ppo training training_scripts \
    && mkdir -m 777 /output

# HOME and USER are for a user that the container does not know: docker run --user "$(id -u):$(id -g)"
ENV PATH="/opt/dschat_ppo/.venv/bin:$PATH" HOME=/tmp USER=trainer
CMD ["bash", "training_scripts/quickstart.sh", "/output/quickstart"]
