// Attention over paged slots: of a few rows of a sequence first all scores, then the softmax, then the weighted values, by
// tiles. Included inside a namespace, after plan.h, scores.h, values.h and linear.h.

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
