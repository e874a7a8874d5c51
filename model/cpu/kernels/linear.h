// Inputs in 8 bits, packed weights, and their product. Included inside a namespace, after the vectors.

// Rows of inputs [T, inputs], quantised in groups of 32: x = value * scale. Rows lie in tiles of kRowsAtOnce, the last of
// as many as there are: [tiles, groups, rows of the tile], so that the rows of a group lie side by side.
struct Inputs {
  int8_t* values;
  float* scales;
  float* sums;  // scale times the sum of a group's values, for zeros
  int32_t* offsets;  // -128 times that sum, for 8-bit codes
  int64_t width, rows;

  int64_t groups() const { return width / kGroup; }
  // How far apart the groups of a row are.
  int64_t stride(int64_t row) const { return std::min<int64_t>(rows - row / kRowsAtOnce * kRowsAtOnce, kRowsAtOnce); }
  int64_t place(int64_t row, int64_t group) const {
    const int64_t in_tile = row % kRowsAtOnce;
    return (row - in_tile) * groups() + group * stride(row) + in_tile;
  }
};

inline int64_t inputs_bytes(int64_t rows, int64_t width) { return rows * (width + width / kGroup * 12); }

inline Inputs inputs_at(uint8_t* p, int64_t rows, int64_t width) {
  const int64_t groups = rows * (width / kGroup);
  auto* scales = reinterpret_cast<float*>(p);
  return {reinterpret_cast<int8_t*>(p + 12 * groups), scales, scales + groups,
          reinterpret_cast<int32_t*>(scales + 2 * groups), width, rows};
}

// Group `index` of [T, groups], from its 32 numbers. What is not finite makes the group's part of every sum NaN.
inline void quantize(const Inputs& x, int64_t index, F a, F b) {
  const int64_t at = x.place(index / x.groups(), index % x.groups());
  const float fault = sum((a - a) + (b - b));  // 0, or NaN
  if (fault != 0.0f) {
    std::memset(x.values + at * kGroup, 0, kGroup);
    x.scales[at] = x.sums[at] = fault;
    x.offsets[at] = 0;
    return;
  }
  const float largest_one = largest(max(abs(a), abs(b)));
  const float inverse = largest_one > 0 ? 127.0f / largest_one : 0.0f;
  const I low = store_bytes(x.values + at * kGroup, round(a * set1(inverse)));
  const I high = store_bytes(x.values + at * kGroup + kLanes, round(b * set1(inverse)));
  const int32_t total = sum(low + high);
  x.scales[at] = largest_one / 127.0f;
  x.sums[at] = x.scales[at] * static_cast<float>(total);
  x.offsets[at] = -128 * total;
}

// Inlined always: a call that only prefetches has no effect to GCC, which leaves it out.
template <typename Value>
__attribute__((always_inline)) inline void prefetch(const Value* p, int64_t count) {
  const auto* bytes = reinterpret_cast<const char*>(p);
  const auto size = count * static_cast<int64_t>(sizeof(Value));
#pragma GCC unroll 16
  for (int64_t i = 0; i < size; i += 64) _mm_prefetch(bytes + i, _MM_HINT_T0);
}

struct Output {
  float* y;
  int64_t stride;
  bool add;  // to what y holds
  int64_t first = 0;  // the output that y begins with
};

__attribute__((noinline)) inline void write_some(const Output& out, const Weight& w, int64_t block, F value, float* y, int64_t valid) {
  float held[kLanes];
  store(held, value);
  for (int64_t i = 0; i < valid; i++) {
    const float biased = held[i] + (w.bias ? w.bias[block * kLanes + i] : 0.0f);
    y[i] = out.add ? y[i] + biased : biased;
  }
}

inline void write(const Output& out, const Weight& w, int64_t row, int64_t block, F value) {
  float* y = out.y + row * out.stride + block * kLanes - out.first;
  const int64_t valid = w.outputs - block * kLanes;
  if (valid < kLanes) return write_some(out, w, block, value, y, valid);
  if (w.bias) value = value + load(w.bias + block * kLanes);
  store(y, out.add ? value + load(y) : value);
}

// f(0) to f(n - 1), written out before anything else is decided: what f indexes can stay in registers.
template <typename Function, int... i>
__attribute__((always_inline)) inline void write_out(std::integer_sequence<int, i...>, const Function& f) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int n, typename Function>
__attribute__((always_inline)) inline void unrolled(const Function& f) {
  write_out(std::make_integer_sequence<int, n>(), f);
}

// Some rows of one tile with some blocks, whose weights are unpacked once. Every row's sums are made in the same order, whatever
// is made beside them.
template <int bits, int rows, int blocks = 1>
void multiply_block(const Weight& w, int64_t block, const Inputs& x, int64_t row, const Output& out) {
  constexpr int64_t step = bits == 4 ? 4 * 64 + 64 : 8 * 64 + 32;
  const int64_t groups = x.groups(), stride = x.stride(row), size = groups * step;
  const uint8_t* data = w.data + block * size;
  int64_t at = x.place(row, 0);
  F total[blocks][rows];
  const auto each = [](const auto& f) __attribute__((always_inline)) {
    unrolled<blocks>([&](auto b) __attribute__((always_inline)) {
      unrolled<rows>([&](auto r) __attribute__((always_inline)) { f(b, r); });
    });
  };
  each([&](auto b, auto r) __attribute__((always_inline)) { total[b][r] = set1(0.0f); });
  for (int64_t g = 0; g < groups; g++, data += step, at += stride) {
    // The same group of the next blocks: while this one is multiplied, memory need not wait.
    if (row == 0) unrolled<blocks>([&](auto b) __attribute__((always_inline)) { prefetch(data + (blocks + b) * size, step); });
    Sums<bits> sums[blocks][rows];
    each([&](auto b, auto r) __attribute__((always_inline)) { sums[b][r].begin(x.offsets[at + r]); });
    const int8_t* const values = x.values + at * kGroup;
    unrolled<4>([&](auto i) __attribute__((always_inline)) {
      B even[blocks], odd[blocks];
      unrolled<blocks>([&](auto b) __attribute__((always_inline)) {
        const uint8_t* const codes = data + b * size + (bits == 4 ? 64 : 128) * i;
        even[b] = odd[b] = load_bytes(codes);
        if constexpr (bits == 4) even[b] = low_nibbles(even[b]), odd[b] = high_nibbles(odd[b]);
        else odd[b] = load_bytes(codes + 64);
      });
      unrolled<rows>([&](auto r) __attribute__((always_inline)) {
        const Four first = four(values + r * kGroup + 8 * i), second = four(values + r * kGroup + 8 * i + 4);
        unrolled<blocks>([&](auto b) __attribute__((always_inline)) {
          sums[b][r].add(even[b], first);
          sums[b][r].add(odd[b], second);
        });
      });
    });
    unrolled<blocks>([&](auto b) __attribute__((always_inline)) {
      const auto* scales = reinterpret_cast<const uint16_t*>(data + b * size + (bits == 4 ? 256 : 512));
      const F scale = load_half(scales), zero = bits == 4 ? load_half(scales + kLanes) : scale;
      unrolled<rows>([&](auto r) __attribute__((always_inline)) {
        total[b][r] = fma(to_float(sums[b][r].all()) * scale, set1(x.scales[at + r]), total[b][r]);
        if constexpr (bits == 4) total[b][r] = fma(zero, set1(x.sums[at + r]), total[b][r]);
      });
    });
  }
  each([&](auto b, auto r) { write(out, w, row + r, block + b, total[b][r]); });
}

// At most `most` rows of one tile.
template <int bits, int blocks = 1, int most = kRowsAtOnce>
inline void multiply_tile(const Weight& w, int64_t block, const Inputs& x, int64_t row, int64_t rows, const Output& out) {
  if (rows >= most) return multiply_block<bits, most, blocks>(w, block, x, row, out);
  if constexpr (most > 1) multiply_tile<bits, blocks, most - 1>(w, block, x, row, rows, out);
}

// Several rows take several blocks at once where there are registers: an input is then fetched once for all of them.
template <int bits>
inline void multiply_blocks(const Weight& w, int64_t first, int64_t last, const Inputs& x, int64_t rows, const Output& out) {
  constexpr int few = kRowsAtOnce / kBlocksAtOnce;
  int64_t block = first;
  for (; kBlocksAtOnce > 1 && rows > 1 && block + kBlocksAtOnce <= last; block += kBlocksAtOnce)
    for (int64_t row = 0; row < rows; row += few) multiply_tile<bits, kBlocksAtOnce, few>(w, block, x, row, rows - row, out);
  for (; block < last; block++)
    for (int64_t row = 0; row < rows; row += kRowsAtOnce) multiply_tile<bits>(w, block, x, row, rows - row, out);
}

// f(first, last) of this thread's blocks of outputs. halves: two, of which a thread has the same groups of 32 outputs.
template <typename Function>
inline void for_share(const Weight& w, bool halves, const Share& share, const Function& f) {
  const int64_t blocks = (w.outputs + kLanes - 1) / kLanes / (halves ? 2 : 1);
  const auto [first, last] = share.of(blocks, halves ? kGroup / kLanes : 1);
  f(first, last);
  if (halves) f(blocks + first, blocks + last);
}

// Some blocks of outputs, for all rows.
inline void multiply_range(const Weight& w, int64_t first, int64_t last, const Inputs& x, int64_t rows, const Output& out) {
  if (w.bits == 4) multiply_blocks<4>(w, first, last, x, rows, out);
  else multiply_blocks<8>(w, first, last, x, rows, out);
}

// This thread's share of the outputs, for all rows.
inline void multiply(const Weight& w, const Inputs& x, int64_t rows, const Output& out, const Share& share, bool halves = false) {
  for_share(w, halves, share, [&](int64_t first, int64_t last) { multiply_range(w, first, last, x, rows, out); });
}
