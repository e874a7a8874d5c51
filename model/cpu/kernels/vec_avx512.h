// Vectors of 16 lanes for AVX-512 with VNNI. vec_avx2.h offers the same names. Included inside a namespace of its own.
constexpr int kRowsAtOnce = 8;    // rows that share one unpacking of a weight, as registers allow
constexpr int kBlocksAtOnce = 2;  // with as many fewer rows
// Floats of a register, such registers of sums that there is room for, and the most query heads that share what is loaded.
constexpr int kWide = 16, kSumsAtOnce = 16, kQueriesAtOnce = 4;
constexpr bool kFetchesBits = false;  // of attention's next keys and values, while it computes (attention/scratch.h)

struct F { __m512 v; };   // 16 float
struct I { __m512i v; };  // 16 int32
struct B { __m512i v; };  // 64 bytes, 4 for each lane
using Wide = F;           // a register

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F if_negative(F x, F yes, F no) { return {_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x.v)), no.v, yes.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F times_power_of_2(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline float sum(F a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }
// Lanes first .. last - 1 of a, the others from b.
inline F between(int first, int last, F a, F b) {
  const uint32_t below = (1u << last) - 1, before = (1u << first) - 1;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below & ~before), b.v, a.v)};
}

inline F load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F load(const Bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline void store(Bf16* p, F a) {  // to nearest, ties to even
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

inline F load(const Int8* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

template <typename Value>
inline F load_wide(const Value* p) { return load(p); }
inline F set1_wide(float x) { return set1(x); }

inline I set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I truncated(F a) { return {_mm512_cvttps_epi32(a.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator*(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }  // of 64 bits the lower 32
inline I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I bits_of(F a) { return {_mm512_castps_si512(a.v)}; }
inline F of_bits(I a) { return {_mm512_castsi512_ps(a.v)}; }
template <int bits>
inline I shifted_right(I a) { return {_mm512_srli_epi32(a.v, bits)}; }  // zeros come in
inline I counted_from(int32_t first) {
  return {_mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
}
inline I load(const int64_t* p) {  // those that 32 bits hold
  const __m256i low = _mm512_cvtepi64_epi32(_mm512_loadu_si512(p)), high = _mm512_cvtepi64_epi32(_mm512_loadu_si512(p + 8));
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
inline bool any_negative(F a) { return _mm512_movepi32_mask(_mm512_castps_si512(a.v)) != 0; }
inline int32_t sum(I a) { return _mm512_reduce_add_epi32(a.v); }
// Whole numbers of [-127, 127] as 16 bytes; their values as lanes.
inline I store_bytes(int8_t* p, F a) {
  const __m512i whole = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
  return {whole};
}

inline B load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(uint8_t* p, B a) { _mm512_storeu_si512(p, a.v); }
inline B plus_128(B a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }  // of each byte
inline B low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline B high_nibbles(B a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
struct Four { __m512i v; };  // inputs, for every lane
inline Four four(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, 4);
  return {_mm512_set1_epi32(bytes)};
}
// The products of a group's 32 codes with its inputs, summed for each lane; 4 codes a time. Exact.
// No constructor: those of an array would be a loop through memory.
template <int bits>
struct Sums {
  I sums;

  // offset: -128 times the sum of the inputs, which codes of 8 bits stand above their weights.
  void begin(int32_t offset) { sums = set1(bits == 4 ? 0 : offset); }
  void add(B codes, Four x) { sums = {_mm512_dpbusd_epi32(sums.v, codes.v, x.v)}; }
  I all() const { return sums; }
};

// 16 rows of 16 words -> out[16][16], transposed.
inline void transpose(const uint32_t* const* rows, uint32_t* out) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4 i + c], 128-bit lane l: column 4 l + c of rows 4 i to 4 i + 3.
  for (int c = 0; c < 4; c++) {
    const __m512i even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i even2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i odd2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    _mm512_storeu_si512(out + 16 * c, _mm512_shuffle_i32x4(even, even2, 0x88));
    _mm512_storeu_si512(out + 16 * (4 + c), _mm512_shuffle_i32x4(odd, odd2, 0x88));
    _mm512_storeu_si512(out + 16 * (8 + c), _mm512_shuffle_i32x4(even, even2, 0xdd));
    _mm512_storeu_si512(out + 16 * (12 + c), _mm512_shuffle_i32x4(odd, odd2, 0xdd));
  }
}
// Of words of two bfloat16 each the first values, and the second ones.
inline F first_of_pairs(const uint32_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline F second_of_pairs(const uint32_t* p) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high))};
}
