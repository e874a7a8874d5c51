// A thread's part of a stage. Included inside a namespace.
struct Share {
  int thread, threads;

  // Its part of `items`: contiguous, so that weights and caches are read in order.
  std::pair<int64_t, int64_t> of(int64_t items) const { return {items * thread / threads, items * (thread + 1) / threads}; }
};
