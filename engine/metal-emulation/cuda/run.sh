#!/bin/sh
# Runs Metal kernels on an NVIDIA GPU, a simdgroup as a warp: the text of each against f64, beside
# our CUDA kernel where there is one, and under the checkers of memory and races, with each barrier
# and without it. Fails unless all results are right, the texts have no race, and each removed
# barrier is found. Needs CUDA 12 or later. The times compare texts on one device; they say nothing
# of a Mac.
#
# NAME.cu is the program of src/kernels/metal/NAME.metal: it includes the text as BODY. With RACES
# defined it launches one small case.
set -eu
cd "$(dirname "$0")"
work=${WORK:-$(mktemp -d)}
texts=../../src/kernels/metal
arch=${ARCH:-native}
sanitizer=${SANITIZER:-compute-sanitizer}
names=$(for program in *.cu; do basename "$program" .cu; done)
barriers() { grep -c threadgroup_barrier "$texts/$1.metal" || true; }

build() { # build NAME TEXT PROGRAM [FLAG]
    nvcc -O3 -std=c++17 -arch="$arch" -lineinfo -diag-suppress 177 -DBODY="\"$2\"" ${4:-} \
        -o "$3" "$1.cu" >"$3.log" 2>&1 ||
        { cat "$3.log"; echo "FAILED: $1 does not compile"; return 1; }
}
# Several at a time: a build takes about ten seconds.
builds=""
for name in $names; do
    text=$texts/$name.metal
    build "$name" "$text" "$work/$name" & builds="$builds $!"
    build "$name" "$text" "$work/${name}_races" -DRACES & builds="$builds $!"
    for i in $(seq "$(barriers "$name")"); do
        without=$work/${name}_without_$i
        awk -v skip="$i" '!/threadgroup_barrier/ || ++n != skip' "$text" >"$without.metal"
        build "$name" "$without.metal" "$without" -DRACES & builds="$builds $!"
    done
done
failed=0
for build in $builds; do wait "$build" || failed=1; done
[ "$failed" = 0 ] || exit 1
[ -z "${BUILD_ONLY:-}" ] || exit 0

fail() {
    failed=1
    echo "FAILED: $1"
}
hazards() { # hazards PROGRAM: prints their number
    "$sanitizer" --tool racecheck "$1" >"$1.races" 2>&1 || true
    sed -n 's/.*RACECHECK SUMMARY: \([0-9]*\) hazard.*/\1/p' "$1.races"
}
for name in $names; do
    "$work/$name" || fail "$name has wrong results"
    "$sanitizer" --tool memcheck --error-exitcode 9 "$work/${name}_races" \
        >"$work/$name.memory" 2>&1 ||
        { cat "$work/$name.memory"; fail "$name leaves its buffers"; }
    found=$(hazards "$work/${name}_races")
    [ "$found" = 0 ] || { cat "$work/${name}_races.races"; fail "$name: races"; }
    for i in $(seq "$(barriers "$name")"); do
        without=$work/${name}_without_$i
        found=$(hazards "$without")
        echo "$name without barrier $i: ${found:-no} hazards"
        [ "${found:-0}" -gt 0 ] || { cat "$without.races"; fail "$name: barrier $i is not missed"; }
    done
done
for text in "$texts"/*.metal; do
    name=$(basename "$text" .metal)
    grep -qs "/$name.metal\"" ./*.cu ./*.cuh || [ -f "$name.cu" ] ||
        echo "not run: $name has no program here"
done
[ "$failed" = 0 ] || exit 1
echo "all right: $(echo $names)"
