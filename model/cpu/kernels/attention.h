// Attention over paged slots: of a few rows of a sequence first all scores, then the softmax, then the weighted values, by
// tiles of kTile slots, which are read where they lie. Included inside a namespace, after the vectors.

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

inline F times_sigmoid(F x, F of) {
  const F e = exp(set1(0.0f) - abs(of));  // of -|of|: 1 / (1 + e) for of >= 0, e / (1 + e) below
  return if_negative(of, x * e, x) / (set1(1.0f) + e);
}
inline F silu(F x) { return times_sigmoid(x, x); }
// By its tanh form: (1 + tanh y) / 2 is the sigmoid of 2 y.
inline F gelu(F x) { return times_sigmoid(x, x * fma(x * x, set1(0.0713548128f), set1(1.5957691216f))); }

// A layer of the cache: of each slot the keys of all KV heads, then their values. Codes have a scale for each of these.
template <typename Value>
struct Kv {
  Value* data;
  float* scales;
};

struct Scratch {  // one thread's
  alignas(64) float keys[kTile / kLanes][kMaxHeadDim][kLanes];
  alignas(64) float values[kTile * kMaxHeadDim];  // [kTile][head_dim]: as close as they go
  alignas(64) float outputs[kMaxQueries][kMaxHeadDim];
  float total[kMaxQueries];
  std::vector<float> scores;  // [query heads, slots to whole tiles], then weights
  int64_t stride;             // of these rows
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

// What a thread does in one go: some KV heads of a tile, of each of which some query heads, [rows, query heads of a KV head].
struct AttentionPiece {
  AttentionTile tile;
  int first_head, last_head, first_query, last_query;
};

constexpr int kFewPieces = 4;  // a thread

struct AttentionPlan {  // the same for all layers
  std::vector<AttentionPiece> pieces;
  std::vector<int64_t> slots;

  // A slot's heads lie side by side, so all of them at once are read as one stream; head by head there is more to share
  // out. What comes out is the same.
  AttentionPlan(const Geometry& g, const Batch& batch, int threads) {
    const int64_t most = std::max<int64_t>(kMaxQueries / (g.heads / g.kv_heads), 1);
    int64_t row = 0, longest = 0, total = 0;
    for (int64_t i = 0; i < batch.sequences; i++) {
      longest = std::max(longest, batch.context_slots[i]);
      total += batch.context_slots[i];
    }
    const bool many = total >= 2 * threads * longest;
    for (int64_t i = 0; i < batch.sequences; i++) {
      const int64_t queries = batch.query_slots[i], end = batch.context_slots[i];
      const bool at_once = many && queries * g.heads <= kMaxQueries;
      for (int64_t done = 0; done < queries; done += most) {
        const int64_t rows = std::min(most, queries - done);
        const AttentionTile tile = {row + done, rows, end - queries + done, static_cast<int64_t>(slots.size())};
        for (int head = 0; head < g.kv_heads; head += at_once ? g.kv_heads : 1)
          pieces.push_back({tile, head, at_once ? g.kv_heads : head + 1, 0, static_cast<int>(rows) * (g.heads / g.kv_heads)});
      }
      row += queries;
      const int64_t* block = batch.block_tables + i * batch.table_width;
      for (int64_t slot = 0; slot < end; block++)
        for (int64_t at = 0; at < batch.block_size && slot < end; at++, slot++) slots.push_back(*block * batch.block_size + at);
    }
    if (!many && longest > kTile) share_last(threads);
  }

 private:
  // Pieces that are left when each thread has had as many as the others are cut into query heads for all: their keys are then read
  // several times, but no thread waits for another's whole piece.
  void share_last(int threads) {
    const auto number = static_cast<int>(pieces.size()), left = number % threads;
    if (!left || number > kFewPieces * threads) return;
    const std::vector<AttentionPiece> whole(pieces.end() - left, pieces.end());
    pieces.resize(number - left);
    for (const AttentionPiece& piece : whole) {
      const int parts = std::min(threads / left, piece.last_query);
      for (int i = 0; i < parts; i++) {
        pieces.push_back(piece);
        pieces.back().first_query = piece.last_query * i / parts;
        pieces.back().last_query = piece.last_query * (i + 1) / parts;
      }
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

constexpr int kVectorsAtOnce = kRowsAtOnce / 2;  // of an output, as registers allow

// Outputs d and on of `count` query heads. value(j): where the values of slot j lie; weights: the tile's, of the first of them.
template <int count, int vectors, typename Place>
inline void weigh(const Place& value, int d, int first, int slots, const float* weights, Scratch& s) {
  F total[count][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) total[i][v] = load(&s.outputs[first + i][d + v * kLanes]);
  for (int j = 0; j < slots; j++) {
    F values[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) values[v] = load(value(j) + d + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const F weight = set1(weights[i * s.stride + j]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) total[i][v] = fma(weight, values[v], total[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) store(&s.outputs[first + i][d + v * kLanes], total[i][v]);
}

template <int count, typename Place>
inline void weigh_head(const Place& value, int head_dim, int first, int slots, const float* weights, Scratch& s) {
  int d = 0;
  for (; d + kVectorsAtOnce * kLanes <= head_dim; d += kVectorsAtOnce * kLanes)
    weigh<count, kVectorsAtOnce>(value, d, first, slots, weights, s);
  for (; d < head_dim; d += 2 * kLanes) weigh<count, 2>(value, d, first, slots, weights, s);
}

// weights: the tile's, of query head 0.
template <typename Place>
inline void weigh_all(const Place& value, int i, int last, int head_dim, int slots, const float* weights, Scratch& s) {
  const auto of = [&](int query) { return weights + query * s.stride; };
  for (; i + 4 <= last; i += 4) weigh_head<4>(value, head_dim, i, slots, of(i), s);
  if (last - i == 3) weigh_head<3>(value, head_dim, i, slots, of(i), s);
  if (last - i == 2) weigh_head<2>(value, head_dim, i, slots, of(i), s);
  if (last - i == 1) weigh_head<1>(value, head_dim, i, slots, of(i), s);
}

// A query head's scores become weights, of which this is the sum: it sees slots from .. until - 1 of `slots`, whole vectors.
// A vector's sum is the same wherever a row's first slots are, so it does not depend on the rows beside.
inline float soften(float* scores, int64_t slots, int64_t from, int64_t until, float scale) {
  const int64_t first = from / kLanes * kLanes, last = (until - 1) / kLanes * kLanes;
  const auto hide = [&](int64_t at, float hidden) {
    const int begin = static_cast<int>(std::max<int64_t>(from - at, 0)), end = static_cast<int>(std::min<int64_t>(until - at, kLanes));
    store(scores + at, between(begin, end, load(scores + at), set1(hidden)));
  };
  hide(first, kHidden);
  hide(last, kHidden);
  F most = set1(kHidden);
  for (int64_t at = first; at <= last; at += kLanes) most = max(most, load(scores + at));
  const F factor = set1(scale), top = set1(largest(most) * scale);
  for (int64_t at = first; at <= last; at += kLanes) store(scores + at, exp(load(scores + at) * factor - top));
  hide(first, 0.0f);
  hide(last, 0.0f);
  F total = set1(0.0f);
  for (int64_t at = first; at <= last; at += kLanes) total = total + load(scores + at);
  std::fill(scores, scores + first, 0.0f);
  std::fill(scores + last + kLanes, scores + slots, 0.0f);
  return sum(total);
}

// The order in which a piece reads its tiles: all keys, all values, then the next piece's keys. The next tile in it is fetched
// while one is computed; two tiles ahead would drive out of the nearest cache what is computed with.
template <typename Value>
struct Ahead {
  const Value* data;
  int64_t stride;  // of slots
  int head_dim, kv_heads;
  const int64_t* slots;
  int64_t base, end, tiles;
  int first_head;
  const AttentionPiece* next;
  const int64_t* slots_of;
  int64_t next_base;

  // Of one KV head of the tile at this place of the order.
  __attribute__((always_inline)) void fetch(int64_t tile, int head) const {
    if (tile < tiles) return fetch(slots, base + tile * kTile, end, head);
    if (tile < 2 * tiles) return fetch(slots, base + (tile - tiles) * kTile, end, kv_heads + head);
    if (!next || next->first_head + head - first_head >= next->last_head) return;
    fetch(slots_of + next->tile.context, next_base + (tile - 2 * tiles) * kTile, next->tile.first_slot + next->tile.rows,
          next->first_head + head - first_head);
  }
  __attribute__((always_inline)) void fetch(const int64_t* of, int64_t start, int64_t last, int part) const {
    for (int64_t slot = start; slot < std::min(start + kTile, last); slot++)
      prefetch(data + of[slot] * stride + part * head_dim, head_dim);
  }
};

// A piece -> inputs [T, heads * head_dim]. next: the piece that this thread does after it, or null.
template <typename Value>
void attend(const Geometry& g, const Kv<Value>& kv, const int64_t* slots_of, const AttentionPiece& piece, const AttentionPiece* next,
            int window, const float* qkv, int64_t width, const Inputs& out, Scratch& s) {
  constexpr bool pairs = std::is_same_v<Value, Bf16>, codes = std::is_same_v<Value, Int8>;
  const AttentionTile& tile = piece.tile;
  const int head_dim = g.head_dim, each = g.heads / g.kv_heads, count = piece.last_query - piece.first_query;
  const int all = (piece.last_head - piece.first_head) * count;  // `count` query heads of each KV head
  const auto query_head = [&](int i) { return (piece.first_head + i / count) * each + (piece.first_query + i % count) % each; };
  const auto row_of = [&](int i) { return (piece.first_query + i % count) / each; };
  const auto seen_from = [&](int64_t slot) { return window ? std::max<int64_t>(slot - window + 1, 0) : 0; };
  const int64_t base = seen_from(tile.first_slot) / kTile * kTile, end = tile.first_slot + tile.rows;
  s.stride = (end - base + kTile - 1) / kTile * kTile;
  if (static_cast<int64_t>(s.scores.size()) < all * s.stride) s.scores.resize(all * s.stride);
  const float* queries[kMaxQueries];
  for (int i = 0; i < all; i++) {
    queries[i] = qkv + (tile.first_row + row_of(i)) * width + query_head(i) * head_dim;
    if constexpr (codes) round_query(queries[i], head_dim, i, s);
    std::memset(s.outputs[i], 0, sizeof(float) * head_dim);
  }
  const int64_t* const slot_at = slots_of + tile.context;
  const int64_t stride = 2 * g.kv_heads * head_dim;
  // Where the keys (part 0) or values (1) of a slot and KV head lie, and their scales.
  const auto place = [&](int64_t slot, int head, int part) {
    return kv.data + slot_at[slot] * stride + (part * g.kv_heads + head) * head_dim;
  };
  const auto scale_of = [&](int64_t slot, int head, int part) {
    return kv.scales[slot_at[slot] * 2 * g.kv_heads + part * g.kv_heads + head];
  };
  const int64_t tiles = s.stride / kTile;
  const Ahead<Value> ahead = {kv.data, stride, head_dim, g.kv_heads, slot_at, base, end, tiles, piece.first_head, next, slots_of,
                              next ? seen_from(next->tile.first_slot) / kTile * kTile : 0};

  for (int64_t start = base; start < end; start += kTile) {
    const int slots = static_cast<int>(std::min<int64_t>(end - start, kTile)), parts = (slots + kLanes - 1) / kLanes;
    float* const scores = s.scores.data() + (start - base);
    for (int head = piece.first_head; head < piece.last_head; head++) {
      const int first = (head - piece.first_head) * count, last = first + count;
      const Value* rows[kTile];
      for (int j = 0; j < kTile; j++) {
        const int64_t slot = start + std::min(j, slots - 1);  // past the end the last slot again: its scores are hidden
        rows[j] = place(slot, head, 0);
        if constexpr (codes) s.key_scales[j] = scale_of(slot, head, 0);
      }
      ahead.fetch((start - base) / kTile + 1, head);
      for (int p = 0; p < parts; p++) transpose_keys(rows + p * kLanes, head_dim, count, s, p);
      if constexpr (codes) score_tile_of_codes(first, last, head_dim, parts, scores, s);
      else if (pairs && count <= kFewQueries) score_tile<pairs>(queries, first, last, head_dim, parts, scores, s);
      else score_tile<false>(queries, first, last, head_dim, parts, scores, s);
    }
  }

  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (int i = 0; i < all; i++) {
    const int64_t slot = tile.first_slot + row_of(i);
    s.total[i] = soften(s.scores.data() + i * s.stride, s.stride, seen_from(slot) - base, slot + 1 - base, scale);
  }

  for (int64_t start = base; start < end; start += kTile) {
    const int slots = static_cast<int>(std::min<int64_t>(end - start, kTile));
    float* const weights = s.scores.data() + (start - base);
    for (int head = piece.first_head; head < piece.last_head; head++) {
      const int first = (head - piece.first_head) * count, last = first + count;
      const Value* rows[kTile];
      for (int j = 0; j < slots; j++) rows[j] = place(start + j, head, 1);
      ahead.fetch(tiles + (start - base) / kTile + 1, head);
      if constexpr (codes) {
        for (int j = 0; j < kTile; j++) s.value_scales[j] = j < slots ? scale_of(start + j, head, 1) : 0.0f;
        for (int i = first; i < last; i++) {
          float* const of = weights + i * s.stride;
          for (int p = 0; p < kTile; p += kLanes) store(of + p, load(of + p) * load(&s.value_scales[p]));
        }
      }
      if (count <= kFewQueries) {
        weigh_all([&](int j) { return rows[j]; }, first, last, head_dim, slots, weights, s);
        continue;
      }
      for (int j = 0; j < slots; j++)
        for (int d = 0; d < head_dim; d += kLanes) store(s.values + j * head_dim + d, load(rows[j] + d));
      weigh_all([&](int j) { return s.values + j * head_dim; }, first, last, head_dim, slots, weights, s);
    }
  }
  for (int i = 0; i < all; i++) {
    const int64_t group = ((tile.first_row + row_of(i)) * g.heads + query_head(i)) * head_dim / kGroup;
    const F inverse = set1(1.0f / s.total[i]);
    for (int d = 0; d < head_dim; d += kGroup)
      quantize(out, group + d / kGroup, load(&s.outputs[i][d]) * inverse, load(&s.outputs[i][d + kLanes]) * inverse);
  }
}
