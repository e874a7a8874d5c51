// Draws a token for each sampled row: what sampler.py's sample() does, in whole numbers. Included inside a namespace, after
// functions.h.

// Tokens are weighed in units of 2^-40 of the likeliest one. Whole numbers have one sum, whatever their order and whatever
// lies between them, so a short list draws what the vocabulary draws, -inf elsewhere. What is below a unit, e^-27.7, is never
// drawn: at most 2^-40 for each token of the vocabulary.
constexpr float kUnits = 1099511627776.0f;
constexpr int64_t kBlock = 64 * kLanes;
constexpr float kFarthest = 28.0f;  // nats below the likeliest token, and more than a unit

// How a row chooses. temperature 0: the likeliest. top_k 0, top_p 1 and min_p 0 keep all. u: [0, 1), a multiple of 2^-53.
struct Choosing {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
  double u;
};

struct Candidate {
  float x;
  int64_t output;
  uint64_t weight;
};

struct Drawing {  // one thread's
  std::vector<Candidate> kept;
  std::vector<uint64_t> sums;
};

// x <= 0 of 16 tokens -> their weights, before they are cut to whole numbers; 0 for those below `least`, 1 or more.
inline F weights_of(F x, float least) {
  const F w = exp(x) * set1(kUnits);
  return if_negative(w - set1(least), set1(0.0f), w);
}

inline void weigh_tokens(const float* x, float least, uint64_t* weights) {
  float all[kLanes];
  store(all, weights_of(load(x), least));
  for (int lane = 0; lane < kLanes; lane++) weights[lane] = static_cast<uint64_t>(static_cast<int64_t>(all[lane]));
}

// The sum of so many weights, at most 64 vectors: in two halves of 20 bits, whose sums 32 bits hold.
inline uint64_t sum_weights(const float* x, int64_t count, float least) {
  I high = set1(0), low = set1(0);
  for (int64_t i = 0; i < count; i += kLanes) {
    const F w = weights_of(load(x + i), least);
    const I upper = truncated(w * set1(0x1p-20f));
    high = high + upper;
    low = low + truncated(w - to_float(upper) * set1(0x1p20f));
  }
  return (static_cast<uint64_t>(sum(high)) << 20) + static_cast<uint64_t>(sum(low));
}

inline uint64_t target_of(double u, uint64_t total) {  // floor(u * total), exactly; below it also where u is not
  const auto share = std::min<uint64_t>(static_cast<uint64_t>(u * 0x1p53), (uint64_t{1} << 53) - 1);
  return static_cast<uint64_t>(static_cast<unsigned __int128>(share) * total >> 53);
}

// Of each block, into d.sums, and of all.
inline uint64_t sum_all(const float* x, int64_t width, float least, Drawing& d) {
  uint64_t total = 0;
  d.sums.clear();
  for (int64_t first = 0; first < width; first += kBlock) {
    d.sums.push_back(sum_weights(x + first, std::min(kBlock, width - first), least));
    total += d.sums.back();
  }
  return total;
}

// Of all tokens, in the order of their ids. width: of x, whole vectors. -1 where NaN or infinite logits left no weights that
// add up; so do the next two.
inline int64_t draw_any(const float* x, int64_t width, double u, Drawing& d) {
  uint64_t weights[kLanes], left = target_of(u, sum_all(x, width, 1, d));
  int64_t i = 0;
  for (; i < width && left >= d.sums[i / kBlock]; i += kBlock) left -= d.sums[i / kBlock];
  for (; i < width; i += kLanes) {
    weigh_tokens(x + i, 1, weights);
    for (int64_t lane = 0; lane < kLanes; lane++) {
      if (left < weights[lane]) return i + lane;
      left -= weights[lane];
    }
  }
  return -1;
}

// Of the tokens that min-p, then top-k, then top-p of what is left keep, the likeliest first, of equal ones the lower id.
inline int64_t draw_filtered(const float* x, int64_t width, const Choosing& how, Drawing& d) {
  const float least = std::max(1.0f, how.min_p * kUnits);
  const bool all_kept = how.top_p >= 1;
  uint64_t weights[kLanes], mass = how.top_k > 0 ? 0 : sum_all(x, width, least, d);
  const float farthest = std::min(kFarthest, how.min_p > 0 ? 0.1f - std::log(how.min_p) : kFarthest);
  for (float reach = 3;; reach *= 1.5f) {  // few tokens are likely, so few are sorted
    uint64_t sum = 0;
    d.kept.clear();
    for (int64_t i = 0; i < width; i += kLanes) {
      if (!(largest(load(x + i)) >= -reach)) continue;
      weigh_tokens(x + i, least, weights);
      for (int64_t lane = 0; lane < kLanes; lane++) {
        if (!(x[i + lane] >= -reach) || !weights[lane]) continue;
        d.kept.push_back({x[i + lane], i + lane, weights[lane]});
        sum += weights[lane];
      }
    }
    const bool enough = how.top_k > 0 ? static_cast<int64_t>(d.kept.size()) >= how.top_k
                                      : static_cast<double>(sum) >= (all_kept ? 1.0 : how.top_p) * static_cast<double>(mass);
    if (enough || reach >= farthest) break;
  }
  const auto likelier = [](const Candidate& a, const Candidate& b) { return a.x > b.x || (a.x == b.x && a.output < b.output); };
  if (how.top_k > 0) {
    if (static_cast<int64_t>(d.kept.size()) > how.top_k) {
      std::nth_element(d.kept.begin(), d.kept.begin() + how.top_k, d.kept.end(), likelier);
      d.kept.resize(how.top_k);
    }
    for (const Candidate& one : d.kept) mass += one.weight;
  }
  std::sort(d.kept.begin(), d.kept.end(), likelier);
  uint64_t before = 0;
  size_t count = 0;
  for (; count < d.kept.size(); before += d.kept[count++].weight)
    if (count > 0 && !all_kept && !(static_cast<double>(before) < how.top_p * static_cast<double>(mass))) break;
  uint64_t left = target_of(how.u, before);
  size_t i = 0;
  for (; i < count && left >= d.kept[i].weight; i++) left -= d.kept[i].weight;
  return i < count ? d.kept[i].output : -1;
}

// x: logits after the temperature, 0 the largest, width of them in whole vectors, -inf beyond the last token.
inline int64_t draw(const float* x, int64_t width, const Choosing& how, Drawing& d) {
  const bool filtered = how.top_k > 0 || how.top_p < 1 || how.min_p > 0;
  return filtered ? draw_filtered(x, width, how, d) : draw_any(x, width, how.u, d);
}

// The first of the likeliest tokens of logits y [width], -inf beyond the last one; -1 where all are, or all are NaN.
inline int64_t likeliest_of(const float* y, int64_t width) {
  F most = set1(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < width; i += kLanes) most = max(most, load(y + i));
  const float best = largest(most);
  const float* const at = std::find(y, y + width, best);
  return best == -std::numeric_limits<float>::infinity() || at == y + width ? -1 : at - y;
}

// Rows [R, outputs] of such x, without an end in whole vectors -> tokens [R]. Where no token is left, the last.
inline void draw_rows(const float* x, int64_t rows, int64_t outputs, const int64_t* top_k, const float* top_p, const float* min_p,
                      const double* u, int64_t* tokens) {
  const int64_t width = (outputs + kLanes - 1) / kLanes * kLanes;
#pragma omp parallel
  {
    Drawing d;
    std::vector<float> padded(width, -std::numeric_limits<float>::infinity());
    const auto [first, last] = Share{omp_get_thread_num(), omp_get_num_threads()}.of(rows);
    for (int64_t row = first; row < last; row++) {
      std::memcpy(padded.data(), x + row * outputs, sizeof(float) * outputs);
      const int64_t best = likeliest_of(padded.data(), width);
      const int64_t drawn = best < 0 ? -1 : draw(padded.data(), width, {1, top_k[row], top_p[row], min_p[row], u[row]}, d);
      tokens[row] = drawn >= 0 ? drawn : best >= 0 ? best : outputs - 1;
    }
  }
}
