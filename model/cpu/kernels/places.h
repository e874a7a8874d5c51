// Where the keys and values of the layers lie, and whose places in settled slots are whose (settled_places.py). Included inside a
// namespace, after scratch.h.

template <typename Value>
struct Pool {  // of all layers
  void* const* data;
  float* const* scales;  // null but of codes

  Kv<Value> layer(int64_t index) const { return {static_cast<Value*>(data[index]), scales ? scales[index] : nullptr}; }
};

// How many heads head `piece` (layer * kv_heads + head) borrows places of.
inline int64_t lenders_of(const Places& places, int64_t piece) {
  int64_t count = 0;
  while (count < places.most && places.lenders[piece * places.most + count] >= 0) count++;
  return count;
}

// Tokens of a chunk that it keeps.
inline int64_t settled_tokens(const Places& places, int64_t piece) {
  return places.kept + (places.lends[piece] ? -places.lent : lenders_of(places, piece) * places.lent);
}
