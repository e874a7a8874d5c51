// Query heads times a tile's keys, of each kind that the cache may hold. Included inside a namespace, after together.h.

constexpr int kFewQueries = 12;  // heads, for which bfloat16 is not kept as float: it is read only once
constexpr int kPartsAtOnce = kRowsAtOnce / 4;  // vectors of slots, as registers allow

// split: also to float.
inline void transpose_keys(const Bf16* const* rows, int head_dim, bool split, Scratch& s, int part) {
  for (int d = 0; d < head_dim; d += 32) {
    const uint32_t* words[kLanes];
    for (int j = 0; j < kLanes; j++) words[j] = reinterpret_cast<const uint32_t*>(rows[j] + d);
    transpose(words, s.pairs[part][d / 2]);
  }
  for (int d = 0; split && d < head_dim; d += 2)
    for (int lane = 0; lane < kLanes; lane += kWide) {
      store(&s.keys[part][d][lane], first_of_pairs(&s.pairs[part][d / 2][lane]));
      store(&s.keys[part][d + 1][lane], second_of_pairs(&s.pairs[part][d / 2][lane]));
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
template <bool pairs, int count, int parts, bool fetches>
inline void score(const float* const* queries, int head_dim, int part, int first, float* scores, Scratch& s) {
  constexpr int in_part = kLanes / kWide, n = parts * in_part;
  Coming coming = fetches ? s.coming : Coming{};
  Wide total[count][n];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) total[i][j] = set1_wide(0.0f);
  for (int d = 0; d < head_dim; d += 2) {
#pragma GCC unroll 8
    for (int p = 0; fetches && p < parts; p++) coming.fetch();
#pragma GCC unroll 8
    for (int k = 0; k < 2; k++)
      add_products<count, n>(
          [&](int i) { return set1_wide(queries[first + i][d + k]); },
          [&](int j) {
            const int p = part + j / in_part, lane = j % in_part * kWide;
            if (!pairs) return load_wide(&s.keys[p][d + k][lane]);
            return k ? second_of_pairs(&s.pairs[p][d / 2][lane]) : first_of_pairs(&s.pairs[p][d / 2][lane]);
          },
          total);
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) store(&scores[(first + i) * s.stride + part * kLanes + j * kWide], total[i][j]);
  if (fetches) s.coming = coming;
}

// Query heads first to last - 1 with `parts` vectors of a tile's slots; scores: where those of the tile begin.
template <bool pairs, int parts>
inline void score_all(const float* const* queries, int first, int last, int head_dim, int part, float* scores, Scratch& s) {
  in_groups<kQueriesAtOnce>(first, last, [&](int i, auto count, auto fetches) {
    score<pairs, count, parts, fetches>(queries, head_dim, part, i, scores, s);
  });
}

template <bool pairs>
inline void score_tile(const float* const* queries, int first, int last, int head_dim, int parts, float* scores, Scratch& s) {
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

template <int count, int parts, bool fetches>
inline void score_codes(int head_dim, int part, int first, float* scores, Scratch& s) {
  Coming coming = fetches ? s.coming : Coming{};
  F sums[count][parts];
#pragma GCC unroll 2
  for (int k = 1; k >= 0; k--) {
    Sums<8> total[count][parts];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
#pragma GCC unroll 8
      for (int p = 0; p < parts; p++) total[i][p].begin(-128 * s.query_sums[k][first + i]);
    for (int d = 0; d < head_dim; d += 4) {
#pragma GCC unroll 8
      for (int p = 0; fetches && p < 2 * parts; p++) coming.fetch();
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
  if (fetches) s.coming = coming;
}

template <int parts>
inline void score_all_codes(int first, int last, int head_dim, int part, float* scores, Scratch& s) {
  in_groups<4>(first, last, [&](int i, auto count, auto fetches) { score_codes<count, parts, fetches>(head_dim, part, i, scores, s); });
}

inline void score_tile_of_codes(int first, int last, int head_dim, int parts, float* scores, Scratch& s) {
  int p = 0;
  for (; p + kPartsAtOnce <= parts; p += kPartsAtOnce) score_all_codes<kPartsAtOnce>(first, last, head_dim, p, scores, s);
  for (; p < parts; p++) score_all_codes<1>(first, last, head_dim, p, scores, s);
}
