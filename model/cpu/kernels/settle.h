// Which slots of a chunk stay when it settles, and the move of what they hold; each layer and KV head chooses for itself
// (slot_choice.py, which is the plain reference). Included inside a namespace, after layers.h.

template <typename Value>
struct Numbers {  // of one head in a slot
  const Value* data;
  float scale;  // of codes

  F at(int64_t d) const {
    const F x = load(data + d);
    if constexpr (std::is_same_v<Value, Int8>) return x * set1(scale);
    return x;
  }
};

// Of one key its dimensions without its position -> to [head_dim].
template <typename Value>
inline void turn_back(const Numbers<Value>& key, const Angles& angles, int64_t row, int64_t head_dim, float* to) {
  const int64_t half = head_dim / 2;
  for (int64_t d = 0; !angles.cos && d < head_dim; d += kLanes) store(to + d, key.at(d));
  if (!angles.cos) return;
  const float *cos = angles.cos + row * head_dim, *sin = angles.sin + row * head_dim;
  for (int64_t d = 0; d < half; d += kLanes) {
    const F a = key.at(d), b = key.at(half + d);
    store(to + d, a * load(cos + d) - b * load(sin + d));
    store(to + half + d, b * load(cos + half + d) - a * load(sin + half + d));
  }
}

inline float dot(const float* a, const float* b, int64_t width) {
  F total = set1(0.0f);
  for (int64_t d = 0; d < width; d += kLanes) total = fma(load(a + d), load(b + d), total);
  return sum(total);
}

template <typename Value>
inline float norm(const Numbers<Value>& x, int64_t width) {
  F total = set1(0.0f);
  for (int64_t d = 0; d < width; d += kLanes) total = fma(x.at(d), x.at(d), total);
  return std::sqrt(sum(total));
}

// The scores of a head's tokens -> scores [C].
template <typename Value>
void settle_scores(const Settling& s, const Kv<Value>& kv, int64_t layer, int64_t head, float* keys, float* mean, float* scores) {
  const int64_t dim = s.head_dim;
  const auto numbers = [&](int64_t at) { return Numbers<Value>{kv.data + at * dim, kv.scales ? kv.scales[at] : 1.0f}; };
  const float* probe = s.probe ? s.probe + (layer * s.kv_heads + head) * (dim + 1) : nullptr;
  std::fill(mean, mean + dim, 0.0f);
  for (int64_t i = 0; i < s.candidates; i++) {
    const int64_t key = s.from[i] * 2 * s.kv_heads + head;
    float* turned = keys + i * dim;
    turn_back(numbers(key), s.angles[layer], i, dim, turned);
    if (probe) {
      scores[i] = dot(turned, probe, dim) + probe[dim] * std::log(std::max(norm(numbers(key + s.kv_heads), dim), 1e-6f));
      continue;
    }
    const F inverse = set1(1.0f / std::max(norm<float>({turned, 1.0f}, dim), 1e-12f));
    for (int64_t d = 0; d < dim; d += kLanes) {
      const F unit = load(turned + d) * inverse;
      store(turned + d, unit);
      store(mean + d, load(mean + d) + unit);
    }
  }
  if (probe) return;
  const float length = std::max(norm<float>({mean, 1.0f}, dim), 1e-8f);
  for (int64_t i = 0; i < s.candidates; i++) scores[i] = -dot(keys + i * dim, mean, dim) / length;
}

// What a head keeps of a chunk, copied.
template <typename Value>
struct Held {
  std::vector<Value> data;  // [tokens, 2, head_dim]
  std::vector<float> scales;
};

template <typename Value>
void settle(const Settling& s, void* const* kv) {
  const int64_t dim = s.head_dim, pieces = s.layers * s.kv_heads;
  const Places& places = *s.places;
  const Pool<Value> pool = {kv, s.kv_scales};
  std::vector<Held<Value>> held(pieces);
#pragma omp parallel
  {
    std::vector<float> keys(s.candidates * dim), mean(dim), scores(s.candidates);
    std::vector<int64_t> order(s.candidates);
#pragma omp for schedule(static)
    for (int64_t piece = 0; piece < pieces; piece++) {
      const int64_t layer = piece / s.kv_heads, head = piece % s.kv_heads, kept = settled_tokens(places, piece);
      const Kv<Value> own = pool.layer(layer);
      settle_scores(s, own, layer, head, keys.data(), mean.data(), scores.data());
      for (int64_t i = 0; i < s.candidates; i++) scores[i] = std::nearbyint(scores[i] * s.precision), order[i] = i;
      // Of equals the newest stay.
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] < scores[b]; });
      const auto stay = order.end() - kept;
      std::sort(stay, order.end());
      held[piece].data.resize(2 * kept * dim);
      for (int64_t i = 0; i < 2 * kept; i++) {
        const int64_t at = (s.from[stay[i / 2]] * 2 + i % 2) * s.kv_heads + head;
        std::memcpy(held[piece].data.data() + i * dim, own.data + at * dim, dim * sizeof(Value));
        if (own.scales) held[piece].scales.push_back(own.scales[at]);
      }
    }
    // Only here, when all that stays was copied: places at s.to may be those of candidates.
#pragma omp for schedule(static)
    for (int64_t piece = 0; piece < pieces; piece++) {
      const int64_t own = places.lends[piece] ? places.kept - places.lent : places.kept, kept = settled_tokens(places, piece);
      for (int64_t i = 0; i < 2 * kept; i++) {
        const int64_t token = i / 2, beyond = token - own;
        const int64_t place = beyond < 0 ? piece : places.lenders[piece * places.most + beyond / places.lent];
        const int64_t slot = s.to[beyond < 0 ? token : places.kept - places.lent + beyond % places.lent];
        const Kv<Value> of = pool.layer(place / s.kv_heads);
        const int64_t at = (slot * 2 + i % 2) * s.kv_heads + place % s.kv_heads;
        std::memcpy(of.data + at * dim, held[piece].data.data() + i * dim, dim * sizeof(Value));
        if (of.scales) of.scales[at] = held[piece].scales[i];
      }
    }
  }
}
