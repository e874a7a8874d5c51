// Groups of tokens in one call: the head on the trunk's states, then micro-steps for the rows that go on. The stages are those
// of layers.h, for all threads with barriers. Included inside a namespace, after micro.h and decide.h.

inline Choosing choosing_of(const Emission& e, int64_t row, int64_t index) {
  const auto key = static_cast<uint64_t>(e.keys[row * e.width + index]);
  const float temperature = warm(e.temperatures[row]);
  if (!e.top_k) return {temperature, 0, 1, 0, key};
  return {temperature, e.top_k[row], e.top_p[row], e.min_p[row], key};
}

// All logits of each row, in whole vectors, and what it chooses, where filters have to see them. By all threads; y: [R, padded
// outputs], to work in.
inline void choose_filtered(const Weight& head, const Inputs& x, bool is_draft, const std::vector<Choosing>& rows, const Outputs& outputs,
                          const RowChanges* changes, float* y, Going& going, Drawing& drawing, const Share& share) {
  const auto count = static_cast<int64_t>(rows.size()), width = padded_outputs(head);
  multiply(head, x, count, {y, width, false}, share);
#pragma omp barrier
  const auto [first, last] = share.of(count);
  for (int64_t i = first; i < last; i++) {
    float* const logits = y + i * width;
    std::fill(logits + head.outputs, logits + width, -std::numeric_limits<float>::infinity());
    for (int64_t block = 0; changes && block < width / kLanes; block++) changes[i].apply(logits, block, outputs);
    const int64_t best = likeliest_of(logits, width);
    going.choices[i] = {std::max<int64_t>(best, 0), true, best >= 0};
    const Choosing& how = rows[i];
    const bool is_sampled = how.temperature > 0;
    if (best < 0 || !(is_sampled || is_draft)) continue;
    const Drawn drawn = is_sampled ? draw(logits, width, best, how, outputs, drawing) : Drawn{best, 0, logits[best]};
    going.choices[i] = {drawn.output, drawn.output == best};
    if (!is_draft) continue;
    const float chance = chance_of_output(logits, width, drawn.output, logits[best], is_sampled ? how.temperature : 1);
    going.choices[i].chance = is_sampled ? chance_with_noise(chance, drawn, how.temperature) : chance;
  }
}

inline int64_t emit_memory(const Graft& graft, int64_t rows) {
  EmitSpace s;
  const Geometry& g = graft.geometry;
  const int64_t context = graft.fused ? g.hidden : graft.features * g.hidden;
  const int64_t kv = 2 * static_cast<int64_t>(graft.count) * graft.positions * g.kv_heads * g.head_dim;
  return lay_out(graft, rows, nullptr, &s) + rows * (context + kv + padded_outputs(graft.head.weight) / kLanes * (kLanes + 1)) * 4;
}

// What the head and the micro-steps' head are worked out in.
struct EmitMemory {
  EmitSpace s;
  float* context;
  std::vector<float*> kv;
  float *logits, *bounds;

  EmitMemory(const Graft& graft, int64_t rows, uint8_t* memory) : kv(graft.count) {
    const Geometry& g = graft.geometry;
    context = reinterpret_cast<float*>(memory + lay_out(graft, rows, memory, &s));
    float* at = context + rows * (graft.fused ? g.hidden : graft.features * g.hidden);
    for (float*& layer : kv) {
      layer = at;
      at += 2 * rows * graft.positions * g.kv_heads * g.head_dim;
    }
    logits = at, bounds = at + rows * padded_outputs(graft.head.weight);
  }
};

inline Going going_of(int64_t rows, bool changes) {
  Going going;
  going.rows.resize(rows);
  going.tokens.resize(rows);
  going.stops.resize(rows);
  going.choices.resize(rows);
  going.chances.assign(rows, 1.0f);
  going.changes.resize(changes ? rows : 0);
  return going;
}

// Token `index` of the groups of those that go on, by their states [R, D] -> going.best, or, where rows have filters, going.choices. By all
// threads; those need a barrier before what is found.
inline void choose_stages(const Graft& graft, const Emission& e, int64_t index, const float* states, EmitMemory& m, Going& going,
                          std::vector<Choosing>& how, Drawing& drawing, const Share& share) {
  const auto rows = static_cast<int64_t>(going.rows.size());
  const Head& head = index == 0 ? graft.head : graft.micro_head;
  const bool is_draft = e.checks && index > 0;
  const Outputs outputs = {index == 0 ? nullptr : graft.short_list, head.weight.outputs};
  plain_inputs(states, m.s.state, rows, share);
  if (e.changes) {
    const auto [first, last] = share.of(rows);
    for (int64_t i = first; i < last; i++) {
      float* const unused = m.logits + i * padded_outputs(graft.head.weight);  // as yet
      find_changes(e, going.rows[i], index, outputs, reinterpret_cast<int32_t*>(unused), going.changes[i]);
    }
  }
#pragma omp barrier
  how.clear();
  for (int64_t i = 0; e.temperatures && i < rows; i++) how.push_back(choosing_of(e, going.rows[i], index));
  const RowChanges* const changes = e.changes ? going.changes.data() : nullptr;
  if (e.top_k) choose_filtered(head.weight, m.s.state, is_draft, how, outputs, changes, m.logits, going, drawing, share);
  else multiply_best(head, m.s.state, rows, m.logits, m.bounds, going.best.data(), e.rows, is_draft, how.empty() ? nullptr : how.data(), outputs,
                     changes, share);
}

// One thread, behind choose_stages and a barrier: going.choices.
inline void take_best(const Emission& e, int64_t index, const std::vector<Choosing>& how, int threads, Going& going) {
  for (size_t i = 0; !e.top_k && i < going.rows.size(); i++) {
    const float temperature = how.empty() ? 0 : how[i].temperature;
    going.choices[i] = best_of(going, i, e.rows, threads, temperature, e.checks && index > 0);
  }
}

inline void emit(const Graft& graft, const Emission& e, uint8_t* memory) {
  const Geometry& g = graft.geometry;
  EmitMemory m(graft, e.rows, memory);
  Going going = going_of(e.rows, e.changes);
  for (int64_t row = 0; row < e.rows; row++) going.rows[row] = row;
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    const std::unique_ptr<Scratch> scratch(new Scratch);
    Drawing drawing;
    std::vector<Choosing> how;
    StageClock clock(e.clock, share);
#pragma omp single
    going.best.resize(e.rows * share.threads);
    for (int64_t index = 0; index < e.width && !going.rows.empty(); index++) {
      const auto rows = static_cast<int64_t>(going.rows.size());
      if (index > 0) {
        if (index == 1) begin_stages(graft, e.features, going.rows.data(), rows, m.context, m.s.x, m.s, share);
        const auto [first, last] = share.of(rows);
        for (int64_t i = first; i < last; i++) embed(graft.embedding, going.tokens[i], m.s.embedded + i * g.hidden);
#pragma omp single
        {
          const int64_t held = index == 1 ? 0 : graft.fused ? index - 1 : graft.features + index - 1;
          going.step.reset(new MicroStep(graft, rows, going.rows.data(), held));
        }
        micro_stages(graft, *going.step, m.context, m.s.embedded, m.kv.data(), m.s.states, m.s, *scratch, share);
        clock.mark(kMicroSteps);
      }
      choose_stages(graft, e, index, index == 0 ? e.hidden : m.s.states, m, going, how, drawing, share);
      if (graft.count && !e.checks) stop_stages(graft, rows, going.stops.data(), m.s, share);
#pragma omp barrier
#pragma omp single
      {
        take_best(e, index, how, share.threads, going);
        if (e.checks) decide_verified(graft, e, index, going);
        else decide(graft, e, index, going);
      }
      clock.mark(index == 0 ? kHeads : kMicroSteps);
    }
  }
}

// Token `index` of the groups of some rows, ascending, by their states [R, D]: what emit() chooses, for rows whose masks are made token
// by token -> tokens [R], of drafts their chances [R], and whether anything is possible [R].
inline void choose(const Graft& graft, const Emission& e, int64_t index, const int64_t* rows, int64_t count, const float* states,
                   int64_t* tokens, float* chances, bool* possible, uint8_t* memory) {
  EmitMemory m(graft, e.rows, memory);
  Going going = going_of(count, e.changes);
  std::copy(rows, rows + count, going.rows.begin());
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    Drawing drawing;
    std::vector<Choosing> how;
#pragma omp single
    going.best.resize(e.rows * share.threads);
    choose_stages(graft, e, index, states, m, going, how, drawing, share);
#pragma omp barrier
#pragma omp single
    take_best(e, index, how, share.threads, going);
  }
  for (int64_t i = 0; i < count; i++) {
    const Choice& choice = going.choices[i];
    tokens[i] = index > 0 && graft.short_list ? graft.short_list[choice.output] : choice.output;
    chances[i] = choice.chance, possible[i] = choice.possible;
  }
}
