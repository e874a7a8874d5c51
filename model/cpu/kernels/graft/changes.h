// What requests change of their rows' logits before they choose: bias and bans, then penalties, then who may be chosen at all; to
// the bit what sampler.py's GroupSampler does. Included inside a namespace, after draw.h.

// Of one output. bias: -inf forbids it. frequency: the penalty times how often it came.
struct Change {
  int64_t output;
  float bias, factor, frequency, presence;
};

inline float changed(float x, const Change& by) {
  x += by.bias;
  const volatile float scaled = x > 0 ? x / by.factor : x * by.factor;  // rounded, as torch does
  return scaled - by.frequency - by.presence;
}

// Those of one row.
struct RowChanges {
  std::vector<Change> of_outputs;  // by blocks of outputs
  std::vector<int32_t> starts;     // [blocks + 1], of each block's; empty where the row has none
  const uint32_t* allowed = nullptr;  // a bit for each token; null: all are
  float stretch = 1;  // how much further off a changed logit may be than what it was made of

  // y: logits by output, of which it changes one block.
  void apply(float* y, int64_t block, const Outputs& outputs) const {
    if (!starts.empty())
      for (int32_t i = starts[block]; i < starts[block + 1]; i++) y[of_outputs[i].output] = changed(y[of_outputs[i].output], of_outputs[i]);
    if (!allowed) return;
    static_assert(kLanes == 16, "half a word of bits for each block");
    const int64_t first = block * kLanes, last = std::min(first + kLanes, outputs.count);
    if (!outputs.short_list && (allowed[block / 2] >> (block % 2 * kLanes) & 0xffff) == 0xffff) return;
    for (int64_t output = first; output < last; output++) {
      const uint32_t token = outputs.token(output);
      if (!(allowed[token / 32] >> (token % 32) & 1)) y[output] = -std::numeric_limits<float>::infinity();
    }
  }
};

// Where a row stands among some, ascending; -1: it is none of them.
inline int64_t place_of(int64_t row, const int64_t* rows, int64_t count) {
  const int64_t* const at = std::lower_bound(rows, rows + count, row);
  return at < rows + count && *at == row ? at - rows : -1;
}

enum class Said { kInPrompt, kCame, kBias, kForbidden };

// For token `index` of a row's group. places: [tokens], to work in.
inline void find_changes(const Emission& e, int64_t row, int64_t index, const Outputs& outputs, int32_t* places, RowChanges& found) {
  const Changes& c = *e.changes;
  found.of_outputs.clear();
  found.starts.clear();
  found.stretch = 1;
  const int64_t masked = place_of(row, c.masked, c.masks), a = place_of(row, c.adjusted, c.adjustments);
  found.allowed = masked < 0 ? nullptr : c.allowed + masked * c.words;
  if (a < 0) return;
  const float presence = c.presence[a], frequency = c.frequency[a], repetition = c.repetition[a];
  const bool penalises = presence != 0 || frequency != 0 || repetition != 1;
  const auto each = [&](auto take) {
    const auto all = [&](const int64_t* tokens, int64_t count, Said what) {
      for (int64_t i = 0; i < count; i++)
        if (tokens[i] >= 0) take(tokens[i], what, 0.0f);
    };
    if (repetition != 1) all(c.prompt_ids + a * c.prompts, c.prompts, Said::kInPrompt);
    if (penalises) {
      all(c.output_ids + a * c.outputs, c.outputs, Said::kCame);
      all(e.token_ids + row * e.width, index, Said::kCame);
    }
    for (int64_t i = 0; i < c.biases; i++)
      if (c.bias_row[i] == a) take(c.bias_id[i], Said::kBias, c.bias[i]);
    if (c.output_index[row] + index < c.min_index[a]) all(c.end_ids + row * c.ends, c.ends, Said::kForbidden);
  };
  each([&](int64_t token, Said, float) { places[token] = -1; });
  std::vector<Change> of_tokens;
  each([&](int64_t token, Said what, float bias) {
    if (places[token] < 0) {
      places[token] = static_cast<int32_t>(of_tokens.size());
      of_tokens.push_back({token, 0, 1, 0, 0});
    }
    Change& by = of_tokens[places[token]];
    if (what == Said::kBias) by.bias += bias;
    else if (what == Said::kForbidden) by.bias = -std::numeric_limits<float>::infinity();
    else by.factor = repetition;
    if (what == Said::kCame) by.frequency += 1, by.presence = presence;
  });
  if (of_tokens.empty()) return;
  found.stretch = std::max(repetition, 1 / repetition);
  found.starts.assign((outputs.count + kLanes - 1) / kLanes + 1, 0);
  for (Change& by : of_tokens) {
    by.frequency *= frequency;
    if (outputs.short_list) by.output = place_of(by.output, outputs.short_list, outputs.count);
    if (by.output >= 0) found.starts[by.output / kLanes]++;
  }
  for (size_t block = 1; block < found.starts.size(); block++) found.starts[block] += found.starts[block - 1];
  found.of_outputs.resize(found.starts.back());
  for (const Change& by : of_tokens)
    if (by.output >= 0) found.of_outputs[--found.starts[by.output / kLanes]] = by;
}
