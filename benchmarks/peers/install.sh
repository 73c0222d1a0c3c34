#!/usr/bin/env bash
# Installs the engines that benchmarks compare with: FOLDER/bin/python has llama-cpp-python,
# OpenVINO and transformers on torch, and FOLDER/bin/llama-server is llama.cpp's server.
#
#     benchmarks/peers/install.sh FOLDER
#
# llama.cpp is compiled twice for this machine, ten minutes or so each on two cores. On a machine
# with AMX, compile it with clang 19 (CC=clang-19 CXX=clang++-19): gcc 12 moves tile loads, and its
# program crashes; clang 14 leaves the tiles out. Its version is fixed because its low-level
# interface changes. torchvision is not used, and fails beside a build of PyTorch that is not its
# own.
set -euo pipefail
folder=${1:?"usage: benchmarks/peers/install.sh FOLDER"}
llama=llama-cpp-python==0.3.36

python3 -m venv "$folder"
"$folder/bin/pip" install cmake torch==2.13.0
"$folder/bin/pip" install gguf "$llama" openvino optimum-intel nncf transformers accelerate
"$folder/bin/pip" uninstall --yes torchvision

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
"$folder/bin/pip" download --no-deps --no-binary llama-cpp-python --dest "$source" "$llama"
tar --extract --gzip --file "$source"/*.tar.gz --directory "$source" --strip-components 1
"$folder/bin/cmake" -S "$source/vendor/llama.cpp" -B "$source/build" -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
"$folder/bin/cmake" --build "$source/build" --target llama-server --parallel "$(nproc)"
cp "$source/build/bin/llama-server" "$folder/bin/"
