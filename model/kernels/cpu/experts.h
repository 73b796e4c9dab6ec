// Mixture of experts: routing, the experts' MLPs, and the weighted sum of their outputs.
#pragma once

#include "products.h"

namespace {

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
  auto hidden = space<float>(num_pairs * num_hidden);
  std::vector<int64_t> pair_of;
  std::vector<Group<T>> back;
  for (int64_t s = 0; s < num_slots; s++) {
    if (pairs[s].empty()) continue;
    back.push_back({hidden.get() + pair_of.size() * num_hidden, num_hidden,
                    int64_t(pairs[s].size()), down.const_data_ptr<T>() + s * down.stride(0)});
    pair_of.insert(pair_of.end(), pairs[s].begin(), pairs[s].end());
  }
  with_packed(gate_up.const_data_ptr<T>(), num_dim, [&](auto* packed, int64_t step) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(packed)>>;
    int64_t num_k = num_dim / step, first = 0;
    auto rows = space<Number<W>>(num_pairs * num_k);
    std::vector<Group<W>> into;
    for (int64_t s = 0; s < num_slots; first += pairs[s].size(), s++)
      if (int64_t num = pairs[s].size())
        into.push_back(
            {rows.get() + first * num_k, num_k, num, packed + s * gate_up.stride(0) / step});
    for (size_t i = 0; i < pair_of.size(); i++) {
      int64_t from = token ? token[pair_of[i]] : pair_of[i] / per_token;
      to_numbers(x.const_data_ptr<T>() + from * x.stride(0), rows.get() + i * num_k, num_k);
    }
    // Blocks of gate and up alternate, so that each task has both for its outputs.
    products<2, W>(into, num_k, 2 * num_blocks,
                   [&](int64_t g, int64_t row, int64_t first, const Vec* sums, int num) {
                     float* to = const_cast<float*>(back[g].x) + row * num_hidden + first / 2;
                     for (int i = 0; i < num / 2; i++) {
                       int pair = i / kVecs * 2 * kVecs + i % kVecs;
                       Vec gate = sums[pair];
                       store(to + i * kLanes, gate / (1.0f + exp(-gate)) * sums[pair + kVecs]);
                     }
                   });
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
               const std::optional<Tensor>& slots, const Tensor& gate_up, const Tensor& down,
               int64_t /* num_ranks: pairs of others cost nothing here */) {
  TORCH_CHECK(x.dtype() == gate_up.dtype() && x.size(1) == gate_up.size(2) && x.stride(1) == 1);
  Tensor out = at::empty({slots ? slots->size(0) : x.size(0), x.size(1)}, x.options());
  with_type(x,
            [&](auto zero) { expert_rows<decltype(zero)>(x, tokens, slots, gate_up, down, out); });
  return out;
}

// Finds the indices of the ``num`` largest ``scores``, the lowest of equals first.
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

// Routes one token: turns its logits ``scores`` [E] into scores in place, chooses experts ``ids``
// and computes their ``weights``.
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
    if (std::isnan(chosen[e])) chosen[e] = kNever;  // NaN would break the sort's order
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
  in_pieces(x.size(0), kRowChunk, [&](int64_t begin, int64_t end) {
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
    in_pieces(out.size(0), kRowChunk, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        combine_row(from + t * num_chosen * num, weight + t * num_chosen, num_chosen,
                    shared ? shared + t * num : nullptr, to + t * num, num);
    });
  });
  return y;
}

}  // namespace
