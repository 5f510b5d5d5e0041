// Weights of packed matrices with BITS bits each, a scale and a bias for each group: affine
// quantization of MLX.
//
// A row is a stream of bits from the lowest bit of its first byte on, so a pack of 8 weights has
// BITS bytes in every width. Rows have whole words.

// A float as it is after it was stored as T, which the body defines.
#define ROUNDED(x) static_cast<float>(static_cast<T>(x))

template <int BYTES> struct Unit {
  typedef uchar Type;
};
template <> struct Unit<2> {
  typedef ushort Type;
};
template <> struct Unit<4> {
  typedef uint Type;
};

// The 8 integers of a pack, read in the widest units that packs are aligned to.
template <int BITS> inline void unpack(const device uint* words, int pack, thread float* weights) {
  constexpr int BYTES = BITS % 4 == 0 ? 4 : BITS % 2 == 0 ? 2 : 1;
  constexpr int UNITS = BITS / BYTES, WIDTH = 8 * BYTES;
  typedef typename Unit<BYTES>::Type Type;
  const device Type* own = reinterpret_cast<const device Type*>(words) + size_t(pack) * UNITS;
  uint units[UNITS];
  for (int u = 0; u < UNITS; u++) units[u] = uint(own[u]);
  for (int j = 0; j < 8; j++) {
    const int u = j * BITS / WIDTH, shift = j * BITS % WIDTH;
    uint weight = units[u] >> shift;
    // The other bits are in the next unit.
    if (shift + BITS > WIDTH) weight |= units[min(u + 1, UNITS - 1)] << (WIDTH - shift);
    weights[j] = float(weight & ((1u << BITS) - 1));
  }
}

// Reads 8 inputs, and returns their sum. X is a pointer to floats of any type.
template <typename X> inline float read_pack(X x, thread float* inputs) {
  float total = 0;
  for (int j = 0; j < 8; j++) {
    inputs[j] = static_cast<float>(x[j]);
    total += inputs[j];
  }
  return total;
}

// The product of 8 inputs with the weights of a pack, for inputs whose sum is `total`. S is a
// pointer to floats of any type.
template <int BITS, typename S>
inline float product(const device uint* words, S scales, S biases, int pack, int group,
                     const thread float* inputs, float total) {
  float weights[8], sum = 0;
  unpack<BITS>(words, pack, weights);
  for (int j = 0; j < 8; j++) sum = fma(weights[j], inputs[j], sum);
  return fma(static_cast<float>(scales[group]), sum, static_cast<float>(biases[group]) * total);
}

// The product of 8 inputs with weights that are floats of any type.
template <typename W> inline float product(W weights, const thread float* inputs) {
  float sum = 0;
  for (int j = 0; j < 8; j++) sum = fma(static_cast<float>(weights[j]), inputs[j], sum);
  return sum;
}
