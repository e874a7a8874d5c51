// Log-probabilities of the model's own distribution: what sampler.py's token_logprobs() does. Included inside a namespace, after draw.h.

struct Likely {
  float logit;
  int64_t token;
};

// Of logits y [count]: the log-probability of a token, 1 + how many are likelier, and the k likeliest, first ids first where they are equal.
inline void logprobs_of(const float* y, int64_t count, int64_t token, int64_t k, float* chosen, int64_t* rank, int64_t* top_ids, float* top,
                        std::vector<Likely>& best) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  const int64_t whole = count / kLanes * kLanes;
  float rest[kLanes];
  store(rest, set1(lowest));
  std::copy(y + whole, y + count, rest);
  F most = load(rest);
  for (int64_t i = 0; i < whole; i += kLanes) most = max(most, load(y + i));
  const float highest = largest(most), of_token = y[token];
  const auto likelier = [](const Likely& a, const Likely& b) { return a.logit > b.logit || (a.logit == b.logit && a.token < b.token); };
  best.clear();
  const auto look = [&](const float* values, int64_t first) {
    for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, count - first); lane++) {
      const Likely one = {values[lane], first + lane};
      if (static_cast<int64_t>(best.size()) == k) {
        if (!likelier(one, best.front())) continue;
        std::pop_heap(best.begin(), best.end(), likelier);
        best.back() = one;
      } else {
        best.push_back(one);
      }
      std::push_heap(best.begin(), best.end(), likelier);
    }
  };
  const F top_of_all = set1(highest), least = set1(std::numeric_limits<float>::lowest()), of_chosen = max(set1(of_token), least);
  double total = 0, above = 0;
  for (int64_t begin = 0; begin <= whole; begin += kBlock) {
    F sums = set1(0.0f), counts = set1(0.0f);
    for (int64_t i = begin; i < std::min(begin + kBlock, whole + kLanes); i += kLanes) {
      const float* const values = i < whole ? y + i : rest;
      const F x = load(values);
      sums = sums + exp(x - top_of_all);
      counts = counts + if_negative(of_chosen - max(x, least), set1(1.0f), set1(0.0f));
      if (k > 0 && (static_cast<int64_t>(best.size()) < k || any_negative(set1(best.front().logit) - x))) look(values, i);
    }
    total += sum(sums);
    above += sum(counts);
  }
  const auto normal = static_cast<float>(std::log(total));
  *chosen = of_token - highest - normal;
  *rank = 1 + static_cast<int64_t>(above);
  std::sort_heap(best.begin(), best.end(), likelier);
  for (int64_t i = 0; i < k; i++) top_ids[i] = best[i].token, top[i] = best[i].logit - highest - normal;
}

// Logits [R, outputs], tokens [R] and k, at most outputs -> chosen [R], ranks [R], top ids and top [R, k].
inline void logprobs(const float* y, int64_t rows, int64_t outputs, const int64_t* tokens, int64_t k, float* chosen, int64_t* ranks,
                     int64_t* top_ids, float* top) {
#pragma omp parallel
  {
    std::vector<Likely> best;
    const auto [first, last] = Share{omp_get_thread_num(), omp_get_num_threads()}.of(rows);
    for (int64_t row = first; row < last; row++)
      logprobs_of(y + row * outputs, outputs, tokens[row], k, chosen + row, ranks + row, top_ids + row * k, top + row * k, best);
  }
}
