// Functions of 16 numbers at once that the instructions lack. Included inside a namespace, after the vectors.

inline F exp(F x) {  // to 2 ulp for x <= 0, the only ones that softmax and SiLU need; 0 far below
  const F clamped = max(x, set1(-87.0f));
  const F n = round(clamped * set1(1.44269504f));
  F r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p * r, r, r) + set1(1.0f);
  return times_power_of_2(p, n);
}

inline F rough_log(F x) {  // of x > 0, within 5e-4: a cubic polynomial of the mantissa
  const I bits = bits_of(x);
  const F exponent = to_float(shifted_right<23>(bits) + set1(-127));
  const F m = of_bits((bits & set1(0x7fffff)) | set1(0x3f800000));
  F p = fma(set1(0.164042561f), m, set1(-1.09886529f));
  p = fma(p, m, set1(3.14829793f));
  return (fma(p, m, set1(-2.2134752f)) + exponent) * set1(0.693147181f);
}

inline F times_sigmoid(F x, F of) {
  const F e = exp(set1(0.0f) - abs(of));  // of -|of|: 1 / (1 + e) for of >= 0, e / (1 + e) below
  return if_negative(of, x * e, x) / (set1(1.0f) + e);
}
inline F silu(F x) { return times_sigmoid(x, x); }
// By its tanh form: (1 + tanh y) / 2 is the sigmoid of 2 y.
inline F gelu(F x) { return times_sigmoid(x, x * fma(x * x, set1(0.0713548128f), set1(1.5957691216f))); }
