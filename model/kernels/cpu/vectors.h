// Vectors of floats, and aligned memory for them.
//
// Weights and activations are fp32 or bf16, arithmetic is fp32. Each (row, output) is always summed
// in the same order, so results depend neither on the batch nor on the number of threads.
// Shape legend as in ../base.py; K inner dimension, M rows, N outputs.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "threads.h"

namespace {

using at::Tensor;
using c10::BFloat16;

#ifdef __AVX512F__
constexpr int kLanes = 16, kSums = 24;  // number of sums that fit in registers besides operands
#else
constexpr int kLanes = 8, kSums = 12;
#endif
constexpr int kBlock = 16;  // number of outputs that are interleaved in packed weights
constexpr int kVecs = kBlock / kLanes;
constexpr int64_t kRowChunk = 96;
constexpr int64_t kWorthATask = 1 << 15;  // minimum number of multiplications per task
constexpr int64_t kNear = 1 << 14;        // bytes that stay in the L1 cache besides other data
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Two bf16 neighbours along K. The earlier one is in the upper half, which is multiplied first. So
// sums are bitwise those of consecutive products (except for numbers below 1e-38).
struct Two {
  uint32_t bits;
};
#ifdef __AVX512BF16__
constexpr bool kHasTwos = true;
#else
constexpr bool kHasTwos = false;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// Unrolled loop, so that arrays of sums are kept in registers.
#define EACH(i, num) _Pragma("GCC unroll 32") for (int i = 0; i < (num); i++)

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const BFloat16* p) {
#if defined(__AVX512F__)
  return (Vec)((Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(__AVX2__)
  return (Vec)((Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#endif
  Halves h;
  std::memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, Bits) << 16);
}

[[maybe_unused]] inline Bits load(const Two* p) {
  Bits v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void add_product(Vec& sum, float x, Vec w) { sum += x * w; }

[[maybe_unused]] inline void add_product(Vec& sum, Two x, Bits w) {
#ifdef __AVX512BF16__
  sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x.bits));
#endif
}

// Loads 2 * kLanes values into two vectors, in the order that is cheapest for the type.
inline void load(const float* p, Vec& a, Vec& b) { a = load(p), b = load(p + kLanes); }

inline void load(const BFloat16* p, Vec& even, Vec& odd) {
  Bits both;
  std::memcpy(&both, p, sizeof both);
  even = (Vec)(both << 16), odd = (Vec)(both & 0xffff0000);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Bits rounded(Vec v) {
  Bits bits = (Bits)v;
  return v == v ? bits + 0x7fff + ((bits >> 16) & 1) : Bits{} + 0x7fc00000;
}

[[maybe_unused]] inline void store(BFloat16* p, Vec v) {
  Halves h = __builtin_convertvector(rounded(v) >> 16, Halves);
  std::memcpy(p, &h, sizeof h);
}

// Stores two vectors in the original order; the inverse of ``load`` of two.
inline void store(float* p, Vec a, Vec b) { store(p, a), store(p + kLanes, b); }

inline void store(BFloat16* p, Vec even, Vec odd) {
  Bits both = (rounded(even) >> 16) | (rounded(odd) & 0xffff0000);
  std::memcpy(p, &both, sizeof both);
}

inline Vec splat(float x) { return Vec{} + x; }

inline float sum(Vec v) {
#ifdef __AVX2__
#ifdef __AVX512F__
  __m256 y = _mm256_add_ps(_mm512_castps512_ps256(v),
                           _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
#else
  __m256 y = v;
#endif
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return x[0] + x[1];
#endif
  float total = 0;
  EACH (i, kLanes) total += v[i];
  return total;
}

// Uninitialised memory for ``num`` values, aligned to a cache line.
template <class T>
class Space {
 public:
  Space() = default;
  explicit Space(int64_t num)
      : memory_(std::make_unique_for_overwrite<char[]>(num * sizeof(T) + 63)),
        first_((T*)((uintptr_t(memory_.get()) + 63) / 64 * 64)) {}
  T* get() const { return first_; }
  T& operator[](int64_t i) const { return first_[i]; }

 private:
  std::unique_ptr<char[]> memory_;
  T* first_ = nullptr;
};

template <class T>
Space<T> space(int64_t num) {
  return Space<T>(num);
}

// Returns e^x with an error of at most 2 ulp, clamped to normal numbers: 2^k times a polynomial
// (Cephes).
inline Vec exp(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  Ints k = __builtin_convertvector(x * 1.44269504f + (x < 0 ? splat(-0.5f) : splat(0.5f)), Ints);
  Vec n = __builtin_convertvector(k, Vec);
  Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  for (float c :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + c;
  return (p * r * r + r + 1.0f) * (Vec)((k + 127) << 23);
}

template <class T>
void to_float(const T* from, float* to, int64_t num) {
  int64_t i = 0;
  for (; i + kLanes <= num; i += kLanes) store(to + i, load(from + i));
  for (; i < num; i++) to[i] = float(from[i]);
}

template <class T>
void to_numbers(const T* from, float* to, int64_t num) {
  to_float(from, to, num);
}

// Converts ``num`` pairs.
[[maybe_unused]] inline void to_numbers(const BFloat16* from, Two* to, int64_t num) {
  for (int64_t i = 0; i < num; i++) {
    uint32_t both;
    std::memcpy(&both, from + 2 * i, sizeof both);
    to[i].bits = both << 16 | both >> 16;
  }
}

// Stores up to kLanes values; one by one if a vector would exceed ``room``.
template <class T>
void put(T* to, Vec v, int64_t room) {
  if (room >= kLanes) return store(to, v);
  for (int64_t i = 0; i < room; i++) to[i] = T(v[i]);
}

template <class F>
void with_type(const Tensor& x, F f) {
  if (x.scalar_type() == at::kFloat) return f(float{});
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "fp32 or bf16, not ", x.scalar_type());
  f(BFloat16{});
}

}  // namespace
