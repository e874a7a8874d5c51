// What becomes of what rows have chosen: tokens of groups, and which rows go on. Included inside a namespace, after
// micro.h.

// What a row has chosen: an output of the head, and whether it is the likeliest.
struct Choice {
  int64_t output;
  bool likeliest;
  bool possible = true;  // else nothing that is allowed has a logit above -inf
  float chance = 0;      // of a draft
};

// The rows whose groups have not ended, and what they choose.
struct Going {
  std::vector<int64_t> rows, tokens;
  std::vector<Choice> choices;
  std::vector<float> stops;
  std::vector<float> chances;  // of all rows, with verified groups: that all their drafts so far are accepted
  std::vector<Best> best;  // [threads, rows at first]
  std::vector<RowChanges> changes;  // where any row has some
  std::unique_ptr<MicroStep> step;
};

// What all threads together have found for a row; likeliest is so of greedy rows alone.
inline Choice best_of(const Going& going, int64_t i, int64_t stride, int threads, float temperature, bool is_draft) {
  Best best = going.best[i];
  for (int t = 1; t < threads; t++) {
    const Best& other = going.best[t * stride + i];
    if (other.best.score > best.best.score) best.best = other.best;
    best.high = std::max(best.high, other.high);
    best.total += other.total;
  }
  Choice choice = {best.best.output, true, best.best.logit > -std::numeric_limits<float>::infinity()};
  if (!is_draft || !choice.possible) return choice;
  // How likely the micro-step finds it. What is unlikely counts with its coarse logit.
  const float off = (best.best.logit - best.high) / (temperature > 0 ? temperature : 1);
  choice.chance = std::min(std::exp(off) / std::max(best.total, 1e-30f), 1.0f);
  if (temperature > 0) choice.chance = chance_with_noise(choice.chance, best.best, temperature);
  return choice;
}

// Whether a row's group goes on after its token `index`. The same rule as GoOn's of model/emission/emission.py,
// with which tests/model/test_go_on.py compares it. A stop value read before a token that is not the likeliest is stale.
inline bool goes_on(const Emission& e, int64_t row, int64_t index, int64_t token, bool likeliest, float stop) {
  const int64_t *ends = e.end_ids + row * e.ends, *last = ends + e.ends;
  return likeliest && -stop >= e.thresholds[row] && e.limits[row] > index + 1 && std::find(ends, last, token) == last;
}

// One thread: each row's token `index` joins its group; `going` keeps the rows that go on.
inline void decide(const Graft& graft, const Emission& e, int64_t index, Going& going) {
  size_t kept = 0;
  for (size_t i = 0; i < going.rows.size(); i++) {
    const int64_t row = going.rows[i];
    const Choice choice = going.choices[i];
    const int64_t token = index > 0 && graft.short_list ? graft.short_list[choice.output] : choice.output;
    const float stop = graft.count ? calibrated(graft, going.stops[i], index) : std::numeric_limits<float>::infinity();
    e.token_ids[row * e.width + index] = token;
    e.stops[row * e.width + index] = stop;
    e.sizes[row] = index + 1;
    if (goes_on(e, row, index, token, choice.likeliest, stop)) {
      going.rows[kept] = row;
      going.tokens[kept++] = token;
    }
  }
  going.rows.resize(index + 1 < e.width ? kept : 0);
}

// One thread, of verified groups: each row's token `index`, its own where it is 0, else a draft; `going` keeps the rows that
// draft another. Of a sequence's rows that is the last whose drafts before it were the trunk's choice (last_confirmed and
// drafts_go_on of model/emission/emission.py).
inline void decide_verified(const Graft& graft, const Emission& e, int64_t index, Going& going) {
  size_t kept = 0;
  bool counts = true;
  for (size_t i = 0; i < going.rows.size(); i++) {
    const int64_t row = going.rows[i];
    const Choice choice = going.choices[i];
    const int64_t token = index > 0 && graft.short_list ? graft.short_list[choice.output] : choice.output;
    e.token_ids[row * e.width + index] = token;
    e.sizes[row] = index + 1;
    if (index > 0) {
      e.stops[row * e.width + index] = 1.0f - choice.chance;
      going.chances[row] *= choice.chance;
    } else {
      const bool confirmed = token == e.checks[row], was_counted = counts;
      counts = e.checks[row] < 0 || (counts && confirmed);
      if (!was_counted || confirmed) continue;
    }
    const float least = e.thresholds[row];
    if (going.chances[row] >= least && least < 1.0f && e.limits[row] > index + 1) {
      going.rows[kept] = row;
      going.tokens[kept++] = token;
    }
  }
  going.rows.resize(index + 1 < e.width ? kept : 0);
}
