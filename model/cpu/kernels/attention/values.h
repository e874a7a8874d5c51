// Scores become weights, and weights times a tile's values outputs. Included inside a namespace, after scratch.h and functions.h.

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
  const auto seen = [&](int64_t at, F inside, float hidden) {
    if (at != first && at != last) return inside;
    const int begin = static_cast<int>(std::max<int64_t>(from - at, 0)), end = static_cast<int>(std::min<int64_t>(until - at, kLanes));
    return between(begin, end, inside, set1(hidden));
  };
  F most = set1(kHidden);
  for (int64_t at = first; at <= last; at += kLanes) most = max(most, seen(at, load(scores + at), kHidden));
  const F factor = set1(scale), top = set1(largest(most) * scale);
  F total = set1(0.0f);
  for (int64_t at = first; at <= last; at += kLanes) {
    const F weights = seen(at, exp(load(scores + at) * factor - top), 0.0f);
    store(scores + at, weights);
    total = total + weights;
  }
  std::fill(scores, scores + first, 0.0f);
  std::fill(scores + last + kLanes, scores + slots, 0.0f);
  return sum(total);
}
