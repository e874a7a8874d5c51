// What query heads that read the same keys and values share. Included inside a namespace, after scratch.h.

// Query heads first to last - 1, by as many at once as registers allow: compute(the first of these, how many, whether they are the
// first of all and fetch bit by bit), the latter two as types.
template <int most, typename Compute>
__attribute__((always_inline)) inline void in_groups(int first, int last, const Compute& compute) {
  int i = first;
  const auto group = [&](auto count) __attribute__((always_inline)) {
    if (i == first) compute(i, count, std::bool_constant<kFetchesBits>{});
    else compute(i, count, std::false_type{});
    i += count;
  };
  while (i + most <= last) group(std::integral_constant<int, most>{});
  if constexpr (most > 4) {
    if (i + 4 <= last) group(std::integral_constant<int, 4>{});
  }
  if (last - i == 3) group(std::integral_constant<int, 3>{});
  if (last - i == 2) group(std::integral_constant<int, 2>{});
  if (last - i == 1) group(std::integral_constant<int, 1>{});
}

// Registers of values for so many query heads.
constexpr int at_once(int count) {
  int n = 4;
  while (n * count > kSumsAtOnce) n /= 2;
  return n;
}

// sums[i][j] += factor(i) * vector(j). The fewer ones are held, so that no sum has to leave its register.
template <int count, int n, typename Factor, typename Vector>
__attribute__((always_inline)) inline void add_products(const Factor& factor, const Vector& vector, Wide (&sums)[count][n]) {
  if constexpr (count < n) {
    Wide factors[count];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) factors[i] = factor(i);
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) {
      const Wide x = vector(j);
#pragma GCC unroll 8
      for (int i = 0; i < count; i++) sums[i][j] = fma(factors[i], x, sums[i][j]);
    }
  } else {
    Wide vectors[n];
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) vectors[j] = vector(j);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const Wide x = factor(i);
#pragma GCC unroll 8
      for (int j = 0; j < n; j++) sums[i][j] = fma(x, vectors[j], sums[i][j]);
    }
  }
}
