// Queries, keys and values of new slots: norms and rotary embedding, and into the cache. Included inside a namespace, after
// workspace.h.

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
