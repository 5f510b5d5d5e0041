#!/usr/bin/env bash
# Runs the tests of the kernels for CPUs on aarch64 (NEON), in an emulation of a user's process.
#
# usage: tests/cross/aarch64-linux.sh FOLDER    FOLDER keeps the toolchain and the build, 3 GB
#
# Needs Debian's gcc-aarch64-linux-gnu and qemu-user. Takes 4 minutes of two cores. An emulation shows that results are
# right, and nothing about speed.
set -euo pipefail
[ $# = 1 ] || { sed -n '4p' "$0" >&2; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
for program in aarch64-linux-gnu-gcc qemu-aarch64; do
  command -v $program >/dev/null || { echo "$program is missing: install gcc-aarch64-linux-gnu and qemu-user" >&2; exit 1; }
done
[ -f "$folder/env.sh" ] || tests/cross/toolchain.sh "$folder"
. "$folder/env.sh"
export CARGO_TARGET_DIR=$folder/target CARGO_INCREMENTAL=0
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
time cargo test -Zbuild-std=std,panic_abort,proc_macro,test --target aarch64-unknown-linux-gnu -p steersman-cpu-kernels
