#!/usr/bin/env bash
# Checks that the whole workspace compiles for Apple Silicon: Rust with the feature `metal`, and MLX's C interface with our
# shim against the headers of MLX's wheel for macOS. Nothing is linked, and nothing runs on a Mac.
#
# usage: tests/cross/macos.sh FOLDER    FOLDER keeps the toolchain and the build, 6 GB
#
# Takes 8 minutes of two cores at first, and a minute after a change of the server: too long for every push, so it is not
# part of .ci/run.
set -euo pipefail
[ $# = 1 ] || { sed -n '5p' "$0" >&2; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
[ -f "$folder/env.sh" ] || tests/cross/toolchain.sh "$folder"
. "$folder/env.sh"
export BINDGEN_EXTRA_CLANG_ARGS=$CROSS_HEADERS CARGO_TARGET_DIR=$folder/target CARGO_INCREMENTAL=0
export MACOSX_DEPLOYMENT_TARGET=14.0
# The guests of tests need a compiler for WebAssembly of their own, and are the same for every host.
time cargo check -Zbuild-std=std,panic_abort,proc_macro --target aarch64-apple-darwin --workspace \
  --exclude steersman-test-support --features steersman/metal
