// MLA of prompts. Keys and values are expanded from latents, kKeys of one head at a time.
#pragma once

#include "attend.h"

namespace {

constexpr int64_t kKeys = 512;      // number of expanded keys of a head at a time
constexpr int64_t kQueryRows = 48;  // number of query rows that attend to them at a time

// The last ``num`` tokens of a sequence as queries, and the addresses of its ``context`` entries.
template <class T>
struct Segment {
  const T* const* entries;
  int64_t row, num, context;
};

struct Widths {
  int64_t latent, rope, nope, value, entry;
  int64_t key() const { return nope + rope; }
};

// Expands ``num`` entries to keys [num / kBlock, K, kBlock] and values [V / kBlock, kKeys, kBlock]
// of one head, by w [(N + V) / kBlock, C, kBlock].
template <class T, class W>
void expand(const T* const* entries, int64_t num, const W* w, int64_t num_k, const Widths& of,
            Number<W>* latents, float* keys, float* values) {
  for (int64_t s = 0; s < num; s++) {
    to_numbers(entries[s], latents + s * num_k, num_k);
    for (int64_t r = 0; r < of.rope; r++)
      keys[(s / kBlock * of.key() + of.nope + r) * kBlock + s % kBlock] =
          float(entries[s][of.latent + r]);
  }
  int64_t num_out = of.nope + of.value;
  for (int64_t first = 0; first < num_out; first += kBlock) {
    const W* block[] = {w + first * num_k};
    rows_of<1>(latents, num_k, num, block, num_k, [&](int64_t s, const Vec* sums) {
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

// Softmax state of up to kQueryRows rows. Their weighted sums are not yet divided by ``total``.
struct Attended {
  float largest[kQueryRows], total[kQueryRows];
};

// Returns whether the values [V / kBlock, kKeys, kBlock] of keys [begin, end) are finite.
inline bool has_numbers(const float* values, int64_t begin, int64_t end, int64_t num_values) {
  Vec zeros{};
  for (int64_t v = 0; v < num_values; v += kBlock)
    for (const float* x = values + v * kKeys + begin * kBlock; x < values + v * kKeys + end * kBlock;
         x += kLanes)
      zeros += load(x) * 0.0f;
  return sum(zeros) == 0;
}

// Extends the attention of ``num`` rows q [., K] by ``num_keys`` keys. The first row sees ``seen``
// of them, and each row one more than the previous.
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
  // Adds the values of ``visible`` keys to ``rows`` rows, starting at ``first``.
  auto add = [&](int64_t first, int64_t rows, int64_t visible) {
    for (int64_t v = 0; v < of.value; v += kBlock) {
      const float* block[] = {values + v * kKeys};
      auto emit = [&](int64_t row, const Vec* more) {
        float* to = sums + (first + row) * of.value + v;
        EACH (i, kVecs) store(to + i * kLanes, load(to + i * kLanes) + more[i]);
      };
      rows_of<1>(weights + first * kKeys, kKeys, rows, block, visible, emit);
    }
  };
  // A weight of 0 does not hide a non-finite value. If there are any, each row adds only the values
  // that it sees.
  if (has_numbers(values, std::clamp<int64_t>(seen, 0, num_keys), num_keys, of.value))
    return add(0, num, num_keys);
  for (int64_t row = 0; row < num; row++)
    add(row, 1, std::clamp<int64_t>(seen + row, 0, num_keys));
}

// Attends with rows [begin, end) of a segment over its context, for one head. Rows of ``out`` [.,
// V] have the stride ``ld``.
template <class T, class W>
void attend_head(const Segment<T>& segment, int64_t begin, int64_t end, const float* q, const W* w,
                 int64_t num_k, const Widths& of, float scale, T* out, int64_t ld) {
  int64_t num = end - begin, lo = segment.context - segment.num;
  int64_t num_groups = (num + kQueryRows - 1) / kQueryRows;
  auto latents = space<Number<W>>(kKeys * num_k);
  auto keys = space<float>(kKeys * of.key());
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
    expand(segment.entries + first, num_here, w, num_k, of, latents.get(), keys.get(),
           values.get());
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

// Converts queries [num, K] of one head to float and rotates their last R values.
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
    entries[g].resize(contexts[g]);
    find(cache.const_data_ptr<T>(), page, page_size, of.entry, 0, contexts[g], entries[g].data());
    segments.push_back({entries[g].data(), row, lengths[g], contexts[g]});
    row += lengths[g];
    page += (contexts[g] + page_size - 1) / page_size;
  }
  // The rows of a head are split only if threads would be idle otherwise, because each part expands
  // all keys again.
  int64_t num_tasks = std::max<int64_t>(1, num_segments * num_heads);
  int64_t num_parts = (crew().num_threads() + num_tasks - 1) / num_tasks;
  in_pieces(num_segments * num_heads * num_parts, 1, [&](int64_t first, int64_t last) {
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
      T* to = out.mutable_data_ptr<T>() + row * out.stride(0) + h * of.value;
      with_packed(kv_b.const_data_ptr<T>(), of.latent, [&](auto* packed, int64_t step) {
        attend_head(segment, begin, stop, queries.get(), packed + h * kv_b.stride(0) / step,
                    of.latent / step, of, scale, to, out.stride(0));
      });
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

}  // namespace
