# Themis with its command line and the demo.
#
#   docker build -t themis .                                                                        # CPU
#   docker build -t themis:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .    # NVIDIA GPUs
#   docker run --rm -v "$PWD:/work" themis run --model mine:make_net --data mine:make_data --perturb gaussian
#   docker run --rm --gpus all -v "$PWD:/work" themis:cuda run --device cuda ...
#
# The wheels of torch for CUDA contain its libraries, so that both images have the same base; the host needs a driver
# and, for --gpus, the NVIDIA container toolkit.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=2.13.0
ARG EXTRAS=demo,images,tables,onnx
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch==$TORCH"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/themis_dl-*.whl)[$EXTRAS]" && rm -rf /wheels && themis doctor --quick
RUN useradd --create-home themis && install --directory --owner themis /work
USER themis
WORKDIR /work
ENTRYPOINT ["themis"]
CMD ["--help"]
