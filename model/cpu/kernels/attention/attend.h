// Attention over paged slots: of a few rows of a sequence first all scores, then the softmax, then the weighted values, by
// tiles. Included inside a namespace, after plan.h, scores.h, values.h and linear.h.

// Of some slots the values of a KV head, or its keys.
template <typename Value>
inline Coming coming_of(const Value* first, int64_t stride, int head_dim, const int64_t* slot, const int64_t* end) {
  constexpr int64_t size = sizeof(Value);
  return {reinterpret_cast<const char*>(first), stride * size, head_dim * size, kGroup * size, slot, std::max(slot, end), 0};
}

// The order in which a piece reads its tiles: all keys, all values, then the next piece's keys; of each tile one KV head after the
// other. What is fetched while a KV head's tile is computed with: bit by bit the next head's, else the same head's of the next tile.
// More would drive out of the nearest cache what is computed with.
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
  Coming coming(int64_t tile, int head) const {
    if (tile < tiles) return coming(slots, base + tile * kTile, end, head);
    if (tile < 2 * tiles) return coming(slots, base + (tile - tiles) * kTile, end, kv_heads + head);
    if (!next || next->first_head + head - first_head >= next->last_head) return {};
    return coming(slots_of + next->tile.context, next_base + (tile - 2 * tiles) * kTile, next->tile.first_slot + next->tile.rows,
                  next->first_head + head - first_head);
  }
  Coming coming(const int64_t* of, int64_t start, int64_t last, int part) const {
    return coming_of(data + part * head_dim, stride, head_dim, of + start, of + std::min(start + kTile, last));
  }
};

// A piece of a layer -> inputs [T, heads * head_dim]. next: the piece that this thread does after it, or null.
template <typename Value>
void attend(const Geometry& g, const Pool<Value>& pool, int64_t layer, const AttentionPlan& plan, const AttentionPiece& piece,
            const AttentionPiece* next, int window, const float* qkv, int64_t width, const Inputs& out, Scratch& s) {
  constexpr bool pairs = std::is_same_v<Value, Bf16>, codes = std::is_same_v<Value, Int8>, dots = Dots<Value>::are_there;
  const AttentionTile& tile = piece.tile;
  const int head_dim = g.head_dim, each = g.heads / g.kv_heads, count = piece.last_query - piece.first_query;
  const int all = (piece.last_head - piece.first_head) * count;  // `count` query heads of each KV head
  const auto query_head = [&](int i) { return (piece.first_head + i / count) * each + (piece.first_query + i % count) % each; };
  const auto row_of = [&](int i) { return (piece.first_query + i % count) / each; };
  const auto seen_from = [&](int64_t slot) { return window ? std::max<int64_t>(slot - window + 1, 0) : 0; };
  const auto to_tiles = [](int64_t slots) { return (slots + kTile - 1) / kTile * kTile; };
  const int64_t base = seen_from(tile.first_slot) / kTile * kTile, end = tile.first_slot + tile.rows, borrowed = to_tiles(tile.lent);
  // Of a KV head: whose places it borrows; their scores come first, in tiles of their own.
  const auto number_of = [&](int head) { return tile.lent ? lenders_of(*plan.places, layer * g.kv_heads + head) : 0; };
  const auto lends = [&](int head) { return tile.lent && plan.places->lends[layer * g.kv_heads + head]; };
  int64_t most = 0;
  for (int head = piece.first_head; head < piece.last_head; head++) most = std::max(most, number_of(head));
  s.stride = most * borrowed + to_tiles(end - base);
  if (static_cast<int64_t>(s.scores.size()) < all * s.stride) s.scores.resize(all * s.stride);
  const float* queries[kMaxQueries];
  for (int i = 0; i < all; i++) {
    queries[i] = qkv + (tile.first_row + row_of(i)) * width + query_head(i) * head_dim;
    if constexpr (codes) round_query(queries[i], head_dim, i, s);
    if constexpr (dots) Dots<Value>::round_query(queries[i], head_dim, i, s);
    std::memset(s.outputs[i], 0, sizeof(float) * head_dim);
  }
  const Kv<Value> kv = pool.layer(layer);
  const int64_t* const slot_at = plan.slots.data() + tile.context;
  const int64_t stride = 2 * g.kv_heads * head_dim;
  const Ahead<Value> ahead = {kv.data, stride, head_dim, g.kv_heads, slot_at, base, end, to_tiles(end - base) / kTile, piece.first_head, next,
                              plan.slots.data(), next ? seen_from(next->tile.first_slot) / kTile * kTile : 0};
  // Query heads of a KV head with the keys of some slots, which lie in `of` as those of head `there`.
  const auto score_slots = [&](int head, const Kv<Value>& of, int there, const int64_t* slots_at, int slots, float* scores) {
    const int first = (head - piece.first_head) * count, last = first + count, parts = (slots + kLanes - 1) / kLanes;
    const Value* rows[kTile];
    for (int j = 0; j < kTile; j++) {
      const int64_t slot = slots_at[std::min(j, slots - 1)];  // past the end the last slot again: its scores are hidden
      rows[j] = of.data + slot * stride + there * head_dim;
      if constexpr (codes) s.key_scales[j] = of.scales[slot * 2 * g.kv_heads + there];
    }
    for (int p = 0; p < parts; p++) transpose_keys(rows + p * kLanes, head_dim, !dots && count > kFewQueries, s, p);
    if constexpr (codes) score_tile_of_codes(first, last, head_dim, parts, scores, s);
    else if constexpr (dots) Dots<Value>::score_tile(first, last, head_dim, parts, scores, s);
    else if (pairs && count <= kFewQueries) score_tile<pairs>(queries, first, last, head_dim, parts, scores, s);
    else score_tile<false>(queries, first, last, head_dim, parts, scores, s);
  };
  // Their weights with the values of these slots.
  const auto weigh_slots = [&](int head, const Kv<Value>& of, int there, const int64_t* slots_at, int slots, float* weights) {
    const int first = (head - piece.first_head) * count, last = first + count;
    const Value* rows[kTile];
    for (int j = 0; j < slots; j++) rows[j] = of.data + slots_at[j] * stride + (g.kv_heads + there) * head_dim;
    if constexpr (codes) {
      for (int j = 0; j < kTile; j++)
        s.value_scales[j] = j < slots ? of.scales[slots_at[j] * 2 * g.kv_heads + g.kv_heads + there] : 0.0f;
      for (int i = first; i < last; i++) {
        float* const own = weights + i * s.stride;
        for (int p = 0; p < kTile; p += kLanes) store(own + p, load(own + p) * load(&s.value_scales[p]));
      }
    }
    if constexpr (dots) return Dots<Value>::weigh_tile(rows, first, last, head_dim, slots, weights, s);
    if (count <= kFewQueries) return weigh_all([&](int j) { return rows[j]; }, first, last, head_dim, slots, weights, s);
    for (int j = 0; j < slots; j++)
      for (int d = 0; d < head_dim; d += kLanes) store(s.values + j * head_dim + d, load(rows[j] + d));
    weigh_all([&](int j) { return s.values + j * head_dim; }, first, last, head_dim, slots, weights, s);
  };
  // Where places are lent, what a KV head sees: the places that it borrows of each lender, then its own.
  const auto seen_of = [&](int head, int64_t i) -> Seen<Value> {
    if (i < number_of(head)) {
      const int64_t lender = plan.places->lenders[(layer * g.kv_heads + head) * plan.places->most + i];
      return {pool.layer(lender / g.kv_heads), static_cast<int>(lender % g.kv_heads), plan.slots.data() + tile.borrowed, tile.lent};
    }
    if (lends(head)) return {kv, head, plan.slots.data() + tile.rest, end - tile.lent};
    return {kv, head, slot_at, end};
  };
  // Inlined, as a function that only fetches does nothing to a compiler.
  const auto fetch = [&](const Coming& next) __attribute__((always_inline)) {
    if constexpr (kFetchesBits) s.coming = next;
    else
      for (const int64_t* slot = next.slot; slot != next.end; slot++)
        prefetch(reinterpret_cast<const Value*>(next.data) + *slot * stride, head_dim);
  };
  const auto fetch_rest = [&] {
    while (s.coming.slot != s.coming.end) s.coming.fetch();
  };
  const auto fetch_seen = [&](const Seen<Value>& seen, int part, int64_t start) __attribute__((always_inline)) {
    fetch(coming_of(seen.cache.data + (part * g.kv_heads + seen.head) * head_dim, stride, head_dim, seen.slots_at + start,
                    seen.slots_at + std::min(start + kTile, seen.slots)));
  };
  // All that the KV heads see.
  const auto each_tile = [&](int part, const auto& compute) {
    float* const scores = s.scores.data();
    for (int head = piece.first_head; tile.lent && head < piece.last_head; head++)
      for (int64_t i = 0, number = number_of(head); i <= number; i++) {
        const Seen<Value> seen = seen_of(head, i);
        for (int64_t start = 0; start < seen.slots; start += kTile) {
          if (start + kTile < seen.slots) fetch_seen(seen, part, start + kTile);
          else if (i < number) fetch_seen(seen_of(head, i + 1), part, 0);
          else if (head + 1 < piece.last_head) fetch_seen(seen_of(head + 1, 0), part, 0);
          else if (part == 0) fetch_seen(seen_of(piece.first_head, 0), 1, 0);
          compute(head, seen.cache, seen.head, seen.slots_at + start, static_cast<int>(std::min<int64_t>(seen.slots - start, kTile)),
                  scores + i * borrowed + start);
          fetch_rest();
        }
      }
    for (int64_t start = base; !tile.lent && start < end; start += kTile)
      for (int head = piece.first_head; head < piece.last_head; head++) {
        const bool stays = kFetchesBits && head + 1 < piece.last_head;
        const int coming_head = stays ? head + 1 : kFetchesBits ? piece.first_head : head;
        fetch(ahead.coming(part * ahead.tiles + (start - base) / kTile + !stays, coming_head));
        compute(head, kv, head, slot_at + start, static_cast<int>(std::min<int64_t>(end - start, kTile)), scores + start - base);
        fetch_rest();
      }
  };

  each_tile(0, score_slots);
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (int i = 0; i < all; i++) {
    const int head = piece.first_head + i / count;
    const int64_t slot = tile.first_slot + row_of(i), number = number_of(head), before = number * borrowed;
    float* const scores = s.scores.data() + i * s.stride;
    const auto hide = [&](float hidden) {
      for (int64_t n = 0; n < number; n++) std::fill(scores + n * borrowed + tile.lent, scores + (n + 1) * borrowed, hidden);
    };
    hide(kHidden);
    s.total[i] = soften(scores, s.stride, seen_from(slot) - base, before + slot + 1 - base - (lends(head) ? tile.lent : 0), scale);
    hide(0.0f);
  }
  each_tile(1, weigh_slots);

  for (int i = 0; i < all; i++) {
    const int64_t group = ((tile.first_row + row_of(i)) * g.heads + query_head(i)) * head_dim / kGroup;
    const F inverse = set1(1.0f / s.total[i]);
    for (int d = 0; d < head_dim; d += kGroup)
      quantize(out, group + d / kGroup, load(&s.outputs[i][d]) * inverse, load(&s.outputs[i][d + kLanes]) * inverse);
  }
}
