// A mixture of experts in place of a layer's MLP (model/modules/layers.py has the plain one): a router in float32, then each expert for the
// slots that chose it. A slot's sums are made in the same order, whatever others choose. Included inside a namespace, after inputs.h.

constexpr int64_t kReading = 4;  // what reading an expert's weights costs, in products of a row with them

// An entry is a choice of a slot: number slot * per_token + place, the likeliest expert first. Experts have theirs side by side.
struct ExpertSpace {
  float* scores;     // [T, experts]
  float* chances;    // [entries]
  int64_t* chosen;   // [entries], experts
  int64_t* starts;   // [experts + 1], where those of each begin in `entries`
  int64_t* entries;  // [entries], by expert, then by slot
  int64_t* places;   // [entries], where each is in `entries`
  uint8_t* inputs;   // Inputs of one expert behind those of the other, [entries, hidden]
  uint8_t* wide;     // the same of the gated products, [entries, width]
  float* gate_up;    // [entries, 2, width]
  float* out;        // [entries, hidden]

  int64_t rows(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
  // Of an expert, in `inputs` or `wide`.
  Inputs of(uint8_t* all, int64_t expert, int64_t width) const {
    return inputs_at(all + inputs_bytes(starts[expert], width), rows(expert), width);
  }
};

template <typename Take>
inline void lay_out(const Geometry& g, int64_t rows, const Take& take, ExpertSpace* s) {
  const int64_t entries = rows * g.experts_per_token;
  s->scores = reinterpret_cast<float*>(take(rows * g.experts * 4));
  s->chances = reinterpret_cast<float*>(take(entries * 4));
  s->chosen = reinterpret_cast<int64_t*>(take(entries * 8));
  s->starts = reinterpret_cast<int64_t*>(take((g.experts + 1) * 8));
  s->entries = reinterpret_cast<int64_t*>(take(entries * 8));
  s->places = reinterpret_cast<int64_t*>(take(entries * 8));
  s->inputs = take(inputs_bytes(entries, g.hidden));
  s->wide = take(inputs_bytes(entries, g.expert_width));
  s->gate_up = reinterpret_cast<float*>(take(entries * 2 * g.expert_width * 4));
  s->out = reinterpret_cast<float*>(take(entries * g.hidden * 4));
}

// The norm of x times the router's weights, in float32: what is chosen should not depend on rounding.
inline void route_scores(const Geometry& g, const Layer& layer, const float* x, int64_t rows, float* to, const Share& share) {
  const auto [first, last] = share.of(rows * g.experts);
  int64_t row = -1;
  F inverse = set1(0.0f);
  for (int64_t at = first; at < last; at++) {
    if (at / g.experts != row) {
      row = at / g.experts;
      inverse = set1(inverse_rms(x + row * g.hidden, g.hidden, g.eps));
    }
    const float *from = x + row * g.hidden, *weight = layer.router + at % g.experts * g.hidden;
    F even = set1(0.0f), odd = even;
    for (int64_t d = 0; d < g.hidden; d += kGroup) {
      const int64_t e = d + kLanes;
      even = fma(load(from + d) * inverse * load(layer.mlp_norm + d), load(weight + d), even);
      odd = fma(load(from + e) * inverse * load(layer.mlp_norm + e), load(weight + e), odd);
    }
    to[at] = sum(even + odd);
  }
}

// Softmax of a slot's scores, and its likeliest experts, of equal ones the first. Scores that are no numbers make all chances so.
inline void choose_experts(const Geometry& g, float* scores, float* chances, int64_t* chosen) {
  float most = scores[0], total = 0.0f, kept = 0.0f;
  for (int e = 1; e < g.experts; e++) most = std::max(most, scores[e]);
  for (int e = 0; e < g.experts; e++) total += scores[e] = std::exp(scores[e] - most);
  for (int place = 0; place < g.experts_per_token; place++) {
    int64_t best = -1;
    for (int e = 0; e < g.experts; e++)
      if (scores[e] != -1.0f && (best < 0 || scores[e] > scores[best])) best = e;
    chosen[place] = best;
    kept += chances[place] = scores[best];
    scores[best] = -1.0f;  // taken
  }
  const float whole = g.sum_to_one && total == total ? kept : total;
  for (int place = 0; place < g.experts_per_token; place++) chances[place] /= whole;
}

inline void sort_entries(const Geometry& g, int64_t count, const ExpertSpace& s) {
  std::fill(s.starts, s.starts + g.experts + 1, int64_t{0});
  for (int64_t i = 0; i < count; i++) s.starts[s.chosen[i]]++;
  for (int e = 1; e <= g.experts; e++) s.starts[e] += s.starts[e - 1];  // where each ends
  for (int64_t i = count - 1; i >= 0; i--) s.entries[s.places[i] = --s.starts[s.chosen[i]]] = i;
}

// Each entry's inputs, from its slot's, to its expert's.
inline void gather_inputs(const Geometry& g, const Inputs& from, int64_t count, const ExpertSpace& s, const Share& share) {
  const auto [first, last] = share.of(count);
  for (int64_t place = first; place < last; place++) {
    const int64_t entry = s.entries[place], expert = s.chosen[entry], row = place - s.starts[expert];
    const Inputs to = s.of(s.inputs, expert, g.hidden);
    for (int64_t group = 0; group < to.groups(); group++) {
      const int64_t at = to.place(row, group), there = from.place(entry / g.experts_per_token, group);
      std::memcpy(to.values + at * kGroup, from.values + there * kGroup, kGroup);
      to.scales[at] = from.scales[there];
      to.sums[at] = from.sums[there];
      to.offsets[at] = from.offsets[there];
    }
  }
}

// f(expert, first, last): this thread's groups of 32 outputs of those experts that have slots, so that threads have as much to do.
template <typename Function>
inline void for_experts(const Geometry& g, const ExpertSpace& s, int64_t groups, const Share& share, const Function& f) {
  const auto cost = [&](int e) { return s.rows(e) ? s.rows(e) + kReading : 0; };
  int64_t total = 0, before = 0;
  for (int e = 0; e < g.experts; e++) total += groups * cost(e);
  const int64_t begin = total * share.thread / share.threads, end = total * (share.thread + 1) / share.threads;
  for (int e = 0; e < g.experts; before += groups * cost(e), e++) {
    if (!s.rows(e)) continue;
    const auto reached = [&](int64_t at) { return std::clamp<int64_t>((at - before + cost(e) - 1) / cost(e), 0, groups); };
    if (const int64_t first = reached(begin), last = reached(end); first < last) f(e, first, last);
  }
}

// x += what the experts make of its norm, whose inputs are in `narrow`, by all threads. few: each has a narrow of its own.
inline void run_experts(const Geometry& g, const Layer& layer, const Inputs& narrow, float* x, int64_t rows, const ExpertSpace& s,
                        const Share& share, bool few, StageClock& clock) {
  constexpr int64_t blocks = kGroup / kLanes;
  const int64_t count = rows * g.experts_per_token, wide = g.expert_width;
  route_scores(g, layer, x, rows, s.scores, share);
#pragma omp barrier
  // Of few slots one thread chooses, sooner than threads would wait once more.
  const auto [first, last] = !few ? share.of(rows) : std::pair<int64_t, int64_t>(0, share.thread ? 0 : rows);
  for (int64_t row = first; row < last; row++)
    choose_experts(g, s.scores + row * g.experts, s.chances + row * g.experts_per_token, s.chosen + row * g.experts_per_token);
  if (!few) {
#pragma omp barrier
  }
  if (!share.thread) sort_entries(g, count, s);
#pragma omp barrier
  gather_inputs(g, narrow, count, s, share);
#pragma omp barrier
  clock.mark(kRounding);
  for_experts(g, s, wide / kGroup, share, [&](int e, int64_t from, int64_t to) {
    const Weight& w = layer.experts[e].gate_up;
    const Inputs in = s.of(s.inputs, e, g.hidden);
    float* const made = s.gate_up + s.starts[e] * 2 * wide;
    for (const int64_t half : {int64_t{0}, wide / kLanes})
      multiply_range(w, half + from * blocks, half + to * blocks, in, in.rows, {made, 2 * wide, false});
    gated_inputs(g, made, s.of(s.wide, e, wide), in.rows, from, to);
  });
#pragma omp barrier
  for_experts(g, s, g.hidden / kGroup, share, [&](int e, int64_t from, int64_t to) {
    float* const made = s.out + s.starts[e] * g.hidden;
    multiply_range(layer.experts[e].down, from * blocks, to * blocks, s.of(s.wide, e, wide), s.rows(e), {made, g.hidden, false});
  });
#pragma omp barrier
  clock.mark(kLinears);
  const int64_t parts = g.hidden / kLanes;
  const auto [begin, end] = share.of(rows * parts);
  for (int64_t at = begin; at < end; at++) {
    const int64_t row = at / parts, column = at % parts * kLanes;
    F total = set1(0.0f);
    for (int64_t i = row * g.experts_per_token; i < (row + 1) * g.experts_per_token; i++)
      total = fma(set1(s.chances[i]), load(s.out + s.places[i] * g.hidden + column), total);
    float* const to = x + row * g.hidden + column;
    store(to, load(to) + total);
  }
#pragma omp barrier
}
