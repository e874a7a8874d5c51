// A thread's part of a stage. Included inside a namespace.
struct Share {
  int thread, threads;

  // Its part of `items`, in whole units: contiguous, so that weights and caches are read in order.
  std::pair<int64_t, int64_t> of(int64_t items, int64_t unit = 1) const {
    const int64_t units = items / unit;
    return {units * thread / threads * unit, units * (thread + 1) / threads * unit};
  }
};
