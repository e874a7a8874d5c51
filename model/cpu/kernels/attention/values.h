// Scores become weights, and weights times a tile's values outputs. Included inside a namespace, after together.h and functions.h.

// Of `count` query heads the outputs d and on, `n` registers. value(j): where the values of slot j lie; weights: the tile's, of the
// first of these heads.
template <int count, int n, bool fetches, typename Place>
inline void weigh(const Place& value, int d, int first, int slots, const float* weights, Scratch& s) {
  Coming coming = fetches ? s.coming : Coming{};
  Wide total[count][n];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int v = 0; v < n; v++) total[i][v] = load_wide(&s.outputs[first + i][d + v * kWide]);
  for (int j = 0; j < slots; j++) {
    if (fetches && (n * kWide >= 32 || j % 2)) coming.fetch();
    if (fetches && n * kWide >= 64) coming.fetch();
    add_products<count, n>([&](int i) { return set1_wide(weights[i * s.stride + j]); },
                           [&](int v) { return load_wide(value(j) + d + v * kWide); }, total);
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int v = 0; v < n; v++) store(&s.outputs[first + i][d + v * kWide], total[i][v]);
  if (fetches) s.coming = coming;
}

// Query heads first to last - 1. weights: the tile's, of query head 0.
template <typename Place>
inline void weigh_all(const Place& value, int first, int last, int head_dim, int slots, const float* weights, Scratch& s) {
  in_groups<kQueriesAtOnce>(first, last, [&](int i, auto count, auto fetches) {
    constexpr int n = at_once(count), left = std::min(n, 32 / kWide);
    const float* const own = weights + i * s.stride;
    int d = 0;
    for (; d + n * kWide <= head_dim; d += n * kWide) weigh<count, n, fetches>(value, d, i, slots, own, s);
    for (; d < head_dim; d += left * kWide) weigh<count, left, fetches>(value, d, i, slots, own, s);
  });
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
