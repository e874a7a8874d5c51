// The likeliest token of each row, and what a row without filters draws: a head in 8 bits is only read where its coarse copy in
// 4 bits leaves the choice open. Included inside a namespace, after layers.h and draw.h.

// A coarse logit is off by the product of the inputs and the 4-bit weights' errors. Signs of errors are as good as random, so
// that is a sum with deviation |errors| |x| / sqrt(width), and beyond 8 of these once in 10^15.
constexpr float kDeviations = 8.0f;
constexpr float kNear = 5.0f;  // nats below the best: what is further off may be coarse in a sum of probabilities
constexpr float kLeastError = 1e-4f;  // of an output's weights: what sums of floats are off by, and more

// |weights - coarse weights| of each output -> errors [outputs, to a whole block].
inline void head_errors(const Head& head, float* errors) {
  const int64_t groups = head.weight.inputs / kGroup;
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    const auto [first, last] = share.of((head.weight.outputs + kLanes - 1) / kLanes);
    for (int64_t block = first; block < last; block++) {
      float squares[kLanes] = {}, norms[kLanes] = {}, scales[kLanes], coarse_scales[kLanes], zeros[kLanes];
      for (int64_t g = 0; g < groups; g++) {
        const uint8_t* codes = head.weight.data + (block * groups + g) * group_bytes(8);
        const uint8_t* coarse = head.coarse.data + (block * groups + g) * group_bytes(4);
        store(scales, load_half(reinterpret_cast<const uint16_t*>(codes + 512)));
        store(coarse_scales, load_half(reinterpret_cast<const uint16_t*>(coarse + 256)));
        store(zeros, load_half(reinterpret_cast<const uint16_t*>(coarse + 288)));
        for (int64_t k = 0; k < kGroup; k++) {
          for (int64_t lane = 0; lane < kLanes; lane++) {
            const uint8_t both = coarse[64 * (k / 8) + 4 * lane + k % 4];
            const float exact = (codes[64 * (k / 4) + 4 * lane + k % 4] - 128) * scales[lane];
            const float off = exact - (k % 8 < 4 ? both & 15 : both >> 4) * coarse_scales[lane] - zeros[lane];
            squares[lane] += off * off;
            norms[lane] += exact * exact;
          }
        }
      }
      for (int64_t lane = 0; lane < kLanes; lane++)
        errors[block * kLanes + lane] = std::max(std::sqrt(squares[lane]), kLeastError * std::sqrt(norms[lane]));
    }
  }
}

// By how much a coarse logit of this row may be off, for each unit of an output's error.
inline float slack(const Inputs& x, int64_t row) {
  float squares = 0;
  for (int64_t g = 0; g < x.groups(); g++) {
    const int64_t at = x.place(row, g);
    int32_t whole = 0;
    for (int64_t k = 0; k < kGroup; k++) whole += x.values[at * kGroup + k] * x.values[at * kGroup + k];
    squares += x.scales[at] * x.scales[at] * static_cast<float>(whole);
  }
  return kDeviations * std::sqrt(squares / static_cast<float>(x.width));
}

inline int64_t padded_outputs(const Weight& w) { return (w.outputs + kLanes - 1) / kLanes * kLanes; }

// What threads learn of each row: the best that they have seen, how good the best of all is at least, and the block of outputs that
// promised most. What counts is an output's logit, or of sampled rows its score: the logit over the temperature, and noise.
struct Best {
  Drawn best;
  double least;
  int64_t block;
  float high, total;  // where it is asked: the largest coarse logit, and the sum of exp((logit - that of all threads) / temperature)
};

// Floats that stay in a core's cache while they are looked at.
constexpr int64_t kNearFloats = 32 * 1024;

// The best of this thread's outputs of each row -> best[thread * stride + row], the first where several are. By all threads.
// logits: [rows, padded outputs] and bounds: [rows, blocks], to work in. sums: whether `high` and `total` are asked. how: of each
// row, which has no filters; null where all are greedy. outputs: the head's. changes: of each row; null where none has any.
inline void multiply_best(const Head& head, const Inputs& x, int64_t rows, float* logits, float* bounds, Best* best, int64_t stride,
                          bool sums, const Choosing* how, const Outputs& outputs, const RowChanges* changes, const Share& share) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  const Weight& w = head.weight;
  const int64_t width = padded_outputs(w), blocks = width / kLanes;
  const auto [first, last] = share.of(blocks);
  // Some blocks at a time, whose logits are looked at while they are near. All are kept only where they are summed.
  const int64_t held = std::max<int64_t>(kNearFloats / (rows * kLanes), kBlocksAtOnce) / kBlocksAtOnce * kBlocksAtOnce;
  const int64_t some = std::min(held, last - first);
  std::vector<float> lanes(rows * 3 * kLanes), by(rows), scales(rows, 1.0f);
  const auto is_sampled = [&](int64_t row) { return how && how[row].temperature > 0; };
  for (int64_t row = 0; row < rows; row++) {
    by[row] = slack(x, row) * (changes ? changes[row].stretch : 1);
    if (is_sampled(row)) scales[row] = 1 / how[row].temperature;
    float* const of_row = lanes.data() + row * 3 * kLanes;
    store(of_row, set1(lowest));
    store(of_row + kLanes, set1(static_cast<float>(first)));
    store(of_row + 2 * kLanes, set1(lowest));
  }
  for (int64_t begin = first; begin < last; begin += some) {
    const int64_t end = std::min(begin + some, last);
    const Output out = sums ? Output{logits, width, false}
                            : Output{logits + rows * first * kLanes, some * kLanes, false, begin * kLanes};
    multiply_blocks<4>(head.coarse, begin, end, x, rows, out);
    for (int64_t row = 0; row < rows; row++) {
      float* const y = out.y + row * out.stride - out.first;
      if (end * kLanes > w.outputs) std::fill(y + w.outputs, y + width, lowest);
      float* const of_row = lanes.data() + row * 3 * kLanes;
      F least = load(of_row), of = load(of_row + kLanes), high = load(of_row + 2 * kLanes);
      const F slack_of_row = set1(by[row]), scale = set1(scales[row]);
      for (int64_t block = begin; block < end; block++) {
        if (changes) changes[row].apply(y, block, outputs);
        F coarse = load(y + block * kLanes), off = load(head.errors + block * kLanes) * slack_of_row;
        high = max(high, coarse);
        if (is_sampled(row)) {
          const RoughNoise rough = rough_noise(outputs.tokens(block * kLanes), how[row].key);
          coarse = fma(coarse, scale, rough.noise), off = fma(off, scale, rough.off);
        }
        const F here = coarse - off;
        of = if_negative(least - here, set1(static_cast<float>(block)), of);
        least = max(least, here);
        bounds[row * blocks + block] = largest(coarse + off);
      }
      store(of_row, least);
      store(of_row + kLanes, of);
      store(of_row + 2 * kLanes, high);
    }
  }
  Best* const mine = best + share.thread * stride;
  const auto look = [&](int64_t row, int64_t block) {
    float y[kLanes];
    store(y, set1(lowest));
    multiply_block<8, 1>(w, block, x, row, {y, 0, false, block * kLanes});
    if (changes) changes[row].apply(y - block * kLanes, block, outputs);
    Drawn& b = mine[row].best;
    for (int64_t j = 0; j < std::min<int64_t>(kLanes, w.outputs - block * kLanes); j++) {
      const int64_t output = block * kLanes + j;
      const double score = is_sampled(row) ? score_of(y[j], how[row], outputs, output) : y[j];
      if (score > b.score || (score == b.score && output < b.output)) b = {output, score, y[j]};
    }
    if (sums) store(logits + row * width + block * kLanes, load(y));
  };
  for (int64_t row = 0; row < rows; row++) {
    const float *const values = lanes.data() + row * 3 * kLanes, *const of = values + kLanes;
    const int64_t block = static_cast<int64_t>(of[std::max_element(values, values + kLanes) - values]);
    mine[row] = {{0, lowest, lowest}, largest(load(values)), block, largest(load(of + kLanes)), 0};
    // What it is in 8 bits leaves fewer open than its 4 bits do.
    if (first < last) look(row, block);
    mine[row].least = std::max(mine[row].least, mine[row].best.score);
  }
#pragma omp barrier
  for (int64_t row = 0; row < rows; row++) {
    const float* const y = logits + row * width;
    double least = mine[row].least;
    float high = mine[row].high;
    for (int t = 0; t < share.threads; t++) {
      least = std::max(least, best[t * stride + row].least);
      high = std::max(high, best[t * stride + row].high);
    }
    F total = set1(0.0f);
    for (int64_t block = first; block < last; block++) {
      const float* const here = y + block * kLanes;
      const bool is_near = sums && largest(load(here)) >= high - kNear;
      const float bound = bounds[row * blocks + block];
      if ((is_near || (bound >= least && bound > lowest)) && block != mine[row].block) {
        look(row, block);
        least = std::max(least, mine[row].best.score);
      }
      if (sums) total = total + exp(min((load(here) - set1(high)) * set1(scales[row]), set1(kNear)));
    }
    if (sums) mine[row].total = sum(total);
  }
}
