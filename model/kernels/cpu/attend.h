// Attention of decode steps over a paged cache: absorbed MLA and grouped-query attention.
#pragma once

#include "norms.h"
#include "products.h"

namespace {

constexpr int64_t kSplit = 256;       // number of context tokens per task
constexpr int kQueries = kLanes / 2;  // maximum number of queries computed together

// Converts ``num`` values to float, in the order in which ``load`` fills two vectors. Values in
// this order are called unfolded.
template <class T>
void unfold(const T* from, float* to, int64_t num) {
  int64_t i = 0;
  for (Vec a, b; i + 2 * kLanes <= num; i += 2 * kLanes) {
    load(from + i, a, b);
    store(to + i, a, b);
  }
  to_float(from + i, to + i, num - i);
}

// Computes scores[q][s] of Q unfolded queries [., width] and ``num`` keys; key s is at keys[s].
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
      EACH (j, S) __builtin_prefetch(soon[j] + l, 0, 2);
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

// Turns the scores of ``num`` keys into softmax weights relative to ``largest``, and sums them in
// ``total``. Only the first ``seen`` keys are visible. ``largest`` becomes their largest scaled
// score, or ``before`` if that is larger.
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

// Computes out[q][c] = sum over s of weights[q][s] * keys[s][apart + c], c < num_values, unfolded.
// All queries see the first ``common`` keys. Later keys of weight 0 are skipped: a hidden value may
// be non-finite, and 0 times such a value is NaN.
template <int Q, class T>
void mix(const float* weights, const T* const* keys, int64_t common, int64_t num,
         int64_t num_values, float* out, int64_t apart) {
  constexpr int most = std::max(1, kLanes / Q / 2);
  auto columns = [&](auto count, int64_t c) {
    constexpr int W = decltype(count)::value;
    Vec acc[Q][2 * W];
    EACH (i, Q)
      EACH (v, 2 * W) acc[i][v] = Vec{};
    for (int64_t s = 0; s < common; s++)
      EACH (v, W) {
        Vec a, b;
        load(keys[s] + apart + c + 2 * v * kLanes, a, b);
        EACH (i, Q) {
          acc[i][2 * v] += weights[i * kSplit + s] * a;
          acc[i][2 * v + 1] += weights[i * kSplit + s] * b;
        }
      }
    for (int64_t s = common; s < num; s++)
      EACH (v, W) {
        Vec a, b;
        load(keys[s] + apart + c + 2 * v * kLanes, a, b);
        EACH (i, Q) {
          float weight = weights[i * kSplit + s];
          if (weight == 0) continue;
          acc[i][2 * v] += weight * a;
          acc[i][2 * v + 1] += weight * b;
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
    for (int64_t s = 0; s < num; s++)
      if (float weight = weights[i * kSplit + s]; s < common || weight != 0)
        acc += weight * load(keys[s] + apart + c);
    store(out + i * num_values + c, acc);
  }
}

// Writes the addresses of cache entries [begin, end) of a sequence to ``entries``. ``page`` are the
// sequence's pages.
template <class T>
void find(const T* cache, const int64_t* page, int64_t page_size, int64_t width, int64_t begin,
          int64_t end, const T** entries) {
  for (int64_t s = begin; s < end;) {
    int64_t here = s % page_size, stop = std::min(end, s - here + page_size);
    const T* first = cache + (page[s / page_size] * page_size + here) * width;
    for (; s < stop; s++, first += width) *entries++ = first;
  }
}

// Like ``find``, for the draft slots that a tree node sees after its context of ``len`` slots.
// These are the slots whose bits are set, in order, so the keys have the same order as in a chain
// of the same drafts. Entries after the last bit are arbitrary.
template <class T>
void find_path(const T* cache, const int64_t* page, int64_t page_size, int64_t width, int64_t len,
               uint64_t bits, int64_t most, int64_t begin, int64_t end, const T** entries) {
  for (int64_t s = len; s < end; s++, bits &= bits - 1) {
    int64_t slot = std::min(most - 1, len + (bits ? __builtin_ctzll(bits) : 0));
    if (s >= begin)
      entries[s - begin] = cache + (page[slot / page_size] * page_size + slot % page_size) * width;
  }
}

// Calls f with the smallest of 2, 4 .. kQueries that is at least ``num``.
template <int Q = 2, class F>
void with_width(int64_t num, F f) {
  if constexpr (Q < kQueries)
    if (num > Q) return with_width<2 * Q>(num, f);
  f(std::integral_constant<int, Q>{});
}

// Number of entries that a row sees, in its context and its tree.
struct Seen {
  const int64_t *lens, *bits;  // ``bits`` is null without trees

  int64_t operator[](int64_t row) const {
    return lens[row] + (bits ? __builtin_popcountll(bits[row]) : 0);
  }
};

// Contexts split into tasks of kSplit entries. The tasks of a sequence are consecutive.
struct Splits {
  struct Task {
    int64_t seq, begin, end;
  };
  std::vector<Task> tasks;
  std::vector<int64_t> first_of;  // first task of each sequence, then the number of tasks

  Splits(Seen seen, int64_t num_seqs, int64_t num_q, int64_t most) {
    for (int64_t b = 0; b < num_seqs; b++) {
      int64_t longest = 0;
      for (int64_t row = b * num_q; row < (b + 1) * num_q; row++)
        longest = std::max(longest, seen[row]);
      longest = std::min(most, longest);
      first_of.push_back(tasks.size());
      for (int64_t s = 0; s < longest; s += kSplit)
        tasks.push_back({b, s, std::min(longest, s + kSplit)});
    }
    first_of.push_back(tasks.size());
  }
};

// Results of each task for each of ``num`` queries, not yet divided by ``total``. Queries are in
// groups of ``group`` that see the same entries, padded to a multiple of kQueries.
struct Parts {
  int64_t group, filled, num, num_values;
  Space<float> sums, largest, total;

  Parts(int64_t num_tasks, int64_t num_x, int64_t group, int64_t num_values)
      : group(group),
        filled((group + kQueries - 1) / kQueries * kQueries),
        num(num_x / group * filled),
        num_values(num_values),
        sums(num_tasks * num * num_values),
        largest(num_tasks * num),
        total(num_tasks * num) {}

  int64_t place(int64_t x) const { return x / group * filled + x % group; }

  // Merges the results of tasks [first, last) for the query at place x.
  template <class T>
  void merge(int64_t first, int64_t last, int64_t x, float* room, T* to) const {
    float most = kNever, weight = 0;
    std::fill_n(room, num_values, 0.0f);
    for (int64_t t = first; t < last; t++) most = std::max(most, largest[t * num + x]);
    for (int64_t i = first * num + x; i < last * num; i += num) {
      if (total[i] == 0) continue;
      float share = std::exp(largest[i] - most);
      weight += share * total[i];
      for (int64_t c = 0; c < num_values; c += kLanes)
        store(room + c, load(room + c) + share * load(&sums[i * num_values + c]));
    }
    int64_t c = 0;
    for (; c + 2 * kLanes <= num_values; c += 2 * kLanes)
      store(to + c, load(room + c) / weight, load(room + c + kLanes) / weight);
    if (c < num_values) store(to + c, load(room + c) / weight);
  }
};

// Returns the number of queries of a task that are computed together. It is smaller if threads
// would be idle otherwise; this does not change results.
inline int64_t queries_of_a_unit(int64_t num_tasks, int64_t num_x) {
  int64_t num = kQueries;
  while (num > 2 && num_tasks * ((num_x - 1) / num + 1) < crew().num_threads()) num /= 2;
  return num;
}

// Attends over entries whose keys start at column ``key_at`` and values ``apart`` columns later.
template <class T>
void attend_rows(const Tensor& q, const Tensor& cache, const Tensor& table, const Tensor& lens,
                 const int64_t* bits, int64_t num_values, double scale, const Tensor& out,
                 int64_t key_at = 0, int64_t apart = 0) {
  int64_t num_seqs = lens.size(0), num_q = lens.size(1), num_heads = q.size(1), width = q.size(2);
  int64_t page_size = cache.size(1), num_pages = table.size(1), num_x = num_q * num_heads;
  const int64_t *pages = table.const_data_ptr<int64_t>(), *len = lens.const_data_ptr<int64_t>();
  const T *queries = q.const_data_ptr<T>(), *entries = cache.const_data_ptr<T>() + key_at;
  int64_t stride = cache.size(2), most = num_pages * page_size, group = bits ? num_heads : num_x;
  Seen seen{len, bits};
  Splits splits(seen, num_seqs, num_q, most);
  int64_t num_tasks = splits.tasks.size(), per_unit = queries_of_a_unit(num_tasks, num_x);
  int64_t per_group = (group - 1) / per_unit + 1, num_units = num_x / group * per_group;
  Parts parts(num_tasks, num_x, group, num_values);
  in_pieces(num_tasks * num_units, 1, [&](int64_t first, int64_t last) {
    alignas(64) float scores[kQueries * kSplit];
    auto rows = space<float>(kQueries * width);
    const T* keys[kSplit];
    for (int64_t unit = first; unit < last; unit++) {
      int64_t t = unit / num_units, g = unit % num_units / per_group;
      int64_t x = g * group + unit % per_group * per_unit, last = (g + 1) * group - 1;
      auto [b, begin, end] = splits.tasks[t];
      int64_t num = end - begin, first_row = b * num_q + x / num_heads;
      const int64_t* page = pages + b * num_pages;
      int64_t stop = bits ? std::min(end, len[first_row]) : end;
      find(entries, page, page_size, stride, begin, stop, keys);
      if (bits)
        find_path(entries, page, page_size, stride, len[first_row], bits[first_row], most, begin,
                  end, keys);
      with_width(std::min(per_unit, last + 1 - x), [&](auto count) {
        constexpr int Q = decltype(count)::value;
        int64_t to = t * parts.num + parts.place(x);
        for (int64_t i = 0; i < Q; i++)
          unfold(queries + (b * num_x + std::min(x + i, last)) * width, &rows[i * width], width);
        score<Q>(rows.get(), keys, num, width, scores);
        int64_t common = num, most_seen = 0;
        for (int64_t i = 0; i < Q; i++) {
          int64_t row = b * num_q + std::min(x + i, last) / num_heads;
          int64_t here = std::clamp<int64_t>(seen[row] - begin, 0, num);
          common = std::min(common, here), most_seen = std::max(most_seen, here);
          soften(scores + i * kSplit, num, here, scale, parts.largest[to + i], parts.total[to + i]);
        }
        mix<Q>(scores, keys, common, most_seen, num_values, &parts.sums[to * num_values], apart);
      });
    }
  });
  in_pieces(num_seqs * num_x, 8, [&](int64_t first, int64_t last) {
    auto room = space<float>(num_values);
    for (int64_t unit = first; unit < last; unit++) {
      int64_t b = unit / num_x;
      int64_t x = parts.place(unit % num_x);
      parts.merge(splits.first_of[b], splits.first_of[b + 1], x, room.get(),
                  out.mutable_data_ptr<T>() + unit * num_values);
    }
  });
}

Tensor mla_query(const Tensor& q, const Tensor& up_k, const Tensor& cos, const Tensor& sin,
                 bool interleaved) {
  int64_t num = q.size(0), num_heads = q.size(1), num_nope = up_k.size(2);
  int64_t num_latent = up_k.size(1) * kBlock, num_pe = q.size(2) - num_nope;
  Tensor y = at::empty({num, num_heads, num_latent + num_pe}, q.options());
  with_type(q, [&](auto zero) {
    using T = decltype(zero);
    by_head<T>(q, up_k, y);
    in_pieces(num, kRowChunk, [&](int64_t begin, int64_t end) {
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

Tensor mla_attend(const Tensor& q, const Tensor& up_k, const Tensor& up_v, const Tensor& cos,
                  const Tensor& sin, bool interleaved, const Tensor& cache, const Tensor& table,
                  const Tensor& lens, double scale, const c10::optional<Tensor>& bits) {
  int64_t num_heads = q.size(1), width = cache.size(2), num_values = up_v.size(2);
  TORCH_CHECK(cache.is_contiguous() && width % kLanes == 0 && num_values % kLanes == 0);
  Tensor latent = mla_query(q, up_k, cos, sin, interleaved);
  TORCH_CHECK(latent.size(2) == width && latent.size(0) == lens.numel());
  Tensor o = at::empty({q.size(0), num_heads, num_values}, q.options());
  Tensor tree = bits ? bits->contiguous() : Tensor();
  const int64_t* bit = bits ? tree.const_data_ptr<int64_t>() : nullptr;
  with_type(q, [&](auto zero) {
    attend_rows<decltype(zero)>(latent, cache, table.contiguous(), lens.contiguous(), bit,
                                num_values, scale, o);
  });
  return mla_value(o, up_v);
}

// A cache entry has the keys and values of G heads. Each of these serves H / G consecutive query
// heads.
Tensor gqa_attend(const Tensor& q, const Tensor& cos, const Tensor& sin, bool interleaved,
                  const Tensor& cache, const Tensor& table, const Tensor& lens, double scale,
                  const c10::optional<Tensor>& bits) {
  int64_t num = q.size(0), width = q.size(2), num_groups = cache.size(2) / (2 * width);
  int64_t each = q.size(1) / num_groups;
  TORCH_CHECK(cache.is_contiguous() && width % kLanes == 0 && q.stride(2) == 1);
  Tensor rotated = at::empty({num_groups, num, each, width}, q.options());
  Tensor o = at::empty(rotated.sizes(), q.options());
  Tensor tree = bits ? bits->contiguous() : Tensor();
  const int64_t* bit = bits ? tree.const_data_ptr<int64_t>() : nullptr;
  with_type(q, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < num; i++)
      for (int64_t h = 0; h < num_groups * each; h++)
        rotate(q.const_data_ptr<T>() + i * q.stride(0) + h * q.stride(1),
               cos.const_data_ptr<float>() + i * width / 2,
               sin.const_data_ptr<float>() + i * width / 2, interleaved,
               rotated.mutable_data_ptr<T>() + ((h / each * num + i) * each + h % each) * width,
               width);
    for (int64_t g = 0; g < num_groups; g++)
      attend_rows<T>(rotated[g], cache, table.contiguous(), lens.contiguous(), bit, width, scale,
                     o[g], g * width, num_groups * width);
  });
  return o.transpose(0, 1).reshape(q.sizes());
}

}  // namespace
