// Decoder layers over a batch of new slots: all stages of all layers in one parallel region, with a barrier after each
// stage. Every thread takes a fixed share of a stage. Included inside a namespace, after experts.h.

constexpr int64_t kFewRows = 8;  // which each thread norms for itself, sooner than it would wait for others

struct Workspace {
  float *qkv, *gate_up;
  float* added;     // [T, hidden], what a norm is to be applied to before it is added
  float* inverse;   // [T, 2], of wide norms of q and k
  float* low;           // of each of Batch.adapted [T, rank], of which its slots are used
  uint8_t* low_inputs;  // the same as inputs
  Inputs narrow, heads, wide;  // inputs of the linears: [T, hidden], [T, heads * head_dim], [T, intermediate]
  ExpertSpace experts;
  bool few;         // each thread has a narrow of its own
  uint8_t* inputs;  // where they begin
};

inline int64_t qkv_width(const Geometry& g) { return static_cast<int64_t>(g.heads + 2 * g.kv_heads) * g.head_dim; }

// Lays the workspace out from `p`; with null, only its size counts.
// rank: of all adapters that some slots pass, together; 0: none do.
inline int64_t lay_out(const Geometry& g, int64_t rows, uint8_t* p, Workspace* w, int64_t rank = 0) {
  const int64_t heads = static_cast<int64_t>(g.heads) * g.head_dim;
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    uint8_t* const place = p + at;
    at += aligned(bytes);
    return place;
  };
  w->qkv = reinterpret_cast<float*>(take(rows * qkv_width(g) * 4));
  w->gate_up = reinterpret_cast<float*>(take(rows * 2 * g.intermediate * 4));
  w->added = reinterpret_cast<float*>(take(rows * g.hidden * 4));
  w->inverse = reinterpret_cast<float*>(take(rows * 2 * 4));
  w->low = reinterpret_cast<float*>(take(rows * rank * 4));
  w->low_inputs = take(inputs_bytes(rows, rank));
  if (g.experts) lay_out(g, rows, take, &w->experts);
  w->few = rows <= kFewRows;
  w->heads = inputs_at(take(inputs_bytes(rows, heads)), rows, heads);
  w->wide = inputs_at(take(inputs_bytes(rows, g.intermediate)), rows, g.intermediate);
  w->inputs = take(aligned(inputs_bytes(rows, g.hidden)) * (w->few ? omp_get_max_threads() : 1));
  return at;
}

// The workspace with the inputs that a thread makes and reads.
inline Workspace of_thread(const Geometry& g, int64_t rows, Workspace w, const Share& share) {
  w.narrow = inputs_at(w.inputs + (w.few ? share.thread * aligned(inputs_bytes(rows, g.hidden)) : 0), rows, g.hidden);
  return w;
}

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

// Of wide norms, over all heads of q or of k: 1 / rms of each row's -> to [rows, 2].
inline void wide_inverses(const Geometry& g, const float* qkv, int64_t rows, float* to, const Share& share) {
  const int64_t q = static_cast<int64_t>(g.heads) * g.head_dim, k = static_cast<int64_t>(g.kv_heads) * g.head_dim;
  const auto [first, last] = share.of(rows * 2);
  for (int64_t at = first; at < last; at++) {
    const float* x = qkv + at / 2 * qkv_width(g);
    to[at] = at % 2 ? inverse_rms(x + q, k, g.eps) : inverse_rms(x, q, g.eps);
  }
}

// In place: the norm of one head if it has one, then rotary embedding (rotary.py says how cos and sin are laid out).
// wide: of a wide norm 1 / rms; null: it is the head's own.
inline void rotate(float* head, const float* norm, const float* wide, const Angles& angles, int64_t row, const Geometry& g) {
  const int half = g.head_dim / 2;
  if (norm) {
    const F inverse = set1(wide ? *wide : inverse_rms(head, g.head_dim, g.eps));
    for (int d = 0; d < g.head_dim; d += kLanes) store(head + d, load(head + d) * inverse * load(norm + d));
  }
  if (!angles.cos) return;
  const int64_t at = (angles.positions ? angles.positions[row] : row) * g.head_dim;
  const float *cos = angles.cos + at, *sin = angles.sin + at;
  for (int d = 0; d < half; d += kLanes) {
    const F a = load(head + d), b = load(head + half + d);
    store(head + d, fma(a, load(cos + d), b * load(sin + d)));
    store(head + half + d, fma(b, load(cos + half + d), a * load(sin + half + d)));
  }
}

template <typename Value>
inline void write_head(const Kv<Value>& kv, int64_t at, const float* x, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += kLanes) store(kv.data + at * head_dim + d, load(x + d));
}
inline void write_head(const Kv<Int8>& kv, int64_t at, const float* x, int64_t head_dim) {
  F most = set1(0.0f);
  for (int64_t d = 0; d < head_dim; d += kLanes) most = max(most, abs(load(x + d)));
  const float top = largest(most);
  const F inverse = set1(top > 0 ? 127.0f / top : 0.0f);
  for (int64_t d = 0; d < head_dim; d += kLanes) store_bytes(&kv.data[at * head_dim + d].code, round(load(x + d) * inverse));
  kv.scales[at] = top / 127.0f;
}

template <typename Value>
inline void rotate_and_write(const Geometry& g, const Layer& layer, const Batch& batch, float* qkv, const float* inverse,
                             const Kv<Value>& kv, const Share& share) {
  const int64_t heads = g.heads + 2 * g.kv_heads;
  const Angles& angles = batch.angles[layer.angles];
  const auto [first, last] = share.of(batch.slots * heads);
  for (int64_t at = first; at < last; at++) {
    const int64_t row = at / heads, head = at % heads;
    float* x = qkv + at * g.head_dim;
    const bool is_q = head < g.heads;
    if (head < g.heads + g.kv_heads) {
      const float* norm = is_q ? layer.q_norm : layer.k_norm;
      const float* const wide = norm && g.wide_norms ? inverse + 2 * row + !is_q : nullptr;
      if (wide) norm += (is_q ? head : head - g.heads) * g.head_dim;
      rotate(x, norm, wide, angles, row, g);
    }
    if (is_q) continue;
    // A slot holds the keys of all KV heads, then their values: in the order they have here.
    write_head(kv, batch.write_slots[row] * 2 * g.kv_heads + head - g.heads, x, g.head_dim);
  }
}

// Some rows only, ascending; those that follow each other at once.
inline void multiply_rows(const Weight& w, const Inputs& x, const Adapted& rows, const Output& out, const Share& share,
                          bool halves = false) {
  for_share(w, halves, share, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block++) {
      for (int64_t i = 0; i < rows.count;) {
        const int64_t row = rows.rows[i];
        if (i + 4 <= rows.count && rows.rows[i + 3] == row + 3 && row % kRowsAtOnce + 4 <= kRowsAtOnce) {
          multiply_block<8, 4>(w, block, x, row, out);
          i += 4;
        } else {
          multiply_block<8, 1>(w, block, x, row, out);
          i++;
        }
      }
    }
  });
}

// f(slots, adapter, low, low_inputs) of each adapter of linear `which` (of all layers, four of each), with its part of the workspace.
template <typename Function>
inline void for_adapters(const Batch& batch, int which, const Workspace& w, const Function& f) {
  int64_t before = 0;  // ranks
  for (int64_t i = 0; i < batch.adaptations; i++) {
    const Adapted& m = batch.adapted[i];
    const Adapter& adapter = m.adapters[which];
    const int64_t rank = adapter.down.outputs;
    if (adapter.down.data)
      f(m, adapter, w.low + batch.slots * before, inputs_at(w.low_inputs + inputs_bytes(batch.slots, before), batch.slots, rank));
    before += m.rank;
  }
}

// y = W x, and for slots that pass adapters y += up(down(x)). A thread adds to the outputs that it has made. A slot's sums are made
// in the same order, whatever other slots pass.
inline void project(const Weight& weight, int which, const Inputs& x, const Batch& batch, const Output& out, const Workspace& w,
                    const Share& share, bool halves = false) {
  multiply(weight, x, batch.slots, out, share, halves);
  bool any = false;
  for_adapters(batch, which, w, [&](const Adapted& m, const Adapter& adapter, float* low, const Inputs&) {
    any = true;
    multiply_rows(adapter.down, x, m, {low, adapter.down.outputs, false}, share);
  });
  if (!any) return;
#pragma omp barrier
  for_adapters(batch, which, w, [&](const Adapted& m, const Adapter&, float* low, const Inputs& inputs) {
    const int64_t groups = inputs.groups();
    const auto [first, last] = share.of(m.count * groups);
    for (int64_t i = first; i < last; i++) {
      const int64_t at = m.rows[i / groups] * groups + i % groups;
      quantize(inputs, at, load(low + at * kGroup), load(low + at * kGroup + kLanes));
    }
  });
#pragma omp barrier
  for_adapters(batch, which, w, [&](const Adapted& m, const Adapter& adapter, float*, const Inputs& inputs) {
    multiply_rows(adapter.up, inputs, m, {out.y, out.stride, true}, share, halves);
  });
}

// Layer `index`, by all threads. taken: 0 at first; pieces of attention differ in length, so behind its first a thread takes the next.
template <typename Value>
void run_layer(const Geometry& g, const Layer& layer, int index, const Kv<Value>& cache, const Batch& batch, const AttentionPlan& plan,
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
  rotate_and_write(g, layer, batch, w.qkv, w.inverse, cache, share);
#pragma omp barrier
  const auto take = [&] { return share.threads + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); };
  for (int64_t piece = share.thread, next; piece < pieces; piece = next) {
    next = take();
    attend(g, cache, plan.slots.data(), plan.pieces[piece], next < pieces ? &plan.pieces[next] : nullptr, layer.window, w.qkv,
           qkv_width(g), w.heads, scratch);
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
      const Kv<Value> cache = {static_cast<Value*>(kv[i]), batch.kv_scales ? batch.kv_scales[i] : nullptr};
      run_layer(g, layers[i], i, cache, batch, plan, &taken[i], x, w, *scratch, share, clock);
      float* const to = batch.features ? batch.features[i] : nullptr;
      // The next layer changes x only after barriers.
      for (int64_t m = first; to && m < last; m++)
        std::memcpy(to + m * g.hidden, x + batch.emit[m] * g.hidden, sizeof(float) * g.hidden);
    }
    norm_rows(x, batch.norm, g.eps, batch.read, batch.reading, g.hidden, batch.states, share);
  }
}

inline void linear(const Weight& w, const float* x, int64_t rows, float* y, uint8_t* memory) {
  const Inputs inputs = inputs_at(memory, rows, w.inputs);
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    plain_inputs(x, inputs, rows, share);
#pragma omp barrier
    multiply(w, inputs, rows, {y, w.outputs, false}, share);
  }
}

// weight [outputs, inputs], contiguous, bfloat16 or float -> packed (common.h).
template <typename Value>
void pack(int bits, const Value* weight, int64_t outputs, int64_t inputs, uint8_t* to) {
  const int64_t groups = inputs / kGroup, step = group_bytes(bits);
#pragma omp parallel
  {
    const Share share = {omp_get_thread_num(), omp_get_num_threads()};
    const auto [first, last] = share.of((outputs + kLanes - 1) / kLanes);
    for (int64_t block = first; block < last; block++) {
      for (int64_t g = 0; g < groups; g++) {
        for (int lane = 0; lane < kLanes; lane++) {
          const int64_t row = block * kLanes + lane;
          float values[kGroup] = {};
          if (row < outputs)
            for (int k = 0; k < kGroup; k += kLanes) store(values + k, load(weight + row * inputs + g * kGroup + k));
          pack_group(bits, values, lane, to + (block * groups + g) * step);
        }
      }
    }
  }
}
