// Attention by products of bfloat16, where keys and values are kept as that: queries and weights are rounded to it, sums are float.
// Included inside a namespace, after together.h and vec_bf16.h.

// `count` query heads with `parts` vectors of slots, whose keys s.pairs holds.
template <int count, int parts, bool fetches>
inline void score_dots(int head_dim, int part, int first, float* scores, Scratch& s) {
  Coming coming = fetches ? s.coming : Coming{};
  F total[count][parts];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) total[i][p] = set1(0.0f);
  for (int d = 0; d < head_dim / 2; d++) {
#pragma GCC unroll 8
    for (int p = 0; fetches && p < parts; p++) coming.fetch();
    W keys[parts];
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) keys[p] = load_words(s.pairs[part + p][d]);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const W query = word(s.query_words[first + i][d]);
#pragma GCC unroll 8
      for (int p = 0; p < parts; p++) total[i][p] = dots(query, keys[p], total[i][p]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) store(scores + (first + i) * s.stride + (part + p) * kLanes, total[i][p]);
  if (fetches) s.coming = coming;
}

// Query heads first to last - 1 with a tile's slots; scores: where those of the tile begin.
template <int parts>
inline void score_all_dots(int first, int last, int head_dim, int part, float* scores, Scratch& s) {
  in_groups<8>(first, last, [&](int i, auto count, auto fetches) { score_dots<count, parts, fetches>(head_dim, part, i, scores, s); });
}

// Outputs d and on of `count` query heads. values(j, d): those of slots 2 j and 2 j + 1, 16 of each.
template <int count, int vectors, bool fetches, typename Values>
inline void weigh_dots(const Values& values, int d, int first, int pairs, Scratch& s) {
  Coming coming = fetches ? s.coming : Coming{};
  F total[count][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) total[i][v] = load(&s.outputs[first + i][d + v * kLanes]);
  for (int j = 0; j < pairs; j++) {
#pragma GCC unroll 8
    for (int v = 0; fetches && v < vectors; v++) coming.fetch();
    W both[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) both[v] = values(j, d + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const W weight = word(s.weight_words[first + i][j]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) total[i][v] = dots(weight, both[v], total[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) store(&s.outputs[first + i][d + v * kLanes], total[i][v]);
  if (fetches) s.coming = coming;
}

template <typename Values>
inline void weigh_all_dots(const Values& values, int first, int last, int head_dim, int pairs, Scratch& s) {
  in_groups<4>(first, last, [&](int i, auto count, auto fetches) {
    int d = 0;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) weigh_dots<count, 4, fetches>(values, d, i, pairs, s);
    for (; d < head_dim; d += 2 * kLanes) weigh_dots<count, 2, fetches>(values, d, i, pairs, s);
  });
}

template <>
struct Dots<Bf16> {
  static constexpr bool are_there = true;

  static void round_query(const float* query, int head_dim, int i, Scratch& s) {
    for (int d = 0; d < head_dim; d += kGroup) store_words(&s.query_words[i][d / 2], words(query + d));
  }

  // The keys are in s.pairs; scores: where those of the tile begin.
  static void score_tile(int first, int last, int head_dim, int parts, float* scores, Scratch& s) {
    if (parts == kTile / kLanes) return score_all_dots<kTile / kLanes>(first, last, head_dim, 0, scores, s);
    for (int p = 0; p < parts; p++) score_all_dots<1>(first, last, head_dim, p, scores, s);
  }

  // rows: where the values of `slots` slots lie. weights: the tile's, of query head 0; those past its slots are 0.
  static void weigh_tile(const Bf16** rows, int first, int last, int head_dim, int slots, const float* weights, Scratch& s) {
    alignas(64) static constexpr Bf16 nothing[kMaxHeadDim] = {};
    if (slots % 2) rows[slots] = nothing;
    const int pairs = (slots + 1) / 2;
    for (int i = first; i < last; i++) store_words(s.weight_words[i], words(weights + i * s.stride));
    const auto paired = [&](int j, int d) { return words(rows[2 * j] + d, rows[2 * j + 1] + d); };
    if (last - first <= 4) return weigh_all_dots(paired, first, last, head_dim, pairs, s);  // they are read only once
    for (int j = 0; j < pairs; j++)
      for (int d = 0; d < head_dim; d += kLanes) store_words(s.value_words + j * head_dim + d, paired(j, d));
    weigh_all_dots([&](int j, int d) { return load_words(s.value_words + j * head_dim + d); }, first, last, head_dim, pairs, s);
  }
};
