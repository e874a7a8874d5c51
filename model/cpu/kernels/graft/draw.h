// Draws a token for each sampled row: what sampler.py's sample() does. Included inside a namespace, after functions.h.

// What filters keep is found in whole numbers, units of 2^-40 of the likeliest token. They have one sum, whatever their order and
// whatever lies between them, so of a short list is kept what is of the vocabulary, -inf elsewhere.
constexpr float kUnits = 1099511627776.0f;
constexpr int64_t kBlock = 64 * kLanes;
constexpr float kFarthest = 28.0f;  // nats below the likeliest token, and more than a unit

// How a row chooses. temperature 0: the likeliest. top_k 0, top_p 1 and min_p 0 keep all. key: of the noise of its tokens.
struct Choosing {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
  uint64_t key;
};

// Where no noise weighs beside logits it is greedy, so that no logit over a temperature is beyond float32.
inline float warm(float temperature) { return temperature < 1e-30f ? 0 : temperature; }

// The tokens that a head chooses from: those of a short list, or, where it is null, all.
struct Outputs {
  const int64_t* short_list;
  int64_t count;

  uint32_t token(int64_t output) const { return static_cast<uint32_t>(short_list ? short_list[output] : output); }

  I tokens(int64_t first) const {  // of as many outputs as there are lanes, any beyond the last
    if (!short_list) return counted_from(static_cast<int32_t>(first));
    if (first + kLanes <= count) return load(short_list + first);
    int64_t last[kLanes] = {};
    std::copy(short_list + first, short_list + count, last);
    return load(last);
  }
};

struct Candidate {
  float x;  // its logit less the likeliest's, over the temperature
  int64_t output;
  uint64_t weight;
};

// score: what is drawn has the largest, its logit over the temperature and its token's noise. No output, -1, where none is a number.
struct Drawn {
  int64_t output;
  double score;
  float logit;
};
constexpr Drawn kNothing = {-1, -std::numeric_limits<double>::infinity(), 0};

struct Drawing {  // one thread's
  std::vector<float> scaled;
  std::vector<Candidate> kept;
};

template <class Number>
Number number(uint64_t bits);
template <>
inline uint32_t number(uint64_t bits) { return static_cast<uint32_t>(bits); }
template <>
inline I number(uint64_t bits) { return set1(static_cast<int32_t>(static_cast<uint32_t>(bits))); }
template <int bits>
inline uint32_t shifted_right(uint32_t x) { return x >> bits; }

// 32 random bits for each token: noise.py's.
template <class Number>
inline Number random_bits(Number tokens, uint64_t key) {
  Number x = tokens * number<Number>(0x9e3779b1) + number<Number>(key);
  x = (x ^ shifted_right<16>(x)) * number<Number>(0x7feb352d);
  x = (x ^ shifted_right<15>(x) ^ number<Number>(key >> 32)) * number<Number>(0x846ca68b);
  return x ^ shifted_right<16>(x);
}

// Gumbel noise: -log E of an exponential number E = -log u, u in (0, 1): with the bits as a signed number, 1/2 is their 0.
inline double noise_of(uint32_t token, uint64_t key) {
  return -std::log(-std::log(((random_bits(token, key) ^ 0x80000000) + 0.5) * 0x1p-32));
}

// Of the u of 16 tokens: 1 - u in units of 2^-24, cut.
inline F rest_of(I tokens, uint64_t key) { return to_float(shifted_right<8>(random_bits(tokens, key) ^ set1(0x7fffffff))); }

// Of 16 tokens: their noise, and by how much it may be off; what is nearly certain to be drawn needs more bits than these.
struct RoughNoise {
  F noise, off;
};
inline RoughNoise rough_noise(I tokens, uint64_t key) {
  const F rest = rest_of(tokens, key), v = (rest + set1(0.5f)) * set1(0x1p-24f);
  const F near = fma(fma(v, set1(1.0f / 3), set1(0.5f)), v, set1(1.0f)) * v;  // -log(1 - v) of small ones
  const F exponential = if_negative(v - set1(0.1f), near, set1(0.0f) - rough_log(set1(1.0f) - v));
  return {set1(0.0f) - rough_log(exponential), if_negative(rest - set1(64.0f), set1(7.0f), set1(0.02f))};
}

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

inline uint64_t sum_all(const float* x, int64_t width, float least) {
  uint64_t total = 0;
  for (int64_t first = 0; first < width; first += kBlock) total += sum_weights(x + first, std::min(kBlock, width - first), least);
  return total;
}

inline double score_of(float logit, const Choosing& how, const Outputs& outputs, int64_t output) {
  return static_cast<double>(logit) / how.temperature + noise_of(outputs.token(output), how.key);
}

inline void take_better(float logit, const Choosing& how, const Outputs& outputs, int64_t output, Drawn& best) {
  const double score = score_of(logit, how, outputs, output);
  if (score > best.score) best = {output, score, logit};
}

// Of all tokens. width: of logits y, whole vectors, -inf beyond the last. likeliest: one of the likeliest.
inline Drawn draw_any(const float* y, int64_t width, int64_t likeliest, const Choosing& how, const Outputs& outputs) {
  Drawn best = kNothing;
  take_better(y[likeliest], how, outputs, likeliest, best);
  const double most = static_cast<double>(y[likeliest]) / how.temperature;
  const F top = set1(y[likeliest]), scale = set1(1 / how.temperature);
  // Better than the best is who has E < exp(x - best), and E = -log u is more than 1 - u, so few tokens are looked at.
  constexpr float kMostNoise = 22.9f, kMargin = 1.0001f;
  for (int64_t i = 0; i < width; i += kLanes) {
    const F ahead = (load(y + i) - top) * scale - set1(static_cast<float>(best.score - most));
    if (!any_negative(set1(-kMostNoise) - ahead)) continue;
    if (!any_negative(rest_of(outputs.tokens(i), how.key) * set1(0x1p-24f) - exp(ahead) * set1(kMargin))) continue;
    for (int64_t at = i; at < std::min(i + kLanes, outputs.count); at++) take_better(y[at], how, outputs, at, best);
  }
  return best;
}

// Of the tokens that min-p, then top-k, then top-p of what is left keep, the likeliest first, of equal ones the lower id. Output
// -1 where NaN or infinite logits left none.
inline Drawn draw_filtered(const float* y, int64_t width, int64_t likeliest, const Choosing& how, const Outputs& outputs, Drawing& d) {
  d.scaled.resize(width);
  std::vector<Candidate>& kept = d.kept;
  float* const x = d.scaled.data();
  const F top = set1(y[likeliest]), temperature = set1(how.temperature);
  for (int64_t i = 0; i < width; i += kLanes) store(x + i, (load(y + i) - top) / temperature);
  const float least = std::max(1.0f, how.min_p * kUnits);
  const bool all_kept = how.top_p >= 1;
  uint64_t weights[kLanes], mass = how.top_k > 0 ? 0 : sum_all(x, width, least);
  const float farthest = std::min(kFarthest, how.min_p > 0 ? 0.1f - std::log(how.min_p) : kFarthest);
  for (float reach = 3;; reach *= 1.5f) {  // few tokens are likely, so few are sorted
    uint64_t sum = 0;
    kept.clear();
    for (int64_t i = 0; i < width; i += kLanes) {
      if (!(largest(load(x + i)) >= -reach)) continue;
      weigh_tokens(x + i, least, weights);
      for (int64_t lane = 0; lane < kLanes; lane++) {
        if (!(x[i + lane] >= -reach) || !weights[lane]) continue;
        kept.push_back({x[i + lane], i + lane, weights[lane]});
        sum += weights[lane];
      }
    }
    const bool enough = how.top_k > 0 ? static_cast<int64_t>(kept.size()) >= how.top_k
                                      : static_cast<double>(sum) >= (all_kept ? 1.0 : how.top_p) * static_cast<double>(mass);
    if (enough || reach >= farthest) break;
  }
  const auto likelier = [](const Candidate& a, const Candidate& b) { return a.x > b.x || (a.x == b.x && a.output < b.output); };
  if (how.top_k > 0) {
    if (static_cast<int64_t>(kept.size()) > how.top_k) {
      std::nth_element(kept.begin(), kept.begin() + how.top_k, kept.end(), likelier);
      kept.resize(how.top_k);
    }
    for (const Candidate& one : kept) mass += one.weight;
  }
  std::sort(kept.begin(), kept.end(), likelier);
  Drawn best = kNothing;
  uint64_t before = 0;
  for (const Candidate& one : kept) {
    if (before > 0 && !all_kept && !(static_cast<double>(before) < how.top_p * static_cast<double>(mass))) break;
    before += one.weight;
    take_better(y[one.output], how, outputs, one.output, best);
  }
  return best;
}

// y: logits, width of them in whole vectors, -inf beyond the last; of them `likeliest` is the largest.
inline Drawn draw(const float* y, int64_t width, int64_t likeliest, const Choosing& how, const Outputs& outputs, Drawing& d) {
  const bool is_filtered = how.top_k > 0 || how.top_p < 1 || how.min_p > 0;
  const Drawn drawn = is_filtered ? draw_filtered(y, width, likeliest, how, outputs, d) : draw_any(y, width, likeliest, how, outputs);
  return drawn.output < 0 ? Drawn{likeliest, 0, y[likeliest]} : drawn;
}

// The first of the likeliest tokens of logits y [width], -inf beyond the last one; -1 where all are, or all are NaN.
inline int64_t likeliest_of(const float* y, int64_t width) {
  F most = set1(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < width; i += kLanes) most = max(most, load(y + i));
  const float best = largest(most);
  if (best == -std::numeric_limits<float>::infinity()) return -1;
  for (int64_t i = 0; i < width; i += kLanes) {
    if (largest(load(y + i)) < best) continue;
    const float* const at = std::find(y + i, y + i + kLanes, best);
    if (at != y + i + kLanes) return at - y;
  }
  return -1;
}

// The probability of an output among logits y [width], of which `most` is the largest.
inline float chance_of_output(const float* y, int64_t width, int64_t output, float most, float temperature) {
  const F top = set1(most), scale = set1(1 / temperature);
  F total = set1(0.0f);
  for (int64_t i = 0; i < width; i += kLanes) total = total + exp((load(y + i) - top) * scale);
  return std::exp((y[output] - most) / temperature) / sum(total);
}

// How likely it is drawn by who finds nearly such probabilities: of it p, and its noise is known (noise.py).
inline float chance_with_noise(float p, const Drawn& drawn, float temperature) {
  const auto noise = static_cast<float>(drawn.score - static_cast<double>(drawn.logit) / temperature);
  return 1 / (1 + std::exp(1.15f - 0.6f * (std::log(p / (1 - std::min(p, 0.9999999f))) + noise)));
}

// Logits [R, outputs], without an end in whole vectors -> tokens [R]. Where no token is left, the first.
inline void draw_rows(const float* y, int64_t rows, int64_t outputs, const float* temperatures, const int64_t* top_k,
                      const float* top_p, const float* min_p, const int64_t* keys, int64_t* tokens) {
  const int64_t width = (outputs + kLanes - 1) / kLanes * kLanes;
#pragma omp parallel
  {
    Drawing d;
    std::vector<float> padded(width, -std::numeric_limits<float>::infinity());
    const auto [first, last] = Share{omp_get_thread_num(), omp_get_num_threads()}.of(rows);
    for (int64_t row = first; row < last; row++) {
      std::memcpy(padded.data(), y + row * outputs, sizeof(float) * outputs);
      const int64_t best = likeliest_of(padded.data(), width);
      const Choosing how = {warm(temperatures[row]), top_k[row], top_p[row], min_p[row], static_cast<uint64_t>(keys[row])};
      const bool is_drawn = best >= 0 && how.temperature > 0;
      tokens[row] = is_drawn ? draw(padded.data(), width, best, how, {nullptr, outputs}, d).output : std::max<int64_t>(best, 0);
    }
  }
}
