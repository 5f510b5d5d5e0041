#!/usr/bin/env bash
# Runs programs for aarch64 in an emulation of a user's process.
#
# usage: tests/cross/aarch64-linux.sh FOLDER [kernels | verify]    FOLDER keeps the toolchain and the build, 6 GB
#
# `kernels`, the default, runs the tests of the kernels for CPUs (NEON): 4 minutes of two cores. `verify` builds the server
# and runs `steersman verify` on the bundled model with the prompts of prompts.json, as the emulation takes half a minute
# for each reply.
#
# Needs Debian's g++-aarch64-linux-gnu and qemu-user. An emulation shows that results are right, and nothing about speed.
set -euo pipefail
mode=${2:-kernels}
[ $# -ge 1 ] && [ $# -le 2 ] && [[ $mode =~ ^(kernels|verify)$ ]] || { sed -n '4p' "$0" >&2; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v $program >/dev/null || { echo "$program is missing: install g++-aarch64-linux-gnu and qemu-user" >&2; exit 1; }
done
[ -f "$folder/env.sh" ] || tests/cross/toolchain.sh "$folder"
. "$folder/env.sh"
# A processor without SVE, as Apple's are: OpenBLAS computes wrong products with the vectors of 2,048 bits that an emulated
# one has otherwise.
export QEMU_CPU=neoverse-n1
export CARGO_TARGET_DIR=$folder/target CARGO_INCREMENTAL=0
# Named, as crates would take a CC of the environment for the target, too.
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc CXX_aarch64_unknown_linux_gnu=aarch64-linux-gnu-g++
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
case $mode in
  kernels)
    time cargo test -Zbuild-std=std,panic_abort,proc_macro,test --target aarch64-unknown-linux-gnu -p steersman-cpu-kernels --lib
    ;;
  verify)
    time cargo build -Zbuild-std=std,panic_abort,proc_macro --target aarch64-unknown-linux-gnu --bin steersman
    time qemu-aarch64 -L /usr/aarch64-linux-gnu "$folder/target/aarch64-unknown-linux-gnu/debug/steersman" verify \
      --prompts tests/cross/prompts.json --tokens 48
    ;;
esac
