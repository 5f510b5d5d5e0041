// Rows of a matrix in the tiles of tiled.rs, dequantized. A block writes a row.
//
// Constants: K (inputs, a multiple of 64), GATHER (1: the rows `ids`, 0: all rows), THREADS, T (bfloat16).
constexpr int SLABS = (K + 255) / 256;
wait_for_inputs();
const int row = GATHER ? int(ids[blockIdx.x]) : int(blockIdx.x);
const int half = row % 16 / 8, g = row % 8;
auto pack = [](float low, float high) {
  unsigned two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
};
for (int i = threadIdx.x; i < K / 8; i += THREADS) {
  const int slab = i / 32, group = i % 32 / 8, t = i % 8 / 2;
  const unsigned* const tile = w + (size_t(row / 16) * SLABS + slab) * 576;
  const unsigned word = tile[(group * 32 + g * 4 + t) * 4 + half * 2 + i % 2];
  const T* const factors = reinterpret_cast<const T*>(tile + 512) + g * 8 + half * 4 + group;
  const float factor = float(factors[0]), offset = float(factors[64]);
  auto element = [&](int at) { return fmaf(float(word >> (4 * at) & 15), factor, offset); };
  reinterpret_cast<uint4*>(out + size_t(blockIdx.x) * K)[i] =
      make_uint4(pack(element(0), element(1)), pack(element(2), element(3)), pack(element(4), element(5)),
                 pack(element(6), element(7)));
}
