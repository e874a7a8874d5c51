// Products of bfloat16 for AVX-512 with BF16, two a lane in one instruction. Included inside a namespace, after vec_avx512.h.
struct W { __m512i v; };  // 16 words of two bfloat16

inline W load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_words(uint32_t* p, W a) { _mm512_storeu_si512(p, a.v); }
inline W word(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
// c and each lane's two products.
inline F dots(W a, W b, F c) { return {_mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))}; }
// 32 floats -> words, in their order; to nearest, ties to even.
inline W words(const float* p) {
  return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + kLanes), _mm512_loadu_ps(p)))};
}
// 16 of each of two rows -> words of one's and the other's.
inline W words(const Bf16* first, const Bf16* second) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}
