// Copies cache entries of all layers between pages and staging buffers, in runs of adjacent slots.

#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "vectors.h"

// Copies of this size or more bypass the CPU caches. They do not fit into the caches, and their
// data is next read by the network or a later step.
constexpr int64_t STREAMED_BYTES = 2 << 20;

inline void stream(char* to, const char* from, int64_t num_bytes) {
#ifdef __SSE2__
  const int64_t lead = std::min<int64_t>(num_bytes, -reinterpret_cast<uintptr_t>(to) & 15);
  std::memcpy(to, from, lead);
  int64_t i = lead;
  for (; i + 16 <= num_bytes; i += 16) {
    const auto part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), part);
  }
  std::memcpy(to + i, from + i, num_bytes - i);
#else
  std::memcpy(to, from, num_bytes);
#endif
}

// Copies slots [T] of ``layers`` [num_slots, W] to ``rows`` [num_layers, T, W] (gather), or back.
// See kv_transfer/caches.py.
inline void copy_rows(at::TensorList layers, const Tensor& slots, const Tensor& rows,
                      bool is_gather) {
  TORCH_CHECK(rows.is_contiguous() && rows.size(0) == int64_t(layers.size()), "rows");
  const int64_t num = slots.numel(), row_bytes = rows.size(2) * rows.element_size();
  const int64_t* slot = slots.data_ptr<int64_t>();
  const auto copy = rows.nbytes() < STREAMED_BYTES
                        ? [](char* to, const char* from, int64_t n) { std::memcpy(to, from, n); }
                        : stream;
  char* staged = static_cast<char*>(rows.data_ptr());
  for (const Tensor& layer : layers) {
    TORCH_CHECK(layer.is_contiguous() && layer.size(1) == rows.size(2), "a layer");
    char* cached = static_cast<char*>(layer.data_ptr());
    for (int64_t begin = 0, end; begin < num; begin = end) {
      for (end = begin + 1; end < num && slot[end] == slot[end - 1] + 1;) end++;
      TORCH_CHECK(0 <= slot[begin] && slot[end - 1] < layer.size(0), "slot ", slot[begin]);
      char* entry = cached + slot[begin] * row_bytes;
      char* row = staged + begin * row_bytes;
      copy(is_gather ? row : entry, is_gather ? entry : row, (end - begin) * row_bytes);
    }
    staged += num * row_bytes;
  }
#ifdef __SSE2__
  _mm_sfence();
#endif
}
