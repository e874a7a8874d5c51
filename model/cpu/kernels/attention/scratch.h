// What attention reads, and what a thread works in: tiles of kTile slots, which are read where they lie. Included inside a
// namespace, after the vectors.

constexpr int kTile = 32;         // slots
constexpr int kMaxQueries = 32;   // query heads in a tile
constexpr int kMaxHeadDim = 256;
constexpr float kHidden = -1e30f;

// A layer of the cache: of each slot the keys of all KV heads, then their values. Codes have a scale for each of these.
template <typename Value>
struct Kv {
  Value* data;
  float* scales;
};

// Some slots whose keys and values lie in `cache` as those of KV head `head`.
template <typename Value>
struct Seen {
  Kv<Value> cache;
  int head;
  const int64_t* slots_at;
  int64_t slots;
};

// Keys or values of a tile to come. Where kFetchesBits, they are fetched bit by bit while others are computed with, for a core that
// waits where more than some twenty lines of cache are on their way; others fetch them before, as asking between costs them more.
struct Coming {
  const char* data;             // where the first of these values lie in slot 0
  int64_t stride, width, part;  // bytes: from slot to slot, of a slot's values, of 32 of them
  const int64_t *slot, *end;
  int64_t at;

  // 32 values; of a tile as many times as a head has dimensions.
  __attribute__((always_inline)) void fetch() {
    if (slot == end) return;
    const char* const from = data + *slot * stride + at;
    _mm_prefetch(from, _MM_HINT_T0);
    if (part > 64) _mm_prefetch(from + 64, _MM_HINT_T0);
    at += part;
    if (at < width) return;
    at = 0;
    slot++;
  }
};

struct Scratch {  // one thread's
  Coming coming = {};
  alignas(64) float keys[kTile / kLanes][kMaxHeadDim][kLanes];
  alignas(64) float values[kTile * kMaxHeadDim];  // [kTile][head_dim]: as close as they go
  alignas(64) float outputs[kMaxQueries][kMaxHeadDim];
  float total[kMaxQueries];
  std::vector<float> scores;  // [query heads, slots to whole tiles], then weights
  int64_t stride;             // of these rows
  alignas(64) uint32_t pairs[kTile / kLanes][kMaxHeadDim / 2][kLanes];  // keys in bfloat16, two dimensions in a word
  // Of keys that are codes: the codes plus 128, four dimensions in a word, and the scales; and queries as whole numbers:
  // a query is its scale times (first codes + second codes / 254).
  alignas(64) uint8_t codes[kTile / kLanes][kMaxHeadDim / 4][4 * kLanes];
  alignas(64) float key_scales[kTile], value_scales[kTile];
  alignas(64) int8_t query_codes[2][kMaxQueries][kMaxHeadDim];
  int32_t query_sums[2][kMaxQueries];
  float query_scales[kMaxQueries];
  // For products of bfloat16, two in a word: dimensions of queries, slots of weights, and of a tile's values [kTile / 2, head_dim].
  alignas(64) uint32_t query_words[kMaxQueries][kMaxHeadDim / 2];
  alignas(64) uint32_t weight_words[kMaxQueries][kTile / 2];
  alignas(64) uint32_t value_words[kTile / 2 * kMaxHeadDim];
};

// Products of two values at once, where the processor has them for this kind (dots.h).
template <typename Value>
struct Dots {
  static constexpr bool are_there = false;
};
