// The memory that the stages of a layer work in. Included inside a namespace, after experts.h.

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
