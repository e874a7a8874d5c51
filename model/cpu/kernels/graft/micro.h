// The parts of emitting groups beside the choice: stop head and micro-steps, for all threads with barriers.
// Included inside a namespace, after head.h.

// A micro-step of R rows that hold `held` positions each, in the blocks of the cache that `blocks` names.
struct MicroStep {
  int64_t rows, positions;  // new ones of each row
  const int64_t* blocks;
  std::vector<int64_t> write_slots, context_slots, query_slots, taken;
  std::vector<float> cos, sin;
  Batch batch;
  std::unique_ptr<AttentionPlan> plan;

  MicroStep(const Graft& graft, int64_t rows, const int64_t* blocks, int64_t held)
      : rows(rows), positions(held == 0 && !graft.fused ? graft.features + 1 : 1), blocks(blocks), context_slots(rows, held + positions),
        query_slots(rows, positions), taken(graft.count) {
    const int64_t first = held * graft.geometry.head_dim, last = (held + positions) * graft.geometry.head_dim;
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t i = held; i < held + positions; i++) write_slots.push_back(blocks[row] * graft.positions + i);
      cos.insert(cos.end(), graft.cos + first, graft.cos + last);
      sin.insert(sin.end(), graft.sin + first, graft.sin + last);
    }
    batch = {rows * positions, rows, {{cos.data(), sin.data(), nullptr}}, write_slots.data(), blocks, context_slots.data(), query_slots.data(),
             nullptr, nullptr, nullptr, 1, graft.positions, 32, nullptr, nullptr, 0, nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0, nullptr};
    plan.reset(new AttentionPlan(graft.geometry, batch, omp_get_max_threads()));
  }
};

struct EmitSpace {  // for at most R rows that go on, of M
  Workspace layers;
  float *x, *embedded, *states, *stop_a, *stop_b;
  Inputs state, features;
};

inline int64_t lay_out(const Graft& graft, int64_t rows, uint8_t* p, EmitSpace* s) {
  const int64_t d = graft.geometry.hidden, most = graft.fused || !graft.count ? 1 : graft.features + 1;
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    uint8_t* const place = p + at;
    at += aligned(bytes);
    return place;
  };
  for (float** part : {&s->embedded, &s->states, &s->stop_a, &s->stop_b}) *part = reinterpret_cast<float*>(take(rows * d * 4));
  s->x = reinterpret_cast<float*>(take(rows * most * d * 4));
  s->state = inputs_at(take(inputs_bytes(rows, d)), rows, d);
  const int64_t wide = graft.fused ? graft.features * d : 0;
  s->features = inputs_at(take(inputs_bytes(rows, wide)), rows, wide);
  at += lay_out(graft.geometry, graft.count ? rows * most : 0, p + at, &s->layers);
  return at;
}

inline void copy(const float* from, float* to, int64_t width) { std::memcpy(to, from, sizeof(float) * width); }

// features of each layer [M, D] of rows blocks[R] -> context [M, D] of these, or with positions [M, F, D].
inline void begin_stages(const Graft& graft, const float* const* features, const int64_t* blocks, int64_t rows, float* context,
                         float* projected, const EmitSpace& s, const Share& share) {
  const int64_t d = graft.geometry.hidden, n = graft.features, groups = d / kGroup;
  const auto [first, last] = share.of(rows * n);
  for (int64_t at = first; at < last; at++) {
    const int64_t row = at / n, feature = at % n;
    const float* x = features[feature] + blocks[row] * d;
    if (!graft.fused) {
      copy(x, context + (blocks[row] * n + feature) * d, d);
      continue;
    }
    const F inverse = set1(inverse_rms(x, d, graft.geometry.eps));
    const float* weight = graft.feature_norm + feature * d;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t i = g * kGroup;
      quantize(s.features, at * groups + g, load(x + i) * inverse * load(weight + i),
               load(x + i + kLanes) * inverse * load(weight + i + kLanes));
    }
  }
#pragma omp barrier
  if (!graft.fused) return;
  multiply(graft.feature_proj, s.features, rows, {projected, d, false}, share);
#pragma omp barrier
  const auto [from, until] = share.of(rows);
  for (int64_t row = from; row < until; row++) copy(projected + row * d, context + blocks[row] * d, d);
#pragma omp barrier
}

// embedded [R, D] of the newest tokens -> states [R, D]. kv: of each layer [blocks, positions, 2, kv_heads, head_dim].
inline void micro_stages(const Graft& graft, MicroStep& step, const float* context, const float* embedded, float* const* kv,
                         float* states, const EmitSpace& s, Scratch& scratch, const Share& share) {
  const Geometry& g = graft.geometry;
  const int64_t d = g.hidden, n = step.positions;
  if (graft.fused) norm_inputs(embedded, graft.embedding_norm, g.eps, s.state, step.rows, share);
  const auto [first, last] = share.of(step.rows);
  for (int64_t row = first; row < last; row++) {
    if (n > 1) copy(context + step.blocks[row] * graft.features * d, s.x + row * n * d, graft.features * d);
    copy(graft.fused ? context + step.blocks[row] * d : embedded + row * d, s.x + (row * n + n - 1) * d, d);
  }
#pragma omp barrier
  if (graft.fused) {
    multiply(graft.embedding_proj, s.state, step.rows, {s.x, d, true}, share);
#pragma omp barrier
  }
  StageClock clock(nullptr, share);  // whoever calls this has one
  for (int i = 0; i < graft.count; i++)
    run_layer(g, graft.layers[i], i, Pool<float>{reinterpret_cast<void* const*>(kv), nullptr}, step.batch, *step.plan, &step.taken[i], s.x, s.layers,
              scratch, share, clock);
  for (int64_t row = first; row < last; row++) {
    const float* x = s.x + (row * n + n - 1) * d;
    float* to = states + row * d;
    if (!graft.norm) {
      copy(x, to, d);
      continue;
    }
    const F inverse = set1(inverse_rms(x, d, g.eps));
    for (int64_t i = 0; i < d; i += kLanes) store(to + i, load(x + i) * inverse * load(graft.norm + i));
  }
#pragma omp barrier
}

inline void silu_inputs(const float* x, const Inputs& to, int64_t rows, const Share& share) {
  const auto [first, last] = share.of(rows * to.groups());
  for (int64_t at = first; at < last; at++)
    quantize(to, at, silu(load(x + at * kGroup)), silu(load(x + at * kGroup + kLanes)));
}

// s.state holds the states [R, D] -> stops [R], before they are calibrated. s.state is overwritten.
inline void stop_stages(const Graft& graft, int64_t rows, float* stops, const EmitSpace& s, const Share& share) {
  const int64_t d = graft.geometry.hidden;
  multiply(graft.stop[0], s.state, rows, {s.stop_a, d, false}, share);
#pragma omp barrier
  silu_inputs(s.stop_a, s.state, rows, share);
#pragma omp barrier
  multiply(graft.stop[1], s.state, rows, {s.stop_b, d, false}, share);
#pragma omp barrier
  silu_inputs(s.stop_b, s.state, rows, share);
#pragma omp barrier
  multiply(graft.stop[2], s.state, rows, {stops, 1, false}, share);
#pragma omp barrier
}

inline float calibrated(const Graft& graft, float stop, int64_t index) {
  const volatile float scaled = stop * graft.stop_scale[index];  // rounded, as torch does
  return scaled + graft.stop_bias[index];
}

inline void stop_logits(const Graft& graft, const float* states, int64_t rows, float* stops, uint8_t* memory) {
  EmitSpace s;
  lay_out(graft, rows, memory, &s);
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    plain_inputs(states, s.state, rows, share);
#pragma omp barrier
    stop_stages(graft, rows, stops, s, share);
  }
}

inline void micro_begin(const Graft& graft, const float* const* features, int64_t rows, float* context, uint8_t* memory) {
  EmitSpace s;
  lay_out(graft, rows, memory, &s);
  std::vector<int64_t> blocks(rows);
  for (int64_t row = 0; row < rows; row++) blocks[row] = row;
#pragma omp parallel
  begin_stages(graft, features, blocks.data(), rows, context, s.x, s, {omp_get_thread_num(), omp_get_num_threads()});
}

inline void micro_state(const Graft& graft, const float* context, const float* embedded, const int64_t* blocks, int64_t rows,
                        int64_t held, float* const* kv, float* states, uint8_t* memory) {
  EmitSpace s;
  lay_out(graft, rows, memory, &s);
  MicroStep step(graft, rows, blocks, held);
#pragma omp parallel
  {
    const std::unique_ptr<Scratch> scratch(new Scratch);
    micro_stages(graft, step, context, embedded, kv, states, s, *scratch, {omp_get_thread_num(), omp_get_num_threads()});
  }
}
