// Decoder layers over a batch of new slots: all stages of all layers in one parallel region, with a barrier after each
// stage. Every thread takes a fixed share of a stage. Included inside a namespace, after new_slots.h, project.h and attend.h.

// x [rows, width] += the norm of added.
inline void add_normed(const float* added, const float* norm, float eps, float* x, int64_t rows, int64_t width, const Share& share) {
  const int64_t parts = width / kGroup;
  const auto [first, last] = share.of(rows * parts);
  int64_t row = -1;
  F inverse = set1(0.0f);
  for (int64_t at = first; at < last; at++) {
    const int64_t column = at % parts * kGroup;
    if (at / parts != row) {
      row = at / parts;
      inverse = set1(inverse_rms(added + row * width, width, eps));
    }
    for (int64_t i = column; i < column + kGroup; i += kLanes) {
      float* const to = x + row * width + i;
      store(to, fma(load(added + row * width + i) * inverse, load(norm + i), load(to)));
    }
  }
}

// Layer `index`, by all threads. taken: 0 at first; pieces of attention differ in length, so behind its first a thread takes the next.
template <typename Value>
void run_layer(const Geometry& g, const Layer& layer, int index, const Pool<Value>& pool, const Batch& batch, const AttentionPlan& plan,
               int64_t* taken, float* x, const Workspace& shared, Scratch& scratch, const Share& share, StageClock& clock) {
  const int64_t rows = batch.slots, pieces = static_cast<int64_t>(plan.pieces.size());
  const Workspace w = of_thread(g, rows, shared, share);
  const Share inputs = w.few ? Share{0, 1} : share;
  const auto inputs_are_made = [&] {
    if (w.few) return;
#pragma omp barrier
  };
  // Onto x, by way of a norm where there is one.
  const auto add = [&](const Weight& weight, int which, const Inputs& from, const float* norm) {
    project(weight, which, from, batch, {norm ? w.added : x, g.hidden, !norm}, w, share);
#pragma omp barrier
    clock.mark(kLinears);
    if (!norm) return;
    add_normed(w.added, norm, g.eps, x, rows, g.hidden, share);
#pragma omp barrier
  };
  enter_inputs(x, layer.attn_norm, g.eps, w.narrow, rows, inputs);
  inputs_are_made();
  clock.mark(kRounding);
  project(layer.qkv, 4 * index, w.narrow, batch, {w.qkv, qkv_width(g), false}, w, share);
#pragma omp barrier
  clock.mark(kLinears);
  if (g.wide_norms) {
    wide_inverses(g, w.qkv, rows, w.inverse, share);
#pragma omp barrier
  }
  rotate_and_write(g, layer, batch, w.qkv, w.inverse, pool.layer(index), share);
#pragma omp barrier
  const auto take = [&] { return share.threads + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); };
  for (int64_t piece = share.thread, next; piece < pieces; piece = next) {
    next = take();
    attend(g, pool, index, plan, plan.pieces[piece], next < pieces ? &plan.pieces[next] : nullptr, layer.window, w.qkv, qkv_width(g),
           w.heads, scratch);
  }
#pragma omp barrier
  clock.mark(kAttention);
  add(layer.o, 4 * index + 1, w.heads, layer.attn_out_norm);
  enter_inputs(x, layer.mlp_norm, g.eps, w.narrow, rows, inputs);
  if (layer.router) return run_experts(g, layer, w.narrow, x, rows, w.experts, share, w.few, clock);
  inputs_are_made();
  clock.mark(kRounding);
  project(layer.gate_up, 4 * index + 2, w.narrow, batch, {w.gate_up, 2 * g.intermediate, false}, w, share, true);
  clock.mark(kLinears);
  const auto [first, last] = share.of(w.wide.groups());  // of the outputs that this thread has made (for_share)
  gated_inputs(g, w.gate_up, w.wide, rows, first, last);
#pragma omp barrier
  clock.mark(kRounding);
  add(layer.down, 4 * index + 3, w.wide, layer.mlp_out_norm);
}

// to [rows, D]: the rows `of` x, normed.
inline void norm_rows(const float* x, const float* weight, float eps, const int64_t* of, int64_t rows, int64_t width, float* to,
                      const Share& share) {
  const auto [first, last] = share.of(rows);
  for (int64_t i = first; i < last; i++) {
    const float* from = x + of[i] * width;
    const F inverse = set1(inverse_rms(from, width, eps));
    for (int64_t d = 0; d < width; d += kLanes) store(to + i * width + d, load(from + d) * inverse * load(weight + d));
  }
}

template <typename Value>
void run_layers(const Geometry& g, const Layer* layers, int count, void* const* kv, const Batch& batch, float* x, uint8_t* memory) {
  Workspace w;
  int64_t rank = 0;
  for (int64_t i = 0; i < batch.adaptations; i++) rank += batch.adapted[i].rank;
  lay_out(g, batch.slots, memory, &w, rank);
  const AttentionPlan plan(g, batch, omp_get_max_threads());
  std::vector<int64_t> taken(count);
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    const std::unique_ptr<Scratch> scratch(new Scratch);
    const auto [first, last] = share.of(batch.emitting);
    StageClock clock(batch.clock, share);
    for (int i = 0; i < count; i++) {
      run_layer(g, layers[i], i, Pool<Value>{kv, batch.kv_scales}, batch, plan, &taken[i], x, w, *scratch, share, clock);
      float* const to = batch.features ? batch.features[i] : nullptr;
      // The next layer changes x only after barriers.
      for (int64_t m = first; to && m < last; m++)
        std::memcpy(to + m * g.hidden, x + batch.emit[m] * g.hidden, sizeof(float) * g.hidden);
    }
    norm_rows(x, batch.norm, g.eps, batch.read, batch.reading, g.hidden, batch.states, share);
  }
}
