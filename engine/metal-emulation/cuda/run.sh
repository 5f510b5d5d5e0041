#!/bin/sh
# Runs the Metal text of GatedDeltaNet on an NVIDIA GPU, a simdgroup as a warp: against f64, beside our CUDA kernel, and under
# the race checker, with each barrier and without it. Needs CUDA 12 or later. The times compare two texts on one device; they
# say nothing of a Mac.
set -e
cd "$(dirname "$0")"
out=${OUT:-$(mktemp -d)}
text=../../src/kernels/metal/gated_delta.metal
build() {
    nvcc -O3 -std=c++17 -arch=native -lineinfo -DBODY="\"$1\"" -o "$2" run.cu
}
build "$text" "$out/right"
"$out/right"
check() {
    compute-sanitizer --tool racecheck "$1" races | grep -E "RACECHECK SUMMARY|hazard" | tail -1
}
echo "races: $(check "$out/right")"
count=$(grep -c threadgroup_barrier $text)
for i in $(seq "$count"); do
    awk -v skip="$i" '!/threadgroup_barrier/ || ++n != skip' $text > "$out/without_$i.metal"
    build "$out/without_$i.metal" "$out/without_$i"
    echo "races without barrier $i: $(check "$out/without_$i")"
done
