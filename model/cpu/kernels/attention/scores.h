// Query heads times a tile's keys, of each kind that the cache may hold. Included inside a namespace, after scratch.h.

constexpr int kFewQueries = 12;  // heads, for which bfloat16 is not kept as float: it is read only once
constexpr int kPartsAtOnce = kRowsAtOnce / 4;  // vectors of slots, as registers allow

// split: also to float.
inline void transpose_keys(const Bf16* const* rows, int head_dim, bool split, Scratch& s, int part) {
  for (int d = 0; d < head_dim; d += 32) {
    const uint32_t* words[kLanes];
    for (int j = 0; j < kLanes; j++) words[j] = reinterpret_cast<const uint32_t*>(rows[j] + d);
    transpose(words, s.pairs[part][d / 2]);
  }
  for (int d = 0; split && d < head_dim; d += 2) {
    const auto [first, second] = split_pairs(s.pairs[part][d / 2]);
    store(s.keys[part][d], first);
    store(s.keys[part][d + 1], second);
  }
}

inline void transpose_keys(const float* const* rows, int head_dim, bool, Scratch& s, int part) {
  for (int d = 0; d < head_dim; d += kLanes) {
    const uint32_t* words[kLanes];
    for (int j = 0; j < kLanes; j++) words[j] = reinterpret_cast<const uint32_t*>(rows[j] + d);
    transpose(words, reinterpret_cast<uint32_t*>(s.keys[part][d]));
  }
}

// `count` query heads with `parts` vectors of slots.
template <bool pairs, int count, int parts>
inline void score(const float* const* queries, int head_dim, int part, int first, float* scores, const Scratch& s) {
  F total[count][parts];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) total[i][p] = set1(0.0f);
  for (int d = 0; d < head_dim; d += 2) {
    F keys[2][parts];
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) {
      if constexpr (pairs) {
        const auto [a, b] = split_pairs(s.pairs[part + p][d / 2]);
        keys[0][p] = a, keys[1][p] = b;
      } else {
        keys[0][p] = load(s.keys[part + p][d]), keys[1][p] = load(s.keys[part + p][d + 1]);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < 2; k++)
#pragma GCC unroll 8
      for (int i = 0; i < count; i++) {
        const F query = set1(queries[first + i][d + k]);
#pragma GCC unroll 8
        for (int p = 0; p < parts; p++) total[i][p] = fma(query, keys[k][p], total[i][p]);
      }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) store(scores + (first + i) * s.stride + (part + p) * kLanes, total[i][p]);
}

// Query heads i to last - 1 with a tile's slots; scores: where those of the tile begin.
template <bool pairs, int parts>
inline void score_all(const float* const* queries, int i, int last, int head_dim, int part, float* scores, const Scratch& s) {
  for (; i + 4 <= last; i += 4) score<pairs, 4, parts>(queries, head_dim, part, i, scores, s);
  if (last - i == 3) score<pairs, 3, parts>(queries, head_dim, part, i, scores, s);
  if (last - i == 2) score<pairs, 2, parts>(queries, head_dim, part, i, scores, s);
  if (last - i == 1) score<pairs, 1, parts>(queries, head_dim, part, i, scores, s);
}

template <bool pairs>
inline void score_tile(const float* const* queries, int first, int last, int head_dim, int parts, float* scores, const Scratch& s) {
  int p = 0;
  for (; p + kPartsAtOnce <= parts; p += kPartsAtOnce)
    score_all<pairs, kPartsAtOnce>(queries, first, last, head_dim, p, scores, s);
  for (; p < parts; p++) score_all<pairs, 1>(queries, first, last, head_dim, p, scores, s);
}

inline void transpose_keys(const Int8* const* rows, int head_dim, bool, Scratch& s, int part) {
  for (int d = 0; d < head_dim; d += 4 * kLanes) {
    const uint32_t* words[kLanes];
    uint32_t half[kLanes][kLanes] = {};  // where 32 dimensions are left, which end the row
    for (int j = 0; j < kLanes; j++) {
      words[j] = reinterpret_cast<const uint32_t*>(rows[j] + d);
      if (d + 4 * kLanes <= head_dim) continue;
      std::memcpy(half[j], words[j], head_dim - d);
      words[j] = half[j];
    }
    uint8_t* const to = s.codes[part][d / 4];
    transpose(words, reinterpret_cast<uint32_t*>(to));
    for (int i = 0; i < kLanes; i++) store_bytes(to + 4 * kLanes * i, plus_128(load_bytes(to + 4 * kLanes * i)));
  }
}

// To 15 bits, so that products with codes are exact sums of whole numbers.
inline void round_query(const float* query, int head_dim, int i, Scratch& s) {
  F most = set1(0.0f);
  for (int d = 0; d < head_dim; d += kLanes) most = max(most, abs(load(query + d)));
  const float top = largest(most);
  const F inverse = set1(top > 0 ? 127.0f / top : 0.0f);
  I first = set1(0), second = set1(0);
  for (int d = 0; d < head_dim; d += kLanes) {
    const F value = load(query + d) * inverse, whole = round(value);
    first = first + store_bytes(&s.query_codes[0][i][d], whole);
    second = second + store_bytes(&s.query_codes[1][i][d], round((value - whole) * set1(254.0f)));
  }
  s.query_sums[0][i] = sum(first);
  s.query_sums[1][i] = sum(second);
  s.query_scales[i] = top / 127.0f;
}

template <int count, int parts>
inline void score_codes(int head_dim, int part, int first, float* scores, const Scratch& s) {
  F sums[count][parts];
#pragma GCC unroll 2
  for (int k = 1; k >= 0; k--) {
    Sums<8> total[count][parts];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
#pragma GCC unroll 8
      for (int p = 0; p < parts; p++) total[i][p].begin(-128 * s.query_sums[k][first + i]);
    for (int d = 0; d < head_dim; d += 4) {
      B keys[parts];
#pragma GCC unroll 8
      for (int p = 0; p < parts; p++) keys[p] = load_bytes(s.codes[part + p][d / 4]);
#pragma GCC unroll 8
      for (int i = 0; i < count; i++)
#pragma GCC unroll 8
        for (int p = 0; p < parts; p++) total[i][p].add(keys[p], four(&s.query_codes[k][first + i][d]));
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
#pragma GCC unroll 8
      for (int p = 0; p < parts; p++) {
        const F whole = to_float(total[i][p].all());
        sums[i][p] = k ? whole * set1(1.0f / 254.0f) : sums[i][p] + whole;
      }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) {
      const F scale = load(&s.key_scales[(part + p) * kLanes]) * set1(s.query_scales[first + i]);
      store(scores + (first + i) * s.stride + (part + p) * kLanes, sums[i][p] * scale);
    }
}

template <int parts>
inline void score_all_codes(int i, int last, int head_dim, int part, float* scores, const Scratch& s) {
  for (; i + 4 <= last; i += 4) score_codes<4, parts>(head_dim, part, i, scores, s);
  if (last - i == 3) score_codes<3, parts>(head_dim, part, i, scores, s);
  if (last - i == 2) score_codes<2, parts>(head_dim, part, i, scores, s);
  if (last - i == 1) score_codes<1, parts>(head_dim, part, i, scores, s);
}

inline void score_tile_of_codes(int first, int last, int head_dim, int parts, float* scores, const Scratch& s) {
  int p = 0;
  for (; p + kPartsAtOnce <= parts; p += kPartsAtOnce) score_all_codes<kPartsAtOnce>(first, last, head_dim, p, scores, s);
  for (; p < parts; p++) score_all_codes<1>(first, last, head_dim, p, scores, s);
}
