// Products of rows and packed weights.
#pragma once

#include <ATen/ops/constant_pad_nd.h>

#include "vectors.h"

namespace {

// Type of a row's element at each step along K, for weights that are packed as W.
template <class W>
using Number = std::conditional_t<std::is_same_v<W, Two>, Two, float>;

// Computes acc[r][b] = sum over k of x[r, k] * w[b][k, :], where k counts steps along K.
template <int R, int B, class T>
[[gnu::noinline]] void tile(const Number<T>* x, int64_t ldx, const T* const* w, int64_t num_k,
                            Vec (*acc)[B * kVecs]) {
  Vec sums[R][B * kVecs];
  EACH (r, R)
    EACH (i, B * kVecs) sums[r][i] = Vec{};
  auto weight = [&](int64_t k, int i) {
    return load(w[i / kVecs] + k * kBlock + i % kVecs * kLanes);
  };
  // Prefetch the weights of later steps, of this tile or the next, because last-level caches have a
  // high latency. The target is the L2 cache, because an L1 cache supports few outstanding
  // requests.
  constexpr int64_t line = kBlock * sizeof(T);
  int64_t ahead = std::min(num_k, kNear / 4 / line), past = (B - 1) * num_k;
  // Keep the smaller operand, rows or weights, in registers while streaming the other.
  for (int64_t k = 0; k < num_k; k++) {
    int64_t soon = k + ahead < num_k ? k + ahead : k + ahead + past;
    EACH (i, B) __builtin_prefetch(w[i] + soon * kBlock, 0, 2);
    if constexpr (R <= B * kVecs) {
      Number<T> rows[R];
      EACH (r, R) rows[r] = x[r * ldx + k];
      EACH (i, B * kVecs) {
        auto one = weight(k, i);
        EACH (r, R) add_product(sums[r][i], rows[r], one);
      }
    } else {
      decltype(weight(0, 0)) ones[B * kVecs];
      EACH (i, B * kVecs) ones[i] = weight(k, i);
      EACH (r, R) {
        Number<T> row = x[r * ldx + k];
        EACH (i, B * kVecs) add_product(sums[r][i], row, ones[i]);
      }
    }
  }
  EACH (r, R)
    EACH (i, B * kVecs) acc[r][i] = sums[r][i];
}

// Calls emit(row, sums) for each of ``num`` rows, computing B blocks and up to R rows at a time.
template <int B, int R = std::min(12, kSums / (B * kVecs)), class T, class Emit>
void rows_of(const Number<T>* x, int64_t ldx, int64_t num, const T* const* w, int64_t num_k,
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

// Rows x [num, K] with a common packed weight w [blocks, K, kBlock], where K counts steps.
template <class T>
struct Group {
  const Number<T>* x;
  int64_t ldx, num;
  const T* w;
};

// Calls emit(group, row, first output, sums, number of sums) for all groups, rows and blocks, on
// all threads, computing at least kTogether blocks at a time.
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
  in_pieces(tasks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const Task& task = tasks[t];
      const Group<T>& group = groups[task.group];
      const Number<T>* x = group.x + task.row * group.ldx;
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
      // With few rows, compute several blocks in parallel. The number of independent sums is then
      // large enough to hide the latency of additions, and small enough to fit in registers.
      if (task.num <= std::min(4, kSums / (4 * kVecs)))
        while (block + 4 <= task.end) run(std::integral_constant<int, 4>{});
      if (task.num <= 3 || kVecs == 1)
        while (block + 2 <= task.end) run(std::integral_constant<int, 2>{});
      while (block < task.end) run(std::integral_constant<int, kTogether>{});
    }
  });
}

// Returns rows [num, K] of any stride as contiguous ``Number<W>``. They are converted into
// ``room``, or returned as they are if they already have this form.
template <class W, class T>
const Number<W>* numbers(const T* x, int64_t ld, int64_t num, int64_t num_k,
                         Space<Number<W>>& room) {
  if constexpr (std::is_same_v<T, float>)
    if (ld == num_k) return x;
  room = space<Number<W>>(num * num_k);
  for (int64_t i = 0; i < num; i++) to_numbers(x + i * ld, room.get() + i * num_k, num_k);
  return room.get();
}

// Rearranges [.., M, K] to [.., M / kBlock, K, kBlock], padded with zeros.
Tensor by_lanes(const Tensor& w) {
  Tensor filled = at::constant_pad_nd(w, {0, 0, 0, (kBlock - w.size(-2) % kBlock) % kBlock});
  return filled.unflatten(-2, {-1, kBlock}).transpose(-1, -2).contiguous();
}

// Packs weights for rows of the same dtype. Neighbours along K form a ``Two`` if the processor
// multiplies bf16 pairs.
Tensor pack(const Tensor& w) {
  Tensor packed = by_lanes(w);
  if (!kHasTwos || w.scalar_type() != at::kBFloat16 || w.size(-1) % 2 != 0) return packed;
  Tensor twos = packed.unflatten(-2, {-1, 2}).flip(-2).transpose(-1, -2);
  return twos.reshape(packed.sizes());
}

// Calls f(packed, number of values per step along K) for weights from ``pack``.
template <class T, class F>
void with_packed(const T* w, int64_t num_k, F f) {
  if constexpr (kHasTwos && std::is_same_v<T, BFloat16>)
    if (num_k % 2 == 0) return f(reinterpret_cast<const Two*>(w), 2);
  f(w, 1);
}

template <class T, class Y>
void linear_rows(const Tensor& x, const Tensor& w, Tensor& y) {
  int64_t num_k = w.size(1), num_out = y.size(1);
  Y* out = y.mutable_data_ptr<Y>();
  with_packed(w.const_data_ptr<T>(), num_k, [&](auto* packed, int64_t step) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(packed)>>;
    Space<Number<W>> room;
    auto* rows = numbers<W>(x.const_data_ptr<T>(), x.stride(0), x.size(0), num_k / step, room);
    products<1, W>({{rows, num_k / step, x.size(0), packed}}, num_k / step, w.size(0),
                   [&](int64_t, int64_t row, int64_t first, const Vec* sums, int num) {
                     for (int i = 0; i < num; i++, first += kLanes)
                       put(out + row * num_out + first, sums[i], num_out - first);
                   });
  });
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

// Multiplies x [M, H, >= K] by w [H, N / kBlock, K, kBlock] for each head, into y [M, H, >= N].
template <class T>
void by_head(const Tensor& x, const Tensor& w, Tensor& y) {
  int64_t num = x.size(0), num_heads = x.size(1);
  T* out = y.mutable_data_ptr<T>();
  with_packed(w.const_data_ptr<T>(), w.size(2), [&](auto* packed, int64_t step) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(packed)>>;
    int64_t num_k = w.size(2) / step;
    std::vector<Space<Number<W>>> rooms(num_heads);
    std::vector<Group<W>> groups;
    for (int64_t h = 0; h < num_heads; h++) {
      const T* from = x.const_data_ptr<T>() + h * x.stride(1);
      auto* rows = numbers<W>(from, x.stride(0), num, num_k, rooms[h]);
      groups.push_back({rows, num_k, num, packed + h * w.stride(0) / step});
    }
    products<1, W>(groups, num_k, w.size(1),
                   [&](int64_t h, int64_t row, int64_t first, const Vec* sums, int num_sums) {
                     T* to = out + row * y.stride(0) + h * y.stride(1) + first;
                     for (int i = 0; i < num_sums; i++) put(to + i * kLanes, sums[i], kLanes);
                   });
  });
}

}  // namespace
