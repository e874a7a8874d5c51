// What this machine can do at best: products of bytes, and of 4-bit codes with bytes, summed in whole numbers, and of floats or,
// where it has instructions for it, of bfloat16 summed in floats, out of registers; and bytes read from memory. Compiled by rates.py
// for the machine that it runs on.
#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace {

constexpr int kSums = 12;  // independent ones: enough for every latency, few enough for the registers of AVX2
constexpr int64_t kTurns = 4'000'000;
constexpr size_t kPage = 1 << 21;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
using Vector = __m512i;
using Floats = __m512;
Vector splat(int8_t x) { return _mm512_set1_epi8(x); }
Floats splat(float x) { return _mm512_set1_ps(x); }
Vector dot(Vector sum, Vector a, Vector b) { return _mm512_dpbusd_epi32(sum, a, b); }
Vector dot_of_codes(Vector sum, Vector a, Vector b) { return dot(sum, a, b); }
#ifdef __AVX512BF16__
constexpr int kEach = 2;  // products a lane of floats
Floats products(Floats a, Floats b, Floats c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
constexpr int kEach = 1;
Floats products(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#endif
#else
using Vector = __m256i;
using Floats = __m256;
Vector splat(int8_t x) { return _mm256_set1_epi8(x); }
Floats splat(float x) { return _mm256_set1_ps(x); }
// Two products of a code fit 16 bits, and so do the sums of some.
Vector dot_of_codes(Vector sum, Vector a, Vector b) {
  asm volatile("" : "+x"(a));  // else a turn's products, which are the same, are made once for all its sums
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
}
Vector dot(Vector sum, Vector a, Vector b) {
  asm volatile("" : "+x"(a));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
constexpr int kEach = 1;
Floats products(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#endif

// What f does in kTurns turns on every thread: seconds of the slowest.
template <typename Function>
double on_all_threads(int threads, const Function& f) {
  double longest = 0;
#pragma omp parallel num_threads(threads) reduction(max : longest)
  {
#pragma omp barrier
    const double start = now();
    f();
    longest = now() - start;
  }
  return longest;
}

template <typename V>
void keep(const V (&sums)[kSums]) {
  for (const V& sum : sums) asm volatile("" ::"m"(sum));
}

// Products a second that f(sum, a, b) makes and sums.
template <typename Function>
double products_of_bytes(int threads, const Function& f) {
  const double seconds = on_all_threads(threads, [&] {
    Vector sums[kSums], a = splat(int8_t{3}), b = splat(int8_t{5});
    for (auto& sum : sums) sum = splat(int8_t{0});
    for (int64_t i = 0; i < kTurns; i++) {
      asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
      for (int s = 0; s < kSums; s++) sums[s] = f(sums[s], a, b);
    }
    keep(sums);
  });
  return static_cast<double>(threads) * kTurns * kSums * sizeof(Vector) / seconds;
}

}  // namespace

// Of unsigned with signed bytes.
extern "C" double byte_products(int threads) {
  return products_of_bytes(threads, [](Vector sum, Vector a, Vector b) { return dot(sum, a, b); });
}

// Of 4-bit codes, a byte each, with bytes.
extern "C" double code_products(int threads) {
  return products_of_bytes(threads, [](Vector sum, Vector a, Vector b) { return dot_of_codes(sum, a, b); });
}

// Products a second of what attention multiplies.
extern "C" double float_products(int threads) {
  const double seconds = on_all_threads(threads, [] {
    Floats sums[kSums], a = splat(1.0f), b = splat(1e-9f);
    for (auto& sum : sums) sum = splat(0.0f);
    for (int64_t i = 0; i < kTurns; i++) {
      asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
      for (int s = 0; s < kSums; s++) sums[s] = products(a, b, sums[s]);
    }
    keep(sums);
  });
  return static_cast<double>(threads) * kTurns * kSums * kEach * (sizeof(Floats) / sizeof(float)) / seconds;
}

// Bytes a second, read in order from `size` bytes, whole pages, that no cache holds.
extern "C" double bytes_read(int threads, int64_t size) {
  const std::unique_ptr<void, decltype(&std::free)> data(std::aligned_alloc(kPage, size), &std::free);
  madvise(data.get(), size, MADV_HUGEPAGE);
  std::fill_n(static_cast<int64_t*>(data.get()), size / static_cast<int64_t>(sizeof(int64_t)), 1);
  const double seconds = on_all_threads(threads, [&] {
    const int64_t vectors = size / static_cast<int64_t>(sizeof(Vector)), thread = omp_get_thread_num();
    const auto* from = static_cast<const Vector*>(data.get());
    Vector sums[4] = {};
    for (int64_t i = vectors * thread / threads; i + 4 <= vectors * (thread + 1) / threads; i += 4)
      for (int s = 0; s < 4; s++) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
        sums[s] = _mm512_xor_si512(sums[s], _mm512_loadu_si512(from + i + s));
#else
        sums[s] = _mm256_xor_si256(sums[s], _mm256_loadu_si256(from + i + s));
#endif
      }
    for (const Vector& sum : sums) asm volatile("" ::"m"(sum));
  });
  return static_cast<double>(size) / seconds;
}
