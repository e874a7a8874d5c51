// Weights into the form that products read (structs.h). Included inside a namespace, after linear.h.

// How many even steps from the least to the greatest of a group's values, at most 15, put it nearest to a grid on which
// all lie; 15 where none does. Weights that were made of 4 bits need not use the first and the last of their 16 values.
inline float steps_of_grid(F a, F b, float low, float span) {
  constexpr float kOffGrid = 0.25f;  // of a step: more than bfloat16's rounding, less than numbers of more bits are off
  const auto off = [&](F values, float steps) {
    const F at = (values - set1(low)) * set1(steps / span);
    return largest(abs(at - round(at)));
  };
  float found = 15.0f, least = std::max(off(a, found), off(b, found)) / found;  // of the span
  for (float steps = 14.0f; steps >= 1.0f && least > 0.0f; steps -= 1.0f) {
    const float most = std::min(kOffGrid, least * steps);
    const float half = off(a, steps);
    if (half >= most) continue;
    const float whole = std::max(half, off(b, steps));
    if (whole < most) least = whole / steps, found = steps;
  }
  return found;
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
  const float scale = rounded((high - low) / (high > low ? steps_of_grid(a, b, low, high - low) : 15.0f));
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

// weight [outputs, inputs], contiguous, bfloat16 or float -> packed (structs.h).
template <typename Value>
void pack(int bits, const Value* weight, int64_t outputs, int64_t inputs, uint8_t* to) {
  const int64_t groups = inputs / kGroup, step = group_bytes(bits);
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    const auto [first, last] = share.of((outputs + kLanes - 1) / kLanes);
    for (int64_t block = first; block < last; block++) {
      for (int64_t g = 0; g < groups; g++) {
        for (int lane = 0; lane < kLanes; lane++) {
          const int64_t row = block * kLanes + lane;
          float values[kGroup] = {};
          if (row < outputs)
            for (int k = 0; k < kGroup; k += kLanes) store(values + k, load(weight + row * inputs + g * kGroup + k));
          pack_group(bits, values, lane, to + (block * groups + g) * step);
        }
      }
    }
  }
}
