// Inputs in 8 bits, packed weights, and their product. Included inside a namespace, after the vectors.

// Rows of inputs, quantised in groups of 32: x = value * scale. [T, inputs], [T, groups].
struct Inputs {
  int8_t* values;
  float* scales;
  float* sums;  // scale times the sum of a group's values, for zeros
  int32_t* offsets;  // -128 times that sum, for 8-bit codes
  int64_t width;

  int64_t groups() const { return width / kGroup; }
};

inline int64_t inputs_bytes(int64_t rows, int64_t width) { return rows * (width + width / kGroup * 12); }

inline Inputs inputs_at(uint8_t* p, int64_t rows, int64_t width) {
  const int64_t groups = rows * (width / kGroup);
  auto* scales = reinterpret_cast<float*>(p);
  return {reinterpret_cast<int8_t*>(p + 12 * groups), scales, scales + groups,
          reinterpret_cast<int32_t*>(scales + 2 * groups), width};
}

// Group `at` of [T, groups], from its 32 numbers. What is not finite makes the group's part of every sum NaN.
inline void quantize(const Inputs& x, int64_t at, F a, F b) {
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

template <typename Value>
inline void prefetch(const Value* p, int64_t count) {
  const auto* bytes = reinterpret_cast<const char*>(p);
  const auto size = count * static_cast<int64_t>(sizeof(Value));
  for (int64_t i = 0; i < size; i += 64) _mm_prefetch(bytes + i, _MM_HINT_T0);
}

struct Output {
  float* y;
  int64_t stride;
  bool add;  // to what y holds
  int64_t first = 0;  // the output that y begins with
};

inline void write(const Output& out, const Weight& w, int64_t row, int64_t block, F value) {
  float* y = out.y + row * out.stride + block * kLanes - out.first;
  const int64_t valid = w.outputs - block * kLanes;
  float held[kLanes];
  if (valid >= kLanes) {
    if (w.bias) value = value + load(w.bias + block * kLanes);
    store(y, out.add ? value + load(y) : value);
    return;
  }
  store(held, value);
  for (int64_t i = 0; i < valid; i++) {
    const float biased = held[i] + (w.bias ? w.bias[block * kLanes + i] : 0.0f);
    y[i] = out.add ? y[i] + biased : biased;
  }
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

template <int bits, int rows>
inline void multiply_block(const Weight& w, int64_t block, const Inputs& x, int64_t row, const Output& out) {
  constexpr int64_t step = bits == 4 ? 4 * 64 + 64 : 8 * 64 + 32;
  const int64_t groups = x.groups();
  const uint8_t* data = w.data + block * groups * step;
  F total[rows];
  const int8_t* inputs[rows];
  unrolled<rows>([&](auto r) __attribute__((always_inline)) {
    total[r] = set1(0.0f);
    inputs[r] = x.values + (row + r) * x.width;
  });
  for (int64_t g = 0; g < groups; g++, data += step) {
    // The same group of the next block: while this one is multiplied, memory need not wait.
    if (row == 0) prefetch(data + groups * step, step);
    Sums<bits> sums[rows];
    unrolled<4>([&](auto i) __attribute__((always_inline)) {
      B even = load_bytes(data + (bits == 4 ? 64 : 128) * i), odd = even;
      if constexpr (bits == 4) even = low_nibbles(even), odd = high_nibbles(odd);
      else odd = load_bytes(data + 128 * i + 64);
      unrolled<rows>([&](auto r) __attribute__((always_inline)) {
        const int8_t* values = inputs[r] + g * kGroup + 8 * i;
        sums[r].add(even, values, 0);
        sums[r].add(odd, values + 4, 1);
      });
    });
    const F scale = load_half(reinterpret_cast<const uint16_t*>(data + (bits == 4 ? 256 : 512)));
    F zero = scale;
    if constexpr (bits == 4) zero = load_half(reinterpret_cast<const uint16_t*>(data + 288));
    unrolled<rows>([&](auto r) __attribute__((always_inline)) {
      const int64_t at = (row + r) * groups + g;
      total[r] = fma(to_float(sums[r].all(x.offsets[at])) * scale, set1(x.scales[at]), total[r]);
      if constexpr (bits == 4) total[r] = fma(zero, set1(x.sums[at]), total[r]);
    });
  }
  unrolled<rows>([&](auto r) { write(out, w, row + r, block, total[r]); });
}

template <int bits>
inline void multiply_blocks(const Weight& w, int64_t first, int64_t last, const Inputs& x, int64_t rows, const Output& out) {
  for (int64_t block = first; block < last; block++) {
    int64_t row = 0;
    for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce) multiply_block<bits, kRowsAtOnce>(w, block, x, row, out);
    for (; row + 4 <= rows; row += 4) multiply_block<bits, 4>(w, block, x, row, out);
    for (; row + 2 <= rows; row += 2) multiply_block<bits, 2>(w, block, x, row, out);
    if (row < rows) multiply_block<bits, 1>(w, block, x, row, out);
  }
}

// This thread's share of the outputs, for all rows.
inline void multiply(const Weight& w, const Inputs& x, int64_t rows, const Output& out, const Share& share) {
  const auto [first, last] = share.of((w.outputs + kLanes - 1) / kLanes);
  if (w.bits == 4) multiply_blocks<4>(w, first, last, x, rows, out);
  else multiply_blocks<8>(w, first, last, x, rows, out);
}

// One group of 32 of an output lane, quantised to 4 or 8 bits.
inline void pack_group(int bits, const float* from, int lane, uint8_t* to) {
  const F a = load(from), b = load(from + kLanes);
  auto* scales = reinterpret_cast<uint16_t*>(to + (bits == 4 ? 256 : 512));
  uint16_t half[kLanes];
  float exact[kLanes];
  const auto rounded = [&](float value) {  // to half precision
    store_half(half, set1(value));
    store(exact, load_half(half));
    return exact[0];
  };
  int8_t codes[kGroup];
  if (bits == 8) {
    const float scale = rounded(largest(max(abs(a), abs(b))) / 127.0f);
    scales[lane] = half[0];
    const F inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), most = set1(127.0f), least = set1(-127.0f);
    store_bytes(codes, min(max(round(a * inverse), least), most));
    store_bytes(codes + kLanes, min(max(round(b * inverse), least), most));
    for (int k = 0; k < kGroup; k++) to[64 * (k / 4) + 4 * lane + k % 4] = static_cast<uint8_t>(codes[k] + 128);
    return;
  }
  const float high = largest(max(a, b)), low = -largest(max(set1(0.0f) - a, set1(0.0f) - b));
  const float scale = rounded((high - low) / 15.0f);
  scales[lane] = half[0];
  const float zero = rounded(low);
  scales[kLanes + lane] = half[0];
  const F inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), origin = set1(zero), most = set1(15.0f), least = set1(0.0f);
  store_bytes(codes, min(max(round((a - origin) * inverse), least), most));
  store_bytes(codes + kLanes, min(max(round((b - origin) * inverse), least), most));
  for (int k = 0; k < kGroup; k++) {
    uint8_t& both = to[64 * (k / 8) + 4 * lane + k % 4];
    both = k % 8 < 4 ? static_cast<uint8_t>(codes[k]) : static_cast<uint8_t>(both | codes[k] << 4);
  }
}
