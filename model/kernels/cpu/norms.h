// RMS norms, rotary embedding, and writing of cache entries.
#pragma once

#include "vectors.h"

namespace {

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
    in_pieces(num_rows, kRowChunk, [&](int64_t begin, int64_t end) {
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
    in_pieces(num_rows, kRowChunk, [&](int64_t begin, int64_t end) {
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

// Rotates pairs (2j, 2j + 1) if ``interleaved``, otherwise (j, j + R / 2), by R / 2 angles. Writes
// them as (2j, 2j + 1).
template <class T>
void rotate(const T* x, const float* cos, const float* sin, bool interleaved, T* y, int64_t width) {
  int64_t num = width / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : num;
  for (int64_t j = 0; j < num; j++) {
    float a = float(x[j * step]), b = float(x[j * step + apart]);
    y[2 * j] = T(a * cos[j] - b * sin[j]);
    y[2 * j + 1] = T(a * sin[j] + b * cos[j]);
  }
}

void write_mla_cache(const Tensor& kv, const Tensor& weight, double eps, const Tensor& cos,
               const Tensor& sin, bool interleaved, const Tensor& slots, Tensor cache) {
  int64_t num_latent = weight.size(0), num_pe = kv.size(1) - num_latent, width = cache.size(-1);
  TORCH_CHECK(cache.is_contiguous() && kv.stride(1) == 1 && num_latent + num_pe == width);
  TORCH_CHECK(slots.is_contiguous() && cos.is_contiguous() && sin.is_contiguous());
  with_type(kv, [&](auto zero) {
    using T = decltype(zero);
    in_pieces(kv.size(0), kRowChunk, [&](int64_t begin, int64_t end) {
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

// Writes the rotated keys of all heads, then their values.
void write_gqa_cache(const Tensor& kv, const Tensor& cos, const Tensor& sin, bool interleaved,
               const Tensor& slots, Tensor cache) {
  int64_t num = kv.size(1), width = 2 * cos.size(1);
  TORCH_CHECK(cache.is_contiguous() && kv.stride(1) == 1 && num == cache.size(2));
  TORCH_CHECK(slots.is_contiguous() && cos.is_contiguous() && sin.is_contiguous());
  with_type(kv, [&](auto zero) {
    using T = decltype(zero);
    in_pieces(kv.size(0), kRowChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const T* from = kv.const_data_ptr<T>() + i * kv.stride(0);
        T* to = cache.mutable_data_ptr<T>() + slots.const_data_ptr<int64_t>()[i] * num;
        for (int64_t at = 0; at < num / 2; at += width)
          rotate(from + at, cos.const_data_ptr<float>() + i * width / 2,
                 sin.const_data_ptr<float>() + i * width / 2, interleaved, to + at, width);
        std::copy_n(from + num / 2, num / 2, to + num / 2);
      }
    });
  });
}

// Copies entries ``from`` [rows, moves] to ``to`` in every cache. The moves of a row run in order.
void move(at::TensorList caches, const Tensor& from, const Tensor& to) {
  Tensor source = from.contiguous(), target = to.contiguous();
  int64_t num_rows = from.size(0), num = from.size(1);
  const int64_t *at = source.const_data_ptr<int64_t>(), *put = target.const_data_ptr<int64_t>();
  in_pieces(num_rows * caches.size(), 8, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; unit++) {
      const Tensor& cache = caches[unit / num_rows];
      int64_t bytes = cache.size(-1) * cache.element_size(), i = unit % num_rows * num;
      char* entries = static_cast<char*>(cache.data_ptr());
      for (int64_t last = i + num; i < last; i++)
        if (at[i] != put[i]) std::memcpy(entries + put[i] * bytes, entries + at[i] * bytes, bytes);
    }
  });
}

}  // namespace
