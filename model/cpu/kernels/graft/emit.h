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
inline void choose_stages(const Weight& head, const Inputs& x, bool is_draft, const std::vector<Choosing>& rows, const Outputs& outputs,
                          float* y, Going& going, Drawing& drawing, const Share& share) {
  const auto count = static_cast<int64_t>(rows.size()), width = padded_outputs(head);
  multiply(head, x, count, {y, width, false}, share);
#pragma omp barrier
  const auto [first, last] = share.of(count);
  for (int64_t i = first; i < last; i++) {
    float* const logits = y + i * width;
    std::fill(logits + head.outputs, logits + width, -std::numeric_limits<float>::infinity());
    const int64_t best = likeliest_of(logits, width);
    going.choices[i] = {std::max<int64_t>(best, 0), true};
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

inline void emit(const Graft& graft, const Emission& e, uint8_t* memory) {
  const Geometry& g = graft.geometry;
  EmitSpace s;
  float* const context = reinterpret_cast<float*>(memory + lay_out(graft, e.rows, memory, &s));
  float* at = context + e.rows * (graft.fused ? g.hidden : graft.features * g.hidden);
  std::vector<float*> kv(graft.count);
  for (float*& layer : kv) {
    layer = at;
    at += 2 * e.rows * graft.positions * g.kv_heads * g.head_dim;
  }
  float *const logits = at, *const bounds = at + e.rows * padded_outputs(graft.head.weight);
  Going going;
  going.rows.resize(e.rows);
  for (int64_t row = 0; row < e.rows; row++) going.rows[row] = row;
  going.tokens.resize(e.rows);
  going.stops.resize(e.rows);
  going.choices.resize(e.rows);
  going.chances.assign(e.rows, 1.0f);
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
        if (index == 1) begin_stages(graft, e.features, going.rows.data(), rows, context, s.x, s, share);
        const auto [first, last] = share.of(rows);
        for (int64_t i = first; i < last; i++) embed(graft.embedding, going.tokens[i], s.embedded + i * g.hidden);
#pragma omp single
        {
          const int64_t held = index == 1 ? 0 : graft.fused ? index - 1 : graft.features + index - 1;
          going.step.reset(new MicroStep(graft, rows, going.rows.data(), held));
        }
        micro_stages(graft, *going.step, context, s.embedded, kv.data(), s.states, s, *scratch, share);
        clock.mark(kMicroSteps);
      }
      plain_inputs(index == 0 ? e.hidden : s.states, s.state, rows, share);
#pragma omp barrier
      const Head& head = index == 0 ? graft.head : graft.micro_head;
      const bool is_draft = e.checks && index > 0;
      const Outputs outputs = {index == 0 ? nullptr : graft.short_list, head.weight.outputs};
      how.clear();
      for (int64_t i = 0; e.temperatures && i < rows; i++) how.push_back(choosing_of(e, going.rows[i], index));
      if (e.top_k) choose_stages(head.weight, s.state, is_draft, how, outputs, logits, going, drawing, share);
      else multiply_best(head, s.state, rows, logits, bounds, going.best.data(), e.rows, is_draft, how.empty() ? nullptr : how.data(), outputs,
                         share);
      if (graft.count && !e.checks) stop_stages(graft, rows, going.stops.data(), s, share);
#pragma omp barrier
#pragma omp single
      {
        for (int64_t i = 0; !e.top_k && i < rows; i++) {
          const float temperature = how.empty() ? 0 : how[i].temperature;
          going.choices[i] = best_of(going, i, e.rows, share.threads, temperature, is_draft);
        }
        if (e.checks) decide_verified(graft, e, index, going);
        else decide(graft, e, index, going);
      }
      clock.mark(index == 0 ? kHeads : kMicroSteps);
    }
  }
}
