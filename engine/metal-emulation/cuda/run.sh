#!/bin/sh
# Runs the Metal texts of GatedDeltaNet, of experts and of products of few rows on an NVIDIA GPU, a simdgroup as a warp: against
# f64, beside our CUDA kernels, and under the race checker, with each barrier and without it. Needs CUDA 12 or later. The times
# compare two texts on one device; they say nothing of a Mac.
set -e
cd "$(dirname "$0")"
out=${OUT:-$(mktemp -d)}
mkdir -p "$out/texts"
# CUDA has no address spaces, and marks functions of the device.
for text in ../../src/kernels/metal/*.metal; do
    sed -E 's/\b(device|thread) //g; s/\binline\b/__device__ inline/' "$text" > "$out/texts/$(basename "$text")"
done
build() {
    nvcc -O3 -std=c++17 -arch=native -lineinfo -I "$out/texts" -D"$2=\"$3\"" -o "$4" "$1"
}
check() {
    compute-sanitizer --tool racecheck "$1" races | grep -E "RACECHECK SUMMARY|hazard" | tail -1
}
# Of a program: its name, the macro that names the text, and the text.
run() {
    text=$out/texts/$3
    build "$1.cu" "$2" "$text" "$out/$1"
    "$out/$1"
    echo "$1: races: $(check "$out/$1")"
    for i in $(seq "$(grep -c threadgroup_barrier "$text")"); do
        awk -v skip="$i" '!/threadgroup_barrier/ || ++n != skip' "$text" > "$out/without_$i.metal"
        build "$1.cu" "$2" "$out/without_$i.metal" "$out/$1_without_$i"
        echo "$1: races without barrier $i: $(check "$out/$1_without_$i")"
    done
}
run run BODY gated_delta.metal
run experts DOWN experts_down.metal
