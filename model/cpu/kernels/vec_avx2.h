// Vectors of 16 lanes for AVX2 with FMA and F16C, as two halves of 8: the same names as vec_avx512.h.
constexpr int kRowsAtOnce = 4, kBlocksAtOnce = 1;
constexpr int kWide = 8, kSumsAtOnce = 12, kQueriesAtOnce = 6;
constexpr bool kFetchesBits = true;  // of attention's next keys and values, while it computes (attention/scratch.h)

struct F { __m256 a, b; };   // 16 float
struct I { __m256i a, b; };  // 16 int32
struct Wide { __m256 v; };   // 8 float
struct B { __m256i a, b; };  // 64 bytes, 4 for each lane

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F if_negative(F x, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, x.a), _mm256_blendv_ps(no.b, yes.b, x.b)}; }
inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F round(F x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
inline __m256 times_power_of_2(__m256 x, __m256 n) {  // for n of [-126, 127]
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline F times_power_of_2(F x, F n) { return {times_power_of_2(x.a, n.a), times_power_of_2(x.b, n.b)}; }
inline float sum(F x) {
  const __m256 both = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F x) {
  const __m256 both = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline __m256 between(int first, int last, __m256 x, __m256 y) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i from = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane);
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_andnot_si256(from, below)));
}
inline F between(int first, int last, F x, F y) {
  return {between(first, last, x.a, y.a), between(first - 8, last - 8, x.b, y.b)};
}

inline __m128i halves(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline F load_half(const uint16_t* p) { return {_mm256_cvtph_ps(halves(p)), _mm256_cvtph_ps(halves(p + 8))}; }
inline void store_half(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline Wide load_wide(const Bf16* p) {
  const __m256i words = _mm256_cvtepu16_epi32(halves(reinterpret_cast<const uint16_t*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
}
inline F load(const Bf16* p) { return {load_wide(p).v, load_wide(p + kWide).v}; }
inline __m256i rounded_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
inline void store(Bf16* p, F x) {  // to nearest, ties to even
  const __m256i packed = _mm256_packus_epi32(rounded_bf16(x.a), rounded_bf16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline Wide load_wide(const Int8* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline F load(const Int8* p) { return {load_wide(p).v, load_wide(p + kWide).v}; }

inline Wide load_wide(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Wide x) { _mm256_storeu_ps(p, x.v); }
inline Wide set1_wide(float x) { return {_mm256_set1_ps(x)}; }
inline Wide fma(Wide x, Wide y, Wide z) { return {_mm256_fmadd_ps(x.v, y.v, z.v)}; }

inline I set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I truncated(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I operator*(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I operator|(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I bits_of(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F of_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
template <int bits>
inline I shifted_right(I x) { return {_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)}; }
inline I counted_from(int32_t first) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_add_epi32(_mm256_set1_epi32(first), lane), _mm256_add_epi32(_mm256_set1_epi32(first + 8), lane)};
}
inline __m256i load_eight(const int64_t* p) {
  const __m256 low = _mm256_loadu_ps(reinterpret_cast<const float*>(p)), high = _mm256_loadu_ps(reinterpret_cast<const float*>(p + 4));
  return _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)), 0xd8);
}
inline I load(const int64_t* p) { return {load_eight(p), load_eight(p + 8)}; }
inline bool any_negative(F x) { return _mm256_movemask_ps(_mm256_or_ps(x.a, x.b)) != 0; }
inline int32_t sum(I x) {
  const __m256i both = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline I store_bytes(int8_t* p, F x) {
  const I whole = {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole.a, whole.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  return whole;
}

inline B load_bytes(const uint8_t* p) {
  const auto* words = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline void store_bytes(uint8_t* p, B x) {
  auto* words = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(words, x.a);
  _mm256_storeu_si256(words + 1, x.b);
}
inline B plus_128(B x) {
  const __m256i sign = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(x.a, sign), _mm256_xor_si256(x.b, sign)};
}
inline B low_nibbles(B x) {
  return {_mm256_and_si256(x.a, _mm256_set1_epi8(15)), _mm256_and_si256(x.b, _mm256_set1_epi8(15))};
}
inline B high_nibbles(B x) { return low_nibbles(B{_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
// Else GCC makes a tree of many sums, which needs more registers than there are.
inline void keep_order(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }

struct Four { __m256i v; };  // inputs, for every lane
inline Four four(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, 4);
  return {_mm256_set1_epi32(bytes)};
}
// The products of a group's 32 codes with its inputs, summed for each lane; 4 codes a time. Exact.
template <int bits>
struct Sums;

// Sixteen bits hold all eight sums of two products of a nibble: 8 * 2 * 15 * 127 < 2^15.
template <>
struct Sums<4> {
  B sums;

  void begin(int32_t) { sums = {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  void add(B codes, Four x) {
    sums.a = _mm256_add_epi16(sums.a, _mm256_maddubs_epi16(codes.a, x.v));
    sums.b = _mm256_add_epi16(sums.b, _mm256_maddubs_epi16(codes.b, x.v));
    keep_order(sums.a, sums.b);
  }
  I all() const {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sums.a, ones), _mm256_madd_epi16(sums.b, ones)};
  }
};

// |code - 128| times an input of its sign: two products are below 2^15, which 128 * 127 * 2 of the codes as they are is not.
template <>
struct Sums<8> {
  I sums;

  void begin(int32_t) { sums = {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  void add(B codes, Four x) {
    sums = {_mm256_add_epi32(sums.a, products(codes.a, x.v)), _mm256_add_epi32(sums.b, products(codes.b, x.v))};
    keep_order(sums.a, sums.b);
  }
  static __m256i products(__m256i codes, __m256i values) {
    const __m256i whole = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(whole), _mm256_sign_epi8(values, whole));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  I all() const { return sums; }
};

// 8 rows of 8 words -> out[8][16] (half a row of 16), transposed.
inline void transpose8(const uint32_t* const* rows, int column, uint32_t* out) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + column));
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int c = 0; c < 4; c++) {
    _mm256_storeu_ps(reinterpret_cast<float*>(out + 16 * c), _mm256_permute2f128_ps(r[c], r[4 + c], 0x20));
    _mm256_storeu_ps(reinterpret_cast<float*>(out + 16 * (4 + c)), _mm256_permute2f128_ps(r[c], r[4 + c], 0x31));
  }
}
// 16 rows of 16 words -> out[16][16], transposed.
inline void transpose(const uint32_t* const* rows, uint32_t* out) {
  for (int column = 0; column < 16; column += 8)
    for (int row = 0; row < 16; row += 8) transpose8(rows + row, column, out + 16 * column + row);
}
// Of words of two bfloat16 each the first values, and the second ones.
inline Wide first_of_pairs(const uint32_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16))};
}
inline Wide second_of_pairs(const uint32_t* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
