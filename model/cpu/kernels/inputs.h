// What linears read, rounded as it is made: norms, plain numbers, gated products. Included inside a namespace, after linear.h and
// functions.h.

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

inline float inverse_rms(const float* x, int64_t width, float eps) {
  F squares = set1(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; i++) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

// Groups are shared out, not rows: a single row keeps all threads busy.
inline void norm_inputs(const float* x, const float* weight, float eps, const Inputs& to, int64_t rows, const Share& share) {
  const int64_t groups = to.groups();
  const auto [first, last] = share.of(rows * groups);
  int64_t row = -1;
  F inverse = set1(0.0f);
  for (int64_t at = first; at < last; at++) {
    const int64_t column = at % groups * kGroup;
    if (at / groups != row) {
      row = at / groups;
      inverse = set1(inverse_rms(x + row * to.width, to.width, eps));
    }
    const float* from = x + row * to.width + column;
    quantize(to, at, load(from) * inverse * load(weight + column),
             load(from + kLanes) * inverse * load(weight + column + kLanes));
  }
}

inline void plain_inputs(const float* x, const Inputs& to, int64_t rows, const Share& share) {
  const auto [first, last] = share.of(rows * to.groups());
  for (int64_t at = first; at < last; at++) quantize(to, at, load(x + at * kGroup), load(x + at * kGroup + kLanes));
}

// What a linear reads of x: its norm, or x itself.
inline void enter_inputs(const float* x, const float* norm, float eps, const Inputs& to, int64_t rows, const Share& share) {
  if (norm) norm_inputs(x, norm, eps, to, rows, share);
  else plain_inputs(x, to, rows, share);
}

// activation(gate) * up of [T, 2, width], of some groups of 32 outputs.
template <F activation(F)>
inline void gated_inputs(const float* gate_up, const Inputs& to, int64_t rows, int64_t first, int64_t last) {
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t g = first; g < last; g++) {
      const float* gate = gate_up + row * 2 * to.width + g * kGroup;
      const float* up = gate + to.width;
      quantize(to, row * to.groups() + g, activation(load(gate)) * load(up), activation(load(gate + kLanes)) * load(up + kLanes));
    }
  }
}
inline void gated_inputs(const Geometry& g, const float* gate_up, const Inputs& to, int64_t rows, int64_t first, int64_t last) {
  if (g.gelu) gated_inputs<gelu>(gate_up, to, rows, first, last);
  else gated_inputs<silu>(gate_up, to, rows, first, last);
}

// A linear alone: x [rows, inputs] -> y [rows, outputs]. memory: inputs_bytes.
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
