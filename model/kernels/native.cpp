// Kernels of a decode or prefill step on CPUs; model/kernels/base.py says what each computes.
//
// Weights and activations are fp32 or bf16, arithmetic is fp32. One (row, output) is always summed
// in the same order, so results depend neither on the batch a row is in nor on threads.
// Shape legend as in base.py; K inner dimension, M rows, N outputs.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

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

namespace {

using at::Tensor;
using c10::BFloat16;

#ifdef __AVX512F__
constexpr int kLanes = 16, kSums = 24;  // that registers hold beside what is multiplied
#else
constexpr int kLanes = 8, kSums = 12;
#endif
constexpr int kBlock = 16;  // outputs that lie side by side in packed weights
constexpr int kVecs = kBlock / kLanes;
constexpr int64_t kRowChunk = 96;
constexpr int64_t kSplit = 256;           // tokens of context that one task attends to
constexpr int64_t kWorthATask = 1 << 15;  // multiplications
constexpr int64_t kNear = 1 << 14;        // bytes that stay in a first cache beside others
constexpr float kNever = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// Unrolled, so that arrays of sums live in registers.
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

// 2 * kLanes values, in an order of their own: cheaper than one after the other.
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

// What ``load`` of two brought, back in its places.
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

// Memory for ``num`` values, whatever is in it; it begins with a line of the cache.
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

// e^x to 2 ulp where that is a normal number, else the nearest that is: 2^k times a polynomial
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

// Up to kLanes values at once; what a vector would overrun is written one by one.
template <class T>
void put(T* to, Vec v, int64_t room) {
  if (room >= kLanes) return store(to, v);
  for (int64_t i = 0; i < room; i++) to[i] = T(v[i]);
}

// ---- products ----

// acc[r][b] = sum over k of x[r, k] * w[b][k, :]
template <int R, int B, class T>
[[gnu::noinline]] void tile(const float* x, int64_t ldx, const T* const* w, int64_t num_k,
                            Vec (*acc)[B * kVecs]) {
  Vec sums[R][B * kVecs];
  EACH (r, R)
    EACH (i, B * kVecs) sums[r][i] = Vec{};
  auto weight = [&](int64_t k, int i) {
    return load(w[i / kVecs] + k * kBlock + i % kVecs * kLanes);
  };
  // What comes next is asked for while this is at work: last level caches answer late.
  constexpr int64_t line = kBlock * sizeof(T);
  int64_t ahead = num_k * B * line <= kNear ? num_k * B : kNear / 8 / line;
  // Whichever are fewer stay in registers while the others pass by.
  for (int64_t k = 0; k < num_k; k++) {
    EACH (i, B) __builtin_prefetch(w[i] + (k + ahead) * kBlock);
    if constexpr (R <= B * kVecs) {
      float rows[R];
      EACH (r, R) rows[r] = x[r * ldx + k];
      EACH (i, B * kVecs) {
        Vec one = weight(k, i);
        EACH (r, R) sums[r][i] += rows[r] * one;
      }
    } else {
      Vec ones[B * kVecs];
      EACH (i, B * kVecs) ones[i] = weight(k, i);
      EACH (r, R) {
        float row = x[r * ldx + k];
        EACH (i, B * kVecs) sums[r][i] += row * ones[i];
      }
    }
  }
  EACH (r, R)
    EACH (i, B * kVecs) acc[r][i] = sums[r][i];
}

// emit(row, sums) for each of ``num`` rows; B blocks at once, R rows if there are so many.
template <int B, int R = std::min(12, kSums / (B * kVecs)), class T, class Emit>
void rows_of(const float* x, int64_t ldx, int64_t num, const T* const* w, int64_t num_k,
             Emit emit) {
  Vec acc[R][B * kVecs];
  int64_t row = 0;
  for (; row + R <= num; row += R) {
    tile<R, B>(x + row * ldx, ldx, w, num_k, acc);
    for (int r = 0; r < R; r++) emit(row + r, acc[r]);
  }
  if constexpr (R > 1)
    if (row < num)
      rows_of<B, R - 1>(x + row * ldx, ldx, num - row, w, num_k,
                        [&](int64_t r, const Vec* sums) { emit(row + r, sums); });
}

// Rows that share a weight: x [num, K] times packed w [blocks, K, kBlock].
template <class T>
struct Group {
  const float* x;
  int64_t ldx, num;
  const T* w;
};

// emit(group, row, first output, sums, number of sums) over all groups, rows and blocks, on all
// threads; at least kTogether blocks at once.
template <int kTogether, class T, class Emit>
void products(const std::vector<Group<T>>& groups, int64_t num_k, int64_t num_blocks, Emit emit) {
  struct Task {
    int64_t group, row, num, block, end;
  };
  std::vector<Task> tasks;
  for (size_t g = 0; g < groups.size(); g++)
    for (int64_t row = 0; row < groups[g].num; row += kRowChunk) {
      int64_t num = std::min(kRowChunk, groups[g].num - row);
      int64_t step = std::max<int64_t>(1, kWorthATask / (num * num_k * kBlock));
      step = (step + 3) / 4 * 4;
      for (int64_t block = 0; block < num_blocks; block += step)
        tasks.push_back({int64_t(g), row, num, block, std::min(num_blocks, block + step)});
    }
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const Task& task = tasks[t];
      const Group<T>& group = groups[task.group];
      const float* x = group.x + task.row * group.ldx;
      int64_t block = task.block, stride = num_k * kBlock;
      auto run = [&](auto width) {
        constexpr int B = decltype(width)::value;
        const T* w[B];
        for (int b = 0; b < B; b++) w[b] = group.w + (block + b) * stride;
        rows_of<B>(x, group.ldx, task.num, w, num_k, [&](int64_t row, const Vec* sums) {
          emit(task.group, task.row + row, block * kBlock, sums, B * kVecs);
        });
        block += B;
      };
      // Few rows meet many blocks, so that there are sums enough to hide their latency.
      if (task.num <= 4 / kVecs)
        while (block + 4 <= task.end) run(std::integral_constant<int, 4>{});
      if (task.num <= 3 || kVecs == 1)
        while (block + 2 <= task.end) run(std::integral_constant<int, 2>{});
      while (block < task.end) run(std::integral_constant<int, kTogether>{});
    }
  });
}

// Rows [num, K] of any stride as floats; ``room`` holds them if they are not floats already.
template <class T>
const float* floats(const T* x, int64_t ld, int64_t num, int64_t num_k,
                    Space<float>& room) {
  if constexpr (std::is_same_v<T, float>) {
    if (ld == num_k) return x;
  }
  room = space<float>(num * num_k);
  for (int64_t i = 0; i < num; i++) to_float(x + i * ld, room.get() + i * num_k, num_k);
  return room.get();
}

template <class T, class Y>
void linear_rows(const Tensor& x, const Tensor& w, Tensor& y) {
  int64_t num_k = w.size(1), num_out = y.size(1);
  Space<float> room;
  const float* rows = floats(x.const_data_ptr<T>(), x.stride(0), x.size(0), num_k, room);
  Y* out = y.mutable_data_ptr<Y>();
  products<1, T>({{rows, num_k, x.size(0), w.const_data_ptr<T>()}}, num_k, w.size(0),
                 [&](int64_t, int64_t row, int64_t first, const Vec* sums, int num) {
                   for (int i = 0; i < num; i++, first += kLanes)
                     put(out + row * num_out + first, sums[i], num_out - first);
                 });
}

template <class F>
void with_type(const Tensor& x, F f) {
  if (x.scalar_type() == at::kFloat) return f(float{});
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "fp32 or bf16, not ", x.scalar_type());
  f(BFloat16{});
}

Tensor linear(const Tensor& x, const Tensor& w, int64_t num_out, bool in_fp32) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.size(1) == w.size(1) && x.dtype() == w.dtype());
  Tensor y = at::empty({x.size(0), num_out}, in_fp32 ? x.options().dtype(at::kFloat) : x.options());
  with_type(x, [&](auto zero) {
    using T = decltype(zero);
    in_fp32 ? linear_rows<T, float>(x, w, y) : linear_rows<T, T>(x, w, y);
  });
  return y;
}

// x [M, H, >= K] times w [H, N / kBlock, K, kBlock] into y [M, H, >= N].
template <class T>
void by_head(const Tensor& x, const Tensor& w, Tensor& y) {
  int64_t num = x.size(0), num_heads = x.size(1), num_k = w.size(2);
  std::vector<Space<float>> rooms(num_heads);
  std::vector<Group<T>> groups;
  for (int64_t h = 0; h < num_heads; h++) {
    const T* from = x.const_data_ptr<T>() + h * x.stride(1);
    const float* rows = floats(from, x.stride(0), num, num_k, rooms[h]);
    groups.push_back({rows, num_k, num, w.const_data_ptr<T>() + h * w.stride(0)});
  }
  T* out = y.mutable_data_ptr<T>();
  products<1, T>(groups, num_k, w.size(1),
                 [&](int64_t h, int64_t row, int64_t first, const Vec* sums, int num_sums) {
                   T* to = out + row * y.stride(0) + h * y.stride(1) + first;
                   for (int i = 0; i < num_sums; i++) put(to + i * kLanes, sums[i], kLanes);
                 });
}

// ---- norms and rotation ----

template <class T>
void normed(const float* x, const T* weight, double eps, T* y, int64_t num) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kLanes <= num; i += kLanes) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (int64_t j = i; j < num; j++) total += x[j] * x[j];
  float scale = 1 / std::sqrt(total / num + float(eps));
  for (i = 0; i + kLanes <= num; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < num; i++) y[i] = T(x[i] * scale * float(weight[i]));
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  int64_t num = weight.size(0), num_rows = x.size(0);
  Tensor y = at::empty({num_rows, num}, x.options());
  with_type(x, [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(0, num_rows, kRowChunk, [&](int64_t begin, int64_t end) {
      auto row = space<float>(num);
      for (int64_t i = begin; i < end; i++) {
        to_float(x.const_data_ptr<T>() + i * x.stride(0), row.get(), num);
        normed(row.get(), weight.const_data_ptr<T>(), eps, y.mutable_data_ptr<T>() + i * num, num);
      }
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& more, const Tensor& weight,
                                        double eps) {
  int64_t num = weight.size(0), num_rows = x.numel() / num;
  Tensor total = at::empty(x.sizes(), x.options()), y = at::empty(x.sizes(), x.options());
  with_type(x, [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(0, num_rows, kRowChunk, [&](int64_t begin, int64_t end) {
      auto row = space<float>(num), other = space<float>(num);
      for (int64_t i = begin; i < end; i++) {
        T* to = total.mutable_data_ptr<T>() + i * num;
        to_float(x.const_data_ptr<T>() + i * num, row.get(), num);
        to_float(more.const_data_ptr<T>() + i * num, other.get(), num);
        for (int64_t j = 0; j < num; j++) to[j] = T(row[j] + other[j]);
        to_float(to, row.get(), num);
        normed(row.get(), weight.const_data_ptr<T>(), eps, y.mutable_data_ptr<T>() + i * num, num);
      }
    });
  });
  return {total, y};
}

// Pairs (2j, 2j + 1), or (j, j + R / 2), by R / 2 angles; written as pairs (2j, 2j + 1).
template <class T>
void rotate(const T* x, const float* cos, const float* sin, bool interleaved, T* y, int64_t width) {
  int64_t num = width / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : num;
  for (int64_t j = 0; j < num; j++) {
    float a = float(x[j * step]), b = float(x[j * step + apart]);
    y[2 * j] = T(a * cos[j] - b * sin[j]);
    y[2 * j + 1] = T(a * sin[j] + b * cos[j]);
  }
}

Tensor mla_query(const Tensor& q, const Tensor& up_k, const Tensor& cos, const Tensor& sin,
                 bool interleaved) {
  int64_t num = q.size(0), num_heads = q.size(1), num_nope = up_k.size(2);
  int64_t num_latent = up_k.size(1) * kBlock, num_pe = q.size(2) - num_nope;
  Tensor y = at::empty({num, num_heads, num_latent + num_pe}, q.options());
  with_type(q, [&](auto zero) {
    using T = decltype(zero);
    by_head<T>(q, up_k, y);
    at::parallel_for(0, num, kRowChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < num_heads; h++)
          rotate(q.const_data_ptr<T>() + i * q.stride(0) + h * q.stride(1) + num_nope,
                 cos.const_data_ptr<float>() + i * num_pe / 2,
                 sin.const_data_ptr<float>() + i * num_pe / 2, interleaved,
                 y.mutable_data_ptr<T>() + i * y.stride(0) + h * y.stride(1) + num_latent, num_pe);
    });
  });
  return y;
}

Tensor mla_value(const Tensor& o, const Tensor& up_v) {
  Tensor y = at::empty({o.size(0), o.size(1), up_v.size(1) * kBlock}, o.options());
  with_type(o, [&](auto zero) { by_head<decltype(zero)>(o, up_v, y); });
  return y;
}

void mla_entry(const Tensor& kv, const Tensor& weight, double eps, const Tensor& cos,
               const Tensor& sin, bool interleaved, const Tensor& slots, Tensor cache) {
  int64_t num_latent = weight.size(0), num_pe = kv.size(1) - num_latent, width = cache.size(-1);
  TORCH_CHECK(cache.is_contiguous() && kv.stride(1) == 1 && num_latent + num_pe == width);
  with_type(kv, [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(0, kv.size(0), kRowChunk, [&](int64_t begin, int64_t end) {
      auto row = space<float>(num_latent);
      for (int64_t i = begin; i < end; i++) {
        const T* from = kv.const_data_ptr<T>() + i * kv.stride(0);
        T* to = cache.mutable_data_ptr<T>() + slots.const_data_ptr<int64_t>()[i] * width;
        to_float(from, row.get(), num_latent);
        normed(row.get(), weight.const_data_ptr<T>(), eps, to, num_latent);
        rotate(from + num_latent, cos.const_data_ptr<float>() + i * num_pe / 2,
               sin.const_data_ptr<float>() + i * num_pe / 2, interleaved, to + num_latent, num_pe);
      }
    });
  });
}

// ---- attention ----

constexpr int kQueries = kLanes / 2;  // rows of queries computed together, at most

// Queries or values ``num`` as floats in the order in which ``load`` brings two vectors of T.
template <class T>
void unfold(const T* from, float* to, int64_t num) {
  int64_t i = 0;
  for (Vec a, b; i + 2 * kLanes <= num; i += 2 * kLanes) {
    load(from + i, a, b);
    store(to + i, a, b);
  }
  to_float(from + i, to + i, num - i);
}

// scores[q][s] for Q unfolded queries [., width] and ``num`` keys, each at keys[s].
template <int Q, class T>
void score(const float* q, const T* const* keys, int64_t num, int64_t width, float* scores) {
  constexpr int S = kLanes / Q;
  for (int64_t s = 0; s < num; s += S) {
    const T *key[S], *soon[S];
    Vec acc[Q][S], a[S], b[S];
    EACH (j, S) {
      key[j] = keys[std::min(s + j, num - 1)];
      soon[j] = keys[std::min(s + j + 2 * S, num - 1)];
    }
    EACH (i, Q)
      EACH (j, S) acc[i][j] = Vec{};
    int64_t l = 0;
    for (; l + 2 * kLanes <= width; l += 2 * kLanes) {
      EACH (j, S) __builtin_prefetch(soon[j] + l);
      EACH (j, S) load(key[j] + l, a[j], b[j]);
      EACH (i, Q) {
        Vec first = load(q + i * width + l), second = load(q + i * width + l + kLanes);
        EACH (j, S) acc[i][j] += first * a[j];
        EACH (j, S) acc[i][j] += second * b[j];
      }
    }
    if (l < width)
      EACH (i, Q)
        EACH (j, S) acc[i][j] += load(q + i * width + l) * load(key[j] + l);
    EACH (i, Q)
      EACH (j, S)
        if (s + j < num) scores[i * kSplit + s + j] = sum(acc[i][j]);
  }
}

// Scores of ``num`` keys, of which the first ``seen`` are seen, to weights; their sum, the largest.
// The largest is no less than ``before``.
inline void soften(float* scores, int64_t num, int64_t seen, float scale, float& largest,
                   float& total, float before = kNever) {
  Vec sums{}, most = splat(kNever);
  Ints lane;
  EACH (i, kLanes) lane[i] = i;
  for (int64_t s = 0; s < seen; s += kLanes) {
    Vec here = lane + int32_t(s) < int32_t(seen) ? load(scores + s) : splat(kNever);
    most = here > most ? here : most;
  }
  largest = most[0];
  EACH (i, kLanes) largest = std::max(largest, most[i]);
  largest = std::max(largest * scale, before);
  for (int64_t s = 0; s < num; s += kLanes) {
    Vec weights = exp(load(scores + s) * scale - largest);
    weights = lane + int32_t(s) < int32_t(seen) ? weights : splat(0);
    store(scores + s, weights);
    sums += weights;
  }
  total = sum(sums);
}

// out[q][c] = sum over s of weights[q][s] * keys[s][c], c < num_values, unfolded.
template <int Q, class T>
void mix(const float* weights, const T* const* keys, int64_t num, int64_t num_values, float* out) {
  constexpr int most = std::max(1, kLanes / Q / 2);
  auto columns = [&](auto count, int64_t c) {
    constexpr int W = decltype(count)::value;
    Vec acc[Q][2 * W];
    EACH (i, Q)
      EACH (v, 2 * W) acc[i][v] = Vec{};
    for (int64_t s = 0; s < num; s++)
      EACH (v, W) {
        Vec a, b;
        load(keys[s] + c + 2 * v * kLanes, a, b);
        EACH (i, Q) {
          acc[i][2 * v] += weights[i * kSplit + s] * a;
          acc[i][2 * v + 1] += weights[i * kSplit + s] * b;
        }
      }
    EACH (i, Q)
      EACH (v, 2 * W) store(out + i * num_values + c + v * kLanes, acc[i][v]);
  };
  int64_t c = 0;
  for (; c + 2 * most * kLanes <= num_values; c += 2 * most * kLanes)
    columns(std::integral_constant<int, most>{}, c);
  for (; c + 2 * kLanes <= num_values; c += 2 * kLanes)
    columns(std::integral_constant<int, 1>{}, c);
  if (c == num_values) return;
  EACH (i, Q) {
    Vec acc{};
    for (int64_t s = 0; s < num; s++) acc += weights[i * kSplit + s] * load(keys[s] + c);
    store(out + i * num_values + c, acc);
  }
}

// Entries [begin, end) of the sequence whose pages are ``page``.
template <class T>
void find(const T* cache, const int64_t* page, int64_t page_size, int64_t width, int64_t begin,
          int64_t end, const T** entries) {
  for (int64_t s = begin; s < end;) {
    int64_t here = s % page_size, stop = std::min(end, s - here + page_size);
    const T* first = cache + (page[s / page_size] * page_size + here) * width;
    for (; s < stop; s++, first += width) *entries++ = first;
  }
}

// Calls f with the least of 2, 4 .. kQueries that is no less than ``num``.
template <int Q = 2, class F>
void with_width(int64_t num, F f) {
  if constexpr (Q < kQueries)
    if (num > Q) return with_width<2 * Q>(num, f);
  f(std::integral_constant<int, Q>{});
}

template <class T>
void attend_rows(const Tensor& q, const Tensor& cache, const Tensor& table, const Tensor& lens,
                 int64_t num_values, double scale, Tensor& out) {
  int64_t num_seqs = lens.size(0), num_q = lens.size(1), num_heads = q.size(1), width = q.size(2);
  int64_t page_size = cache.size(1), num_pages = table.size(1), num_x = num_q * num_heads;
  int64_t num_padded = (num_x + kQueries - 1) / kQueries * kQueries;
  const int64_t *pages = table.const_data_ptr<int64_t>(), *len = lens.const_data_ptr<int64_t>();
  const T *queries = q.const_data_ptr<T>(), *entries = cache.const_data_ptr<T>();
  struct Task {
    int64_t seq, begin, end;
  };
  std::vector<Task> tasks;
  std::vector<int64_t> first_of;
  for (int64_t b = 0; b < num_seqs; b++) {
    int64_t longest = *std::max_element(len + b * num_q, len + (b + 1) * num_q);
    longest = std::min(longest, num_pages * page_size);
    first_of.push_back(tasks.size());
    for (int64_t s = 0; s < longest; s += kSplit)
      tasks.push_back({b, s, std::min(longest, s + kSplit)});
  }
  first_of.push_back(tasks.size());
  auto parts = space<float>(tasks.size() * num_padded * num_values);
  auto largest = space<float>(tasks.size() * num_padded),
       total = space<float>(tasks.size() * num_padded);
  // Queries of a task are spread if threads had no work; none of them is computed differently.
  int64_t per_unit = kQueries, num_threads = at::get_num_threads();
  while (per_unit > 2 && int64_t(tasks.size()) * ((num_x - 1) / per_unit + 1) < num_threads)
    per_unit /= 2;
  int64_t num_units = (num_x - 1) / per_unit + 1;
  at::parallel_for(0, tasks.size() * num_units, 1, [&](int64_t first, int64_t last) {
    alignas(64) float scores[kQueries * kSplit];
    auto rows = space<float>(kQueries * width);
    const T* keys[kSplit];
    for (int64_t unit = first; unit < last; unit++) {
      int64_t t = unit / num_units, x = unit % num_units * per_unit;
      auto [b, begin, end] = tasks[t];
      int64_t num = end - begin, num_here = std::min(per_unit, num_x - x);
      find(entries, pages + b * num_pages, page_size, width, begin, end, keys);
      with_width(num_here, [&](auto count) {
        constexpr int Q = decltype(count)::value;
        for (int64_t i = 0; i < Q; i++)
          unfold(queries + (b * num_x + std::min(x + i, num_x - 1)) * width, &rows[i * width],
                 width);
        score<Q>(rows.get(), keys, num, width, scores);
        for (int64_t i = 0; i < Q; i++) {
          int64_t row = std::min(x + i, num_x - 1) / num_heads, at = t * num_padded + x + i;
          int64_t seen = std::clamp<int64_t>(len[b * num_q + row] - begin, 0, num);
          soften(scores + i * kSplit, num, seen, scale, largest[at], total[at]);
        }
        mix<Q>(scores, keys, num, num_values, &parts[(t * num_padded + x) * num_values]);
      });
    }
  });
  at::parallel_for(0, num_seqs * num_x, 8, [&](int64_t first, int64_t last) {
    auto sums = space<float>(num_values);
    for (int64_t unit = first; unit < last; unit++) {
      int64_t b = unit / num_x, x = unit % num_x;
      float most = kNever, weight = 0;
      std::fill_n(sums.get(), num_values, 0.0f);
      for (int64_t t = first_of[b]; t < first_of[b + 1]; t++)
        most = std::max(most, largest[t * num_padded + x]);
      for (int64_t t = first_of[b]; t < first_of[b + 1]; t++) {
        int64_t i = t * num_padded + x;
        if (total[i] == 0) continue;
        float share = std::exp(largest[i] - most);
        weight += share * total[i];
        for (int64_t c = 0; c < num_values; c += kLanes)
          store(&sums[c], load(&sums[c]) + share * load(&parts[i * num_values + c]));
      }
      T* to = out.mutable_data_ptr<T>() + unit * num_values;
      int64_t c = 0;
      for (; c + 2 * kLanes <= num_values; c += 2 * kLanes)
        store(to + c, load(&sums[c]) / weight, load(&sums[c + kLanes]) / weight);
      if (c < num_values) store(to + c, load(&sums[c]) / weight);
    }
  });
}

Tensor mla_attend(const Tensor& q, const Tensor& up_k, const Tensor& up_v, const Tensor& cos,
                  const Tensor& sin, bool interleaved, const Tensor& cache, const Tensor& table,
                  const Tensor& lens, double scale) {
  int64_t num_heads = q.size(1), width = cache.size(2), num_values = up_v.size(2);
  TORCH_CHECK(cache.is_contiguous() && width % kLanes == 0 && num_values % kLanes == 0);
  Tensor latent = mla_query(q, up_k, cos, sin, interleaved);
  TORCH_CHECK(latent.size(2) == width && latent.size(0) == lens.numel());
  Tensor o = at::empty({q.size(0), num_heads, num_values}, q.options());
  with_type(q, [&](auto zero) {
    attend_rows<decltype(zero)>(latent, cache, table.contiguous(), lens.contiguous(), num_values,
                                scale, o);
  });
  return mla_value(o, up_v);
}

constexpr int64_t kKeys = 512;      // of one head that lie expanded at once
constexpr int64_t kQueryRows = 48;  // that meet them at once

// Queries of one sequence's ``num`` newest tokens and the places of all ``context`` entries.
template <class T>
struct Segment {
  const T* const* entries;
  int64_t row, num, context;
};

struct Widths {
  int64_t latent, rope, nope, value, entry;
  int64_t key() const { return nope + rope; }
};

// One head's keys [num / kBlock, K, kBlock] and values [V / kBlock, kKeys, kBlock] of ``num``
// entries, rebuilt from their latents by w [(N + V) / kBlock, C, kBlock].
template <class T>
void expand(const T* const* entries, int64_t num, const T* w, const Widths& of, float* latents,
            float* keys, float* values) {
  for (int64_t s = 0; s < num; s++) {
    to_float(entries[s], latents + s * of.latent, of.latent);
    for (int64_t r = 0; r < of.rope; r++)
      keys[(s / kBlock * of.key() + of.nope + r) * kBlock + s % kBlock] =
          float(entries[s][of.latent + r]);
  }
  int64_t num_out = of.nope + of.value;
  for (int64_t first = 0; first < num_out; first += kBlock) {
    const T* block[] = {w + first * of.latent};
    rows_of<1>(latents, of.latent, num, block, of.latent, [&](int64_t s, const Vec* sums) {
      for (int64_t i = 0; i < std::min<int64_t>(kBlock, num_out - first); i++) {
        int64_t out = first + i, v = out - of.nope;
        float x = sums[i / kLanes][i % kLanes];
        if (v < 0)
          keys[(s / kBlock * of.key() + out) * kBlock + s % kBlock] = x;
        else
          values[(v / kBlock * kKeys + s) * kBlock + v % kBlock] = x;
      }
    });
  }
}

// What kQueryRows rows or fewer have attended to so far: sums are not divided by ``total`` yet.
struct Attended {
  float largest[kQueryRows], total[kQueryRows];
};

// ``num`` rows q [., K], the first of which sees ``seen`` of the keys and each one more than that
// before it, go on with ``num_keys`` more.
inline void go_on(const float* q, int64_t num, int64_t seen, int64_t num_keys, const float* keys,
                  const float* values, const Widths& of, float scale, float* weights,
                  Attended& state, float* sums) {
  for (int64_t s = 0; s < num_keys; s += kBlock) {
    const float* block[] = {keys + s * of.key()};
    rows_of<1>(q, of.key(), num, block, of.key(), [&](int64_t row, const Vec* scores) {
      EACH (i, kVecs) store(weights + row * kKeys + s + i * kLanes, scores[i]);
    });
  }
  int64_t room = (num_keys + kBlock - 1) / kBlock * kBlock;
  for (int64_t row = 0; row < num; row++) {
    float before = state.largest[row], largest, total;
    int64_t visible = std::clamp<int64_t>(seen + row, 0, num_keys);
    soften(weights + row * kKeys, room, visible, scale, largest, total, before);
    float kept = before == kNever ? 0 : std::exp(before - largest);
    state.largest[row] = largest;
    state.total[row] = state.total[row] * kept + total;
    for (int64_t v = 0; v < of.value; v += kLanes)
      store(sums + row * of.value + v, load(sums + row * of.value + v) * kept);
  }
  for (int64_t v = 0; v < of.value; v += kBlock) {
    const float* block[] = {values + v * kKeys};
    rows_of<1>(weights, kKeys, num, block, num_keys, [&](int64_t row, const Vec* more) {
      float* to = sums + row * of.value + v;
      EACH (i, kVecs) store(to + i * kLanes, load(to + i * kLanes) + more[i]);
    });
  }
}

// Rows [begin, end) of a segment over its whole context, one head: out [., V], ``ld`` apart.
template <class T>
void attend_head(const Segment<T>& segment, int64_t begin, int64_t end, const float* q, const T* w,
                 const Widths& of, float scale, T* out, int64_t ld) {
  int64_t num = end - begin, lo = segment.context - segment.num;
  int64_t num_groups = (num + kQueryRows - 1) / kQueryRows;
  auto latents = space<float>(kKeys * of.latent), keys = space<float>(kKeys * of.key());
  auto values = space<float>(kKeys * of.value), weights = space<float>(kQueryRows * kKeys);
  auto sums = space<float>(num * of.value);
  std::fill_n(sums.get(), num * of.value, 0.0f);
  std::vector<Attended> states(num_groups);
  for (Attended& state : states) {
    std::fill_n(state.largest, kQueryRows, kNever);
    std::fill_n(state.total, kQueryRows, 0.0f);
  }
  for (int64_t first = 0; first < lo + end; first += kKeys) {
    int64_t num_here = std::min(kKeys, lo + end - first);
    expand(segment.entries + first, num_here, w, of, latents.get(), keys.get(), values.get());
    for (int64_t g = 0; g < num_groups; g++) {
      int64_t row = g * kQueryRows, rows = std::min(kQueryRows, num - row);
      int64_t seen = lo + begin + row + 1 - first;
      int64_t num_keys = std::min(num_here, seen + rows - 1);
      if (num_keys <= 0) continue;
      go_on(q + row * of.key(), rows, seen, num_keys, keys.get(), values.get(), of, scale,
            weights.get(), states[g], sums.get() + row * of.value);
    }
  }
  for (int64_t row = 0; row < num; row++)
    for (int64_t v = 0; v < of.value; v += kLanes) {
      float total = states[row / kQueryRows].total[row % kQueryRows];
      store(out + row * ld + v, load(sums.get() + row * of.value + v) / total);
    }
}

// Queries [num, K] of one head as floats, their last values rotated.
template <class T>
void turned(const T* q, int64_t ld, int64_t num, const float* cos, const float* sin,
            bool interleaved, const Widths& of, float* out) {
  auto pe = space<T>(of.rope);
  for (int64_t i = 0; i < num; i++, q += ld, out += of.key()) {
    to_float(q, out, of.nope);
    rotate(q + of.nope, cos + i * of.rope / 2, sin + i * of.rope / 2, interleaved, pe.get(),
           of.rope);
    to_float(pe.get(), out + of.nope, of.rope);
  }
}

template <class T>
void prefill_rows(const Tensor& q, const Tensor& kv_b, const Tensor& cos, const Tensor& sin,
                  bool interleaved, const Tensor& cache, const Tensor& pages,
                  at::IntArrayRef lengths, at::IntArrayRef contexts, const Widths& of, float scale,
                  Tensor& out) {
  int64_t num_segments = lengths.size(), num_heads = q.size(1), page_size = cache.size(1), row = 0;
  std::vector<std::vector<const T*>> entries(num_segments);
  std::vector<Segment<T>> segments;
  const int64_t* page = pages.const_data_ptr<int64_t>();
  for (int64_t g = 0; g < num_segments; g++) {
    for (int64_t s = 0; s < contexts[g]; s++)
      entries[g].push_back(cache.const_data_ptr<T>() +
                           (page[s / page_size] * page_size + s % page_size) * of.entry);
    segments.push_back({entries[g].data(), row, lengths[g], contexts[g]});
    row += lengths[g];
    page += (contexts[g] + page_size - 1) / page_size;
  }
  // Rows of a head are only split, and its keys rebuilt for each part, if threads had no work.
  int64_t num_tasks = std::max<int64_t>(1, num_segments * num_heads);
  int64_t num_parts = (at::get_num_threads() + num_tasks - 1) / num_tasks;
  at::parallel_for(0, num_segments * num_heads * num_parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; task++) {
      int64_t part = task % num_parts, h = task / num_parts % num_heads;
      const Segment<T>& segment = segments[task / num_parts / num_heads];
      int64_t begin = segment.num * part / num_parts, stop = segment.num * (part + 1) / num_parts;
      if (begin == stop) continue;
      int64_t row = segment.row + begin, angle = row * of.rope / 2;
      auto queries = space<float>((stop - begin) * of.key());
      turned(q.const_data_ptr<T>() + row * q.stride(0) + h * q.stride(1), q.stride(0), stop - begin,
             cos.const_data_ptr<float>() + angle, sin.const_data_ptr<float>() + angle, interleaved,
             of, queries.get());
      attend_head(segment, begin, stop, queries.get(),
                  kv_b.const_data_ptr<T>() + h * kv_b.stride(0), of, scale,
                  out.mutable_data_ptr<T>() + row * out.stride(0) + h * of.value, out.stride(0));
    }
  });
}

Tensor mla_prefill(const Tensor& q, const Tensor& kv_b, const Tensor& cos, const Tensor& sin,
                   bool interleaved, const Tensor& cache, const Tensor& pages,
                   at::IntArrayRef lengths, at::IntArrayRef contexts, int64_t num_values,
                   double scale) {
  int64_t latent = kv_b.size(2), width = cache.size(2), rope = width - latent;
  Widths of{latent, rope, q.size(2) - rope, num_values, width};
  TORCH_CHECK(cache.is_contiguous() && pages.is_contiguous() && num_values % kBlock == 0 &&
              q.stride(2) == 1 && cos.is_contiguous() && sin.is_contiguous());
  Tensor out = at::zeros({q.size(0), q.size(1), num_values}, q.options());
  with_type(q, [&](auto zero) {
    prefill_rows<decltype(zero)>(q, kv_b, cos, sin, interleaved, cache, pages, lengths, contexts,
                                 of, scale, out);
  });
  return out;
}

// ---- experts ----

template <class T>
void expert_rows(const Tensor& x, const std::optional<Tensor>& tokens,
                 const std::optional<Tensor>& slots, const Tensor& gate_up, const Tensor& down,
                 Tensor& out) {
  int64_t num_slots = gate_up.size(0), num_dim = x.size(1), num_pairs = out.size(0);
  int64_t num_blocks = gate_up.size(1) / 2, num_hidden = num_blocks * kBlock;
  int64_t per_token = x.size(0) ? num_pairs / x.size(0) : 1;
  const int64_t* token = tokens ? tokens->const_data_ptr<int64_t>() : nullptr;
  const int64_t* slot = slots ? slots->const_data_ptr<int64_t>() : nullptr;
  std::vector<std::vector<int64_t>> pairs(num_slots);
  for (int64_t p = 0; p < num_pairs; p++) {
    int64_t s = slot ? slot[p] : 0;
    if (s < num_slots) pairs[s].push_back(p);
  }
  auto rows = space<float>(num_pairs * num_dim), hidden = space<float>(num_pairs * num_hidden);
  std::vector<int64_t> pair_of;
  std::vector<Group<T>> into, back;
  for (int64_t s = 0; s < num_slots; s++) {
    if (pairs[s].empty()) continue;
    int64_t first = pair_of.size(), num = pairs[s].size();
    into.push_back({rows.get() + first * num_dim, num_dim, num,
                    gate_up.const_data_ptr<T>() + s * gate_up.stride(0)});
    back.push_back({hidden.get() + first * num_hidden, num_hidden, num,
                    down.const_data_ptr<T>() + s * down.stride(0)});
    pair_of.insert(pair_of.end(), pairs[s].begin(), pairs[s].end());
  }
  for (size_t i = 0; i < pair_of.size(); i++) {
    int64_t from = token ? token[pair_of[i]] : pair_of[i] / per_token;
    to_float(x.const_data_ptr<T>() + from * x.stride(0), rows.get() + i * num_dim, num_dim);
  }
  // Blocks of gate and up alternate, so that a task meets both of each.
  products<2, T>(into, num_dim, 2 * num_blocks,
                 [&](int64_t g, int64_t row, int64_t first, const Vec* sums, int num) {
                   float* to = const_cast<float*>(back[g].x) + row * num_hidden + first / 2;
                   for (int i = 0; i < num / 2; i++) {
                     int pair = i / kVecs * 2 * kVecs + i % kVecs;
                     Vec gate = sums[pair];
                     store(to + i * kLanes, gate / (1.0f + exp(-gate)) * sums[pair + kVecs]);
                   }
                 });
  products<1, T>(back, num_hidden, down.size(1),
                 [&](int64_t g, int64_t row, int64_t first, const Vec* sums, int num) {
                   int64_t i = (back[g].x - hidden.get()) / num_hidden + row;
                   T* to = out.mutable_data_ptr<T>() + pair_of[i] * num_dim;
                   for (int j = 0; j < num; j++, first += kLanes)
                     put(to + first, sums[j], num_dim - first);
                 });
}

Tensor experts(const Tensor& x, const std::optional<Tensor>& tokens,
               const std::optional<Tensor>& slots, const Tensor& gate_up, const Tensor& down) {
  TORCH_CHECK(x.dtype() == gate_up.dtype() && x.size(1) == gate_up.size(2) && x.stride(1) == 1);
  Tensor out = at::empty({slots ? slots->size(0) : x.size(0), x.size(1)}, x.options());
  with_type(x,
            [&](auto zero) { expert_rows<decltype(zero)>(x, tokens, slots, gate_up, down, out); });
  return out;
}

// Indices of the ``num`` largest of ``scores``, the lowest first among equals.
inline void best(const float* scores, int64_t size, int64_t num, int64_t* ids) {
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + num, order.end(), [&](int64_t a, int64_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  });
  std::copy_n(order.begin(), num, ids);
}

struct Routing {
  int64_t num_experts, num_groups, num_kept, num_chosen;
  bool sigmoid, by_two, normalised;
  float filler, factor;
};

// scores [E] of one token: what they come to, which experts are chosen, and what these weigh.
inline void route_one(float* scores, const float* bias, const Routing& how, int64_t* ids,
                      float* weights) {
  int64_t num = how.num_experts, size = num / how.num_groups;
  float most = *std::max_element(scores, scores + num), total = 0;
  for (int64_t e = 0; e < num; e++) {
    scores[e] = how.sigmoid ? 1 / (1 + std::exp(-scores[e])) : std::exp(scores[e] - most);
    total += scores[e];
  }
  if (!how.sigmoid)
    for (int64_t e = 0; e < num; e++) scores[e] /= total;
  std::vector<float> chosen(scores, scores + num), of_group(how.num_groups);
  for (int64_t e = 0; e < num; e++) {
    if (bias != nullptr) chosen[e] += bias[e];
    if (std::isnan(chosen[e])) chosen[e] = kNever;  // which has a place in an order
  }
  if (how.num_groups > 1) {
    for (int64_t g = 0; g < how.num_groups; g++) {
      std::vector<float> two(chosen.begin() + g * size, chosen.begin() + (g + 1) * size);
      int64_t counted = std::min<int64_t>(how.by_two ? 2 : 1, size);
      std::partial_sort(two.begin(), two.begin() + counted, two.end(), std::greater<float>());
      of_group[g] = std::accumulate(two.begin(), two.begin() + counted, 0.0f);
    }
    std::vector<int64_t> kept(how.num_kept);
    best(of_group.data(), how.num_groups, how.num_kept, kept.data());
    for (int64_t g = 0; g < how.num_groups; g++)
      if (std::find(kept.begin(), kept.end(), g) == kept.end())
        std::fill_n(chosen.begin() + g * size, size, how.filler);
  }
  best(chosen.data(), num, how.num_chosen, ids);
  float whole = 0;
  for (int64_t k = 0; k < how.num_chosen; k++) whole += scores[ids[k]];
  for (int64_t k = 0; k < how.num_chosen; k++)
    weights[k] = (how.normalised ? scores[ids[k]] / (whole + 1e-20f) : scores[ids[k]]) * how.factor;
}

std::tuple<Tensor, Tensor> route(const Tensor& x, const Tensor& w,
                                 const std::optional<Tensor>& bias, at::IntArrayRef sizes,
                                 bool sigmoid, bool by_two, bool normalised, double filler,
                                 double factor) {
  Routing how{sizes[0], sizes[1],   sizes[2],      sizes[3],     sigmoid,
              by_two,   normalised, float(filler), float(factor)};
  Tensor scores = linear(x, w, how.num_experts, true);
  Tensor ids = at::empty({x.size(0), how.num_chosen}, x.options().dtype(at::kLong));
  Tensor weights = at::empty({x.size(0), how.num_chosen}, x.options().dtype(at::kFloat));
  const float* biases = bias ? bias->const_data_ptr<float>() : nullptr;
  at::parallel_for(0, x.size(0), kRowChunk, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      route_one(scores.mutable_data_ptr<float>() + t * how.num_experts, biases, how,
                ids.mutable_data_ptr<int64_t>() + t * how.num_chosen,
                weights.mutable_data_ptr<float>() + t * how.num_chosen);
  });
  return {ids, weights};
}

template <class T>
void combine_row(const T* out, const float* weights, int64_t num_chosen, const T* more, T* y,
                 int64_t num) {
  int64_t d = 0;
  for (; d + kLanes <= num; d += kLanes) {
    Vec total{};
    for (int64_t k = 0; k < num_chosen; k++) total += weights[k] * load(out + k * num + d);
    store(y + d, total);
    if (more) store(y + d, load(y + d) + load(more + d));
  }
  for (; d < num; d++) {
    float total = 0;
    for (int64_t k = 0; k < num_chosen; k++) total += weights[k] * float(out[k * num + d]);
    y[d] = T(total);
    if (more) y[d] = T(float(y[d]) + float(more[d]));
  }
}

Tensor combine(const Tensor& out, const Tensor& weights, const std::optional<Tensor>& more) {
  int64_t num_chosen = out.size(1), num = out.size(2);
  TORCH_CHECK(out.is_contiguous() && weights.is_contiguous() && (!more || more->is_contiguous()));
  Tensor y = at::empty({out.size(0), num}, out.options());
  with_type(out, [&](auto zero) {
    using T = decltype(zero);
    const T *from = out.const_data_ptr<T>(), *shared = more ? more->const_data_ptr<T>() : nullptr;
    const float* weight = weights.const_data_ptr<float>();
    T* to = y.mutable_data_ptr<T>();
    at::parallel_for(0, out.size(0), kRowChunk, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        combine_row(from + t * num_chosen * num, weight + t * num_chosen, num_chosen,
                    shared ? shared + t * num : nullptr, to + t * num, num);
    });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY(tandem, m) {
  m.def("linear(Tensor x, Tensor w, int num_out, bool in_fp32=False) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor more, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def(
      "mla_entry(Tensor kv, Tensor weight, float eps, Tensor cos, Tensor sin, bool interleaved, "
      "Tensor slots, Tensor(a!) cache) -> ()");
  m.def(
      "mla_attend(Tensor q, Tensor up_k, Tensor up_v, Tensor cos, Tensor sin, bool interleaved, "
      "Tensor cache, Tensor table, Tensor lens, float scale) -> Tensor");
  m.def(
      "mla_prefill(Tensor q, Tensor kv_b, Tensor cos, Tensor sin, bool interleaved, Tensor cache, "
      "Tensor pages, int[] lengths, int[] contexts, int num_values, float scale) -> Tensor");
  m.def("experts(Tensor x, Tensor? tokens, Tensor? slots, Tensor gate_up, Tensor down) -> Tensor");
  m.def(
      "route(Tensor x, Tensor w, Tensor? bias, int[] sizes, bool sigmoid, bool by_two, "
      "bool normalised, float filler, float factor) -> (Tensor, Tensor)");
  m.def("combine(Tensor out, Tensor weights, Tensor? more) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("linear", linear);
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("mla_entry", mla_entry);
  m.impl("mla_attend", mla_attend);
  m.impl("mla_prefill", mla_prefill);
  m.impl("experts", experts);
  m.impl("route", route);
  m.impl("combine", combine);
}
