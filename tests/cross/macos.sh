#!/usr/bin/env bash
# Compiles the whole workspace for Apple Silicon on Linux, with the feature `metal`, and MLX's C interface with our shim
# against the headers of MLX's wheel for macOS. Nothing runs on a Mac.
#
# usage: tests/cross/macos.sh FOLDER [check | packages]    FOLDER keeps the toolchain and the build, 6 GB
#
# `check`, the default, makes no code. `packages` links the programs, compares what they load and take from MLX with what
# there is (mach_o.py), and makes a wheel and a tar.gz of them in FOLDER/packages. CARGO_PROFILE_RELEASE_OPT_LEVEL=0 and
# CARGO_PROFILE_RELEASE_LTO=off in the environment make slow programs in a third of the time.
#
# A check takes 8 minutes of two cores at first, and a minute after a change of the server. `.ci/run` makes one.
set -euo pipefail
mode=${2:-check}
[ $# -ge 1 ] && [ $# -le 2 ] && [[ $mode =~ ^(check|packages)$ ]] || { sed -n '5p' "$0" >&2; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
[ -f "$folder/env.sh" ] || tests/cross/toolchain.sh "$folder"
. "$folder/env.sh"
export BINDGEN_EXTRA_CLANG_ARGS=$CROSS_HEADERS CARGO_TARGET_DIR=$folder/target CARGO_INCREMENTAL=0
export MACOSX_DEPLOYMENT_TARGET=14.0
target=(-Zbuild-std=std,panic_abort,proc_macro --target aarch64-apple-darwin --features steersman/metal)
case $mode in
  check)
    # The guests of tests need a compiler for WebAssembly of their own, and are the same for every host.
    time cargo check "${target[@]}" --workspace --exclude steersman-test-support
    ;;
  packages)
    # The profile `release` has no debugging information: what strips it would have to sign the programs again.
    time cargo build "${target[@]}" --release --bins
    built=$folder/target/aarch64-apple-darwin/release
    python3 -m pip install -q --target "$folder/lief" lief==1.0.0
    export PYTHONPATH=$folder/lief
    python3 tests/cross/mach_o.py "$built/steersman" "$(find "$built/lib" -name libmlx.dylib)"
    for program in steersman-bench steersman-policy; do python3 tests/cross/mach_o.py "$built/$program"; done
    STRIP= server/package/build.py wheel tar --binary "$built/steersman" --out "$folder/packages"
    ;;
esac
