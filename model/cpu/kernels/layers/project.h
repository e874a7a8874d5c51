// A layer's linears, with the adapters that some slots pass. Included inside a namespace, after workspace.h.

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
