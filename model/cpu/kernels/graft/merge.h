// The compositional embedder: groups of tokens become the one input of their slot (model/modules/embedder.py says how).
// Included inside a namespace, after layers.h.

inline void embed(const Embedding& table, int64_t token, float* to) {
  const int64_t d = table.width, from = token * d, groups = d / kGroup, lane = token % kLanes;
  if (table.bits == 8) {
    const uint8_t* codes = static_cast<const uint8_t*>(table.rows) + token / kLanes * groups * group_bytes(8);
    for (int64_t g = 0; g < groups; g++, codes += group_bytes(8)) {
      float scales[kLanes];
      store(scales, load_half(reinterpret_cast<const uint16_t*>(codes + 512)));
      for (int64_t k = 0; k < kGroup; k++) *to++ = (codes[64 * (k / 4) + 4 * lane + k % 4] - 128) * scales[lane];
    }
    return;
  }
  for (int64_t i = 0; i < d; i += kLanes)
    store(to + i, table.bits == 32 ? load(static_cast<const float*>(table.rows) + from + i)
                                   : load(static_cast<const Bf16*>(table.rows) + from + i));
}

struct MergeSpace {
  float *q, *k, *v, *attended;
  Inputs mean, joined;  // [N, D], [N * W, D + D / 2]
};

inline int64_t lay_out(const Merger& m, int64_t groups, int64_t width, uint8_t* p, MergeSpace* s) {
  const int64_t d = m.hidden, rows = groups * width;
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    uint8_t* const place = p + at;
    at += aligned(bytes);
    return place;
  };
  s->q = reinterpret_cast<float*>(take(groups * d * 4));
  s->k = reinterpret_cast<float*>(take(rows * d * 4));
  s->v = reinterpret_cast<float*>(take(rows * d * 4));
  s->attended = reinterpret_cast<float*>(take(groups * d * 4));
  s->mean = inputs_at(take(inputs_bytes(groups, d)), groups, d);
  s->joined = inputs_at(take(inputs_bytes(rows, d + d / 2)), rows, d + d / 2);
  return at;
}

// One head of one group: q [n] against k and v [size, n], rows D apart -> to [n]. n is any number.
inline void attend_group(const float* q, const float* k, const float* v, int64_t size, int64_t n, int64_t d, float* to) {
  float weights[kMaxGroup], most = kHidden, total = 0;
  for (int64_t j = 0; j < size; j++) {
    float score = 0;
    for (int64_t i = 0; i < n; i++) score += q[i] * k[j * d + i];
    weights[j] = score / std::sqrt(static_cast<float>(n));
    most = std::max(most, weights[j]);
  }
  for (int64_t j = 0; j < size; j++) total += weights[j] = std::exp(weights[j] - most);
  for (int64_t i = 0; i < n; i++) {
    float sum = 0;
    for (int64_t j = 0; j < size; j++) sum += weights[j] * v[j * d + i];
    to[i] = sum / total;
  }
}

// e [N, W, D], of which sizes[N] count -> to [N, D].
inline void merge(const Merger& m, const float* e, const int64_t* sizes, int64_t groups, int64_t width, float* to, uint8_t* memory) {
  MergeSpace s;
  lay_out(m, groups, width, memory, &s);
  const int64_t d = m.hidden, parts = d / kGroup, head = d / m.heads;
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    const auto [first, last] = share.of(groups * parts);
    for (int64_t at = first; at < last; at++) {
      const int64_t group = at / parts, i = at % parts * kGroup;
      F a = set1(0.0f), b = set1(0.0f);
      for (int64_t j = 0; j < sizes[group]; j++) {
        const float* x = e + (group * width + j) * d + i;
        a = a + load(x);
        b = b + load(x + kLanes);
      }
      const F count = set1(static_cast<float>(sizes[group]));
      a = a / count;
      b = b / count;
      store(to + group * d + i, a);
      store(to + group * d + i + kLanes, b);
      quantize(s.mean, at, a, b);
    }
    const auto [from, until] = share.of(groups * width * s.joined.groups());
    for (int64_t at = from; at < until; at++) {
      const int64_t row = at / s.joined.groups(), part = at % s.joined.groups();
      const float* x = part < parts ? e + row * d + part * kGroup : m.pos + row % width * (d / 2) + (part - parts) * kGroup;
      quantize(s.joined, at, load(x), load(x + kLanes));
    }
#pragma omp barrier
    multiply(m.q, s.mean, groups, {s.q, d, false}, share);
    multiply(m.k, s.joined, groups * width, {s.k, d, false}, share);
    multiply(m.v, s.joined, groups * width, {s.v, d, false}, share);
#pragma omp barrier
    const auto [begin, end] = share.of(groups * m.heads);
    for (int64_t at = begin; at < end; at++) {
      const int64_t group = at / m.heads, i = at % m.heads * head, row = group * width * d + i;
      attend_group(s.q + group * d + i, s.k + row, s.v + row, sizes[group], head, d, s.attended + group * d + i);
    }
#pragma omp barrier
    plain_inputs(s.attended, s.mean, groups, share);
#pragma omp barrier
    multiply(m.out, s.mean, groups, {to, d, true}, share);
  }
}

inline int64_t embed_memory(const Merger& m, int64_t composed, int64_t width) {
  MergeSpace s;
  return lay_out(m, composed, width, nullptr, &s) + aligned(composed * (width + 1) * m.hidden * 4);
}

// Slots of tokens [T, W], of which sizes[T] count -> x [T, D]. composed [T]: the slots of several come first; returns how many.
inline int64_t embed_slots(const Embedding& table, const Merger& m, const int64_t* tokens, const int64_t* sizes, int64_t slots,
                           int64_t width, float* x, int64_t* composed, uint8_t* memory) {
  const int64_t d = table.width;
  int64_t count = 0;
  for (int64_t i = 0; i < slots; i++) {
    if (sizes[i] > 1) composed[count++] = i;
    else embed(table, tokens[i * width], x + i * d);
  }
  if (!count) return 0;
  float *const e = reinterpret_cast<float*>(memory), *const states = e + count * width * d;
  std::vector<int64_t> sizes_of(count);
  for (int64_t i = 0; i < count; i++) {
    sizes_of[i] = sizes[composed[i]];
    for (int64_t j = 0; j < width; j++) embed(table, tokens[composed[i] * width + j], e + (i * width + j) * d);
  }
  merge(m, e, sizes_of.data(), count, width, states, memory + aligned(count * (width + 1) * d * 4));
  for (int64_t i = 0; i < count; i++) std::memcpy(x + composed[i] * d, states + i * d, sizeof(float) * d);
  return count;
}
