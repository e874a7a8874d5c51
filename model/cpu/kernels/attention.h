// Attention over paged slots: tiles of query heads of one KV head, and of kTile slots, with a running softmax
// (arXiv 1805.02867). Keys and values are read where they lie. Included inside a namespace, after the vectors.

constexpr int kTile = 32;         // slots
constexpr int kMaxQueries = 32;   // query heads in a tile
constexpr int kMaxHeadDim = 256;
constexpr float kHidden = -1e30f;

inline F exp(F x) {  // to 2 ulp for x <= 0, the only ones that softmax and SiLU need; 0 far below
  const F clamped = max(x, set1(-87.0f));
  const F n = round(clamped * set1(1.44269504f));
  F r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p * r, r, r) + set1(1.0f);
  return times_power_of_2(p, n);
}

inline F silu(F x) {
  const F e = exp(set1(0.0f) - abs(x));  // of -|x|: 1 / (1 + e) for x >= 0, e / (1 + e) below
  return if_negative(x, x * e, x) / (set1(1.0f) + e);
}

// A layer of the cache: of each slot the keys of all KV heads, then their values. Codes have a scale for each of these.
template <typename Value>
struct Kv {
  Value* data;
  float* scales;
};

struct Scratch {  // one thread's
  alignas(64) float keys[kTile / kLanes][kMaxHeadDim][kLanes];
  alignas(64) float values[kTile * kMaxHeadDim];  // [kTile][head_dim]: as close as they go
  alignas(64) float scores[kMaxQueries][kTile];
  alignas(64) float outputs[kMaxQueries][kMaxHeadDim];
  float most[kMaxQueries], total[kMaxQueries];
  alignas(64) uint32_t pairs[kTile / kLanes][kMaxHeadDim / 2][kLanes];  // keys in bfloat16, two dimensions in a word
  // Of keys that are codes: the codes plus 128, four dimensions in a word, and the scales; and queries as whole numbers:
  // a query is its scale times (first codes + second codes / 254).
  alignas(64) uint8_t codes[kTile / kLanes][kMaxHeadDim / 4][4 * kLanes];
  alignas(64) float key_scales[kTile], value_scales[kTile];
  alignas(64) int8_t query_codes[2][kMaxQueries][kMaxHeadDim];
  int32_t query_sums[2][kMaxQueries];
  float query_scales[kMaxQueries];
};

// Some new slots of one sequence. first_slot: where first_row lies in its sequence; context: where the list of the
// sequence's slots in the cache begins.
struct AttentionTile {
  int64_t first_row, rows, first_slot, context;
};

struct AttentionPlan {  // the same for all layers
  std::vector<AttentionTile> tiles;
  std::vector<int64_t> slots;

  AttentionPlan(const Geometry& g, const Batch& batch) {
    const int64_t most = std::max<int64_t>(kMaxQueries / (g.heads / g.kv_heads), 1);
    int64_t row = 0;
    for (int64_t i = 0; i < batch.sequences; i++) {
      const int64_t queries = batch.query_slots[i], end = batch.context_slots[i];
      for (int64_t done = 0; done < queries; done += most) {
        const int64_t rows = std::min(most, queries - done);
        tiles.push_back({row + done, rows, end - queries + done, static_cast<int64_t>(slots.size())});
      }
      row += queries;
      const int64_t* block = batch.block_tables + i * batch.table_width;
      for (int64_t slot = 0; slot < end; block++)
        for (int64_t at = 0; at < batch.block_size && slot < end; at++, slot++) slots.push_back(*block * batch.block_size + at);
    }
  }
};

constexpr int kFewQueries = 12;  // heads, for which bfloat16 is not kept as float: it is read only once
constexpr int kPartsAtOnce = kRowsAtOnce / 4;  // vectors of slots, as registers allow

inline void transpose_keys(const Bf16* const* rows, int head_dim, int count, Scratch& s, int part) {
  for (int d = 0; d < head_dim; d += 32) {
    const uint32_t* words[kLanes];
    for (int j = 0; j < kLanes; j++) words[j] = reinterpret_cast<const uint32_t*>(rows[j] + d);
    transpose(words, s.pairs[part][d / 2]);
  }
  for (int d = 0; count > kFewQueries && d < head_dim; d += 2) {
    const auto [first, second] = split_pairs(s.pairs[part][d / 2]);
    store(s.keys[part][d], first);
    store(s.keys[part][d + 1], second);
  }
}

inline void transpose_keys(const float* const* rows, int head_dim, int, Scratch& s, int part) {
  for (int d = 0; d < head_dim; d += kLanes) {
    const uint32_t* words[kLanes];
    for (int j = 0; j < kLanes; j++) words[j] = reinterpret_cast<const uint32_t*>(rows[j] + d);
    transpose(words, reinterpret_cast<uint32_t*>(s.keys[part][d]));
  }
}

// `count` query heads with `parts` vectors of slots.
template <bool pairs, int count, int parts>
inline void score(const float* const* queries, int head_dim, int part, int first, Scratch& s) {
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
    for (int p = 0; p < parts; p++) store(&s.scores[first + i][(part + p) * kLanes], total[i][p]);
}

template <bool pairs, int parts>
inline void score_all(const float* const* queries, int count, int head_dim, int part, Scratch& s) {
  int i = 0;
  for (; i + 4 <= count; i += 4) score<pairs, 4, parts>(queries, head_dim, part, i, s);
  if (count - i == 3) score<pairs, 3, parts>(queries, head_dim, part, i, s);
  if (count - i == 2) score<pairs, 2, parts>(queries, head_dim, part, i, s);
  if (count - i == 1) score<pairs, 1, parts>(queries, head_dim, part, i, s);
}

template <bool pairs>
inline void score_tile(const float* const* queries, int count, int head_dim, int parts, Scratch& s) {
  int p = 0;
  for (; p + kPartsAtOnce <= parts; p += kPartsAtOnce) score_all<pairs, kPartsAtOnce>(queries, count, head_dim, p, s);
  for (; p < parts; p++) score_all<pairs, 1>(queries, count, head_dim, p, s);
}

inline void transpose_keys(const Int8* const* rows, int head_dim, int, Scratch& s, int part) {
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
inline void score_codes(int head_dim, int part, int first, Scratch& s) {
  F scores[count][parts];
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
        for (int p = 0; p < parts; p++) total[i][p].add(keys[p], &s.query_codes[k][first + i][d]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
#pragma GCC unroll 8
      for (int p = 0; p < parts; p++) {
        const F whole = to_float(total[i][p].all());
        scores[i][p] = k ? whole * set1(1.0f / 254.0f) : scores[i][p] + whole;
      }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) {
      const F scale = load(&s.key_scales[(part + p) * kLanes]) * set1(s.query_scales[first + i]);
      store(&s.scores[first + i][(part + p) * kLanes], scores[i][p] * scale);
    }
}

template <int parts>
inline void score_all_codes(int count, int head_dim, int part, Scratch& s) {
  int i = 0;
  for (; i + 4 <= count; i += 4) score_codes<4, parts>(head_dim, part, i, s);
  if (count - i == 3) score_codes<3, parts>(head_dim, part, i, s);
  if (count - i == 2) score_codes<2, parts>(head_dim, part, i, s);
  if (count - i == 1) score_codes<1, parts>(head_dim, part, i, s);
}

inline void score_tile_of_codes(int count, int head_dim, int parts, Scratch& s) {
  int p = 0;
  for (; p + kPartsAtOnce <= parts; p += kPartsAtOnce) score_all_codes<kPartsAtOnce>(count, head_dim, p, s);
  for (; p < parts; p++) score_all_codes<1>(count, head_dim, p, s);
}

// value(j): where the values of slot j lie.
template <int count, typename Place>
inline void weigh(const Place& value, int head_dim, int first, int slots, Scratch& s) {
  for (int d = 0; d < head_dim; d += 2 * kLanes) {
    F a[count], b[count];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) a[i] = load(&s.outputs[first + i][d]), b[i] = load(&s.outputs[first + i][d + kLanes]);
    for (int j = 0; j < slots; j++) {
      const F low = load(value(j) + d), high = load(value(j) + d + kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < count; i++) {
        const F weight = set1(s.scores[first + i][j]);
        a[i] = fma(weight, low, a[i]);
        b[i] = fma(weight, high, b[i]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) store(&s.outputs[first + i][d], a[i]), store(&s.outputs[first + i][d + kLanes], b[i]);
  }
}

template <typename Place>
inline void weigh_all(const Place& value, int count, int head_dim, int slots, Scratch& s) {
  int i = 0;
  for (; i + 4 <= count; i += 4) weigh<4>(value, head_dim, i, slots, s);
  if (count - i == 3) weigh<3>(value, head_dim, i, slots, s);
  if (count - i == 2) weigh<2>(value, head_dim, i, slots, s);
  if (count - i == 1) weigh<1>(value, head_dim, i, slots, s);
}

// Scores of one query head over slots start .. start + kTile - 1 become weights; what was gathered before is rescaled.
// all: it sees all of them.
template <bool all>
inline void soften(int query, int head_dim, float scale, int64_t start, int64_t from, int64_t until, Scratch& s) {
  const auto seen = [&](int p, F yes, float no) {
    if (all) return yes;
    const int64_t base = start + p * kLanes;
    const int first = static_cast<int>(std::min<int64_t>(std::max<int64_t>(from - base, 0), kLanes));
    const int last = static_cast<int>(std::min<int64_t>(std::max<int64_t>(until - base, 0), kLanes));
    return between(first, last, yes, set1(no));
  };
  F parts[kTile / kLanes];
  F most = set1(kHidden);
#pragma GCC unroll 8
  for (int p = 0; p < kTile / kLanes; p++) {
    parts[p] = seen(p, load(&s.scores[query][p * kLanes]) * set1(scale), kHidden);
    most = max(most, parts[p]);
  }
  const float before = s.most[query], now = std::max(before, largest(most));
  F total = set1(0.0f);
#pragma GCC unroll 8
  for (int p = 0; p < kTile / kLanes; p++) {
    // A tile in which nothing is seen, before any that is: weights of 0.
    const F weight = seen(p, now <= kHidden ? set1(0.0f) : exp(parts[p] - set1(now)), 0.0f);
    store(&s.scores[query][p * kLanes], weight);
    total = total + weight;
  }
  const float kept = now > before ? std::exp(before - now) : 1.0f;
  s.most[query] = now;
  s.total[query] = s.total[query] * kept + sum(total);
  if (kept == 1.0f) return;
  for (int d = 0; d < head_dim; d += kLanes) store(&s.outputs[query][d], load(&s.outputs[query][d]) * set1(kept));
}

// One tile and one KV head -> inputs [T, heads * head_dim].
template <typename Value>
void attend(const Geometry& g, const Kv<Value>& kv, const int64_t* slots_of, const AttentionTile& tile, int kv_head, int window,
            const float* qkv, int64_t width, const Inputs& out, Scratch& s) {
  constexpr bool pairs = std::is_same_v<Value, Bf16>, codes = std::is_same_v<Value, Int8>;
  const int head_dim = g.head_dim, each = g.heads / g.kv_heads, count = static_cast<int>(tile.rows) * each;
  const float* queries[kMaxQueries];
  for (int i = 0; i < count; i++) {
    queries[i] = qkv + (tile.first_row + i / each) * width + (kv_head * each + i % each) * head_dim;
    s.most[i] = kHidden;
    s.total[i] = 0;
    if constexpr (codes) round_query(queries[i], head_dim, i, s);
    std::memset(s.outputs[i], 0, sizeof(float) * head_dim);
  }
  const auto seen_from = [&](int64_t slot) { return window ? std::max<int64_t>(slot - window + 1, 0) : 0; };
  const int64_t* slot_at = slots_of + tile.context;
  const int64_t end = tile.first_slot + tile.rows, stride = 2 * g.kv_heads * head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const auto place = [&](int64_t slot) { return kv.data + slot_at[slot] * stride + kv_head * head_dim; };
  const int64_t first_tile = seen_from(tile.first_slot) / kTile * kTile;
  for (int64_t start = first_tile; start < end; start += kTile) {
    const int slots = static_cast<int>(std::min<int64_t>(end - start, kTile));
    const Value* rows[kTile];
    for (int j = 0; j < kTile; j++) {
      const int64_t slot = start + std::min(j, slots - 1);  // past the end the last slot again: its scores are hidden
      rows[j] = place(slot);
      if constexpr (codes) {
        const float* const scales = kv.scales + slot_at[slot] * 2 * g.kv_heads + kv_head;
        s.key_scales[j] = scales[0], s.value_scales[j] = scales[g.kv_heads];
      }
      if (start + kTile + j < end) {  // the next tile's, which lie scattered
        const Value* next = place(start + kTile + j);
        prefetch(next, head_dim);
        prefetch(next + g.kv_heads * head_dim, head_dim);
      }
    }
    if (start == first_tile)
      for (int j = 0; j < slots; j++) prefetch(rows[j] + g.kv_heads * head_dim, head_dim);
    const int parts = (slots + kLanes - 1) / kLanes;
    for (int p = 0; p < kTile / kLanes; p++) {
      if (p < parts) transpose_keys(rows + p * kLanes, head_dim, count, s, p);
    }
    if constexpr (codes) score_tile_of_codes(count, head_dim, parts, s);
    else if (pairs && count <= kFewQueries) score_tile<pairs>(queries, count, head_dim, parts, s);
    else score_tile<false>(queries, count, head_dim, parts, s);
    for (int i = 0; i < count; i++) {
      const int64_t slot = tile.first_slot + i / each, from = seen_from(slot);
      if (from <= start && start + kTile <= slot + 1) soften<true>(i, head_dim, scale, start, from, slot + 1, s);
      else soften<false>(i, head_dim, scale, start, from, slot + 1, s);
      for (int p = 0; codes && p < kTile; p += kLanes) store(&s.scores[i][p], load(&s.scores[i][p]) * load(&s.value_scales[p]));
    }
    const auto value = [&](int j) { return rows[j] + g.kv_heads * head_dim; };
    if (count <= kFewQueries) {
      weigh_all(value, count, head_dim, slots, s);
      continue;
    }
    for (int j = 0; j < slots; j++)
      for (int d = 0; d < head_dim; d += kLanes) store(s.values + j * head_dim + d, load(value(j) + d));
    weigh_all([&](int j) { return s.values + j * head_dim; }, count, head_dim, slots, s);
  }
  for (int i = 0; i < count; i++) {
    const int64_t group = ((tile.first_row + i / each) * g.heads + kv_head * each + i % each) * head_dim / kGroup;
    const F inverse = set1(1.0f / s.total[i]);
    for (int d = 0; d < head_dim; d += kGroup)
      quantize(out, group + d / kGroup, load(&s.outputs[i][d]) * inverse, load(&s.outputs[i][d + kLanes]) * inverse);
  }
}
