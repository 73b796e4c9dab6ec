// Samples tokens from adjusted logits, as model/sampling/sampler.py defines it. Only the top-k
// tokens are sorted, and noise is computed only for tokens that can still win with it.
#pragma once

#include "vectors.h"

namespace {

constexpr float kMostNoise = 23.0f;  // Gumbel noise from 32 bits is <= 22.9
constexpr int64_t kWorthADraw = 1 << 13;  // minimum number of tokens per task

inline bool any(Ints is) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)is, (__m512i)is) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)is) != 0;
#endif
  for (int i = 0; i < kLanes; i++)
    if (is[i]) return true;
  return false;
}

template <class T>
T mix(T x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Gumbel noise of the tokens at one output position.
struct Noise {
  uint32_t key;
  Noise(uint64_t seed, int64_t index)
      : key(mix(mix(mix(uint32_t(seed)) ^ uint32_t(seed >> 32)) ^ uint32_t(index))) {}
  template <class T>
  T bits(T token) const {
    return mix(mix(token ^ key) ^ (key >> 16));
  }
  static float of(uint32_t bits) {
    return float(-std::log(-std::log1p(-(bits + 0.5) / 4294967296.0)));
  }
};

struct Filters {
  int64_t top_k;
  double top_p, min_p;
};

struct Token {
  float score;
  int64_t id;
  // Returns whether this token ranks before ``other``: higher score, or the lower id of equals.
  bool operator<(const Token& other) const {
    return score != other.score ? score > other.score : id < other.id;
  }
};

// Logits of one output position, divided by temperature, minus the largest. ``first`` is the token
// with the largest logit, the lowest of equals.
class Logits {
 public:
  Logits(const float* x, int64_t num, float temperature) : x_(x), num_(num) {
    Vec most = splat(kNever);
    for (int64_t i = 0; i < num; i += kLanes) {
      Vec v = raw(i);
      most = v > most ? v : most;
    }
    float largest = most[0];
    for (int i = 1; i < kLanes; i++) largest = std::max(largest, most[i]);
    temperature_ = temperature > 0 ? temperature : 1.0f;
    largest_ = largest / temperature_;
    // Tokens are equal if logit / temperature is; at temperature 0, if their logits are.
    auto is_first = [&](int64_t i) { return temperature > 0 ? vec(i) == 0 : raw(i) == largest; };
    while (first_ < num && !any(is_first(first_))) first_ += kLanes;
    if (first_ >= num) first_ = num - kLanes > 0 ? num - kLanes : 0;  // all are NaN
    for (Ints is = is_first(first_); first_ < num - 1 && !is[0]; first_++) is = is_first(first_ + 1);
  }

  int64_t num() const { return num_; }
  int64_t first() const { return first_; }
  float at(int64_t i) const { return x_[i] / temperature_ - largest_; }
  Vec vec(int64_t i) const { return raw(i) / temperature_ - largest_; }

 private:
  Vec raw(int64_t i) const {
    if (i + kLanes <= num_) return load(x_ + i);
    Vec v = splat(kNever);
    for (int64_t j = i; j < num_; j++) v[j - i] = x_[j];
    return v;
  }

  const float* x_;
  int64_t num_, first_ = 0;
  float temperature_, largest_;
};

inline Ints ids_from(int64_t first) {
  Ints ids;
  EACH (i, kLanes) ids[i] = int32_t(first) + i;
  return ids;
}

// Returns which of these tokens rank before ``last``, by their logits.
inline Ints before(Vec x, Ints ids, const Token& last) {
  return (x > last.score) | ((x == last.score) & (ids < int32_t(last.id)));
}

constexpr int64_t kBlockTokens = 64 * kLanes;  // number of tokens whose mass is summed in fp32

// Returns an upper bound of e^x for x <= 0, at most 1/16 too large: for f in [0, 1], 2^f lies below
// its chord.
inline Vec exp_at_most(Vec x) {
  x = x < -80.0f ? splat(-80.0f) : x;
  return (Vec)__builtin_convertvector(x * 12102203.0f + 1065353216.0f, Ints);
}

// Returns the token with the largest score plus noise among those that rank before ``last``, or the
// token with the largest logit if there is none. Adds the mass of all tokens to ``total`` unless it
// is null. Noise is computed only for tokens that may win: a token's sum reaches ``score`` iff its
// uniform number is below 1 - exp(-e^(x - score)) <= e^(x - score).
inline Token best(const Logits& logits, const Noise& noise, const Token& last, double* total) {
  int64_t first = logits.first();
  Token found{logits.at(first) + Noise::of(noise.bits(uint32_t(first))), first};
  Ints ids = ids_from(0);
  const float at_most = 1.001f * 2147483648.0f;
  float scale = at_most * std::exp(-found.score);
  for (int64_t begin = 0; begin < logits.num(); begin += kBlockTokens) {
    Vec all{};
    for (int64_t i = begin; i < std::min(logits.num(), begin + kBlockTokens); i += kLanes) {
      Vec x = logits.vec(i);
      bool may_any = any(x > found.score - kMostNoise);
      Ints here = ids;
      ids += kLanes;
      if (!may_any && total == nullptr) continue;
      Vec e = total == nullptr ? exp_at_most(x) : exp(x);
      all += e;
      if (!may_any) continue;
      Bits bits = noise.bits((Bits)here);
      Vec half = __builtin_convertvector((Ints)(bits >> 1), Vec);
      Ints may = (half <= e * scale) & before(x, here, last);
      if (!any(may)) continue;
      for (int j = 0; j < kLanes; j++) {
        if (!may[j]) continue;
        Token other{x[j] + Noise::of(bits[j]), i + j};
        if (other < found) found = other, scale = at_most * std::exp(-found.score);
      }
    }
    if (total != nullptr) *total += sum(all);
  }
  return found;
}

// Returns the mass of the tokens that rank before ``last``.
inline double mass_before(const Logits& logits, const Token& last) {
  double total = 0;
  Ints ids = ids_from(0);
  for (int64_t begin = 0; begin < logits.num(); begin += kBlockTokens) {
    Vec some{};
    for (int64_t i = begin; i < std::min(logits.num(), begin + kBlockTokens); i += kLanes) {
      Vec x = logits.vec(i);
      Ints is = before(x, ids, last);
      ids += kLanes;
      if (any(is)) some += is ? exp(x) : Vec{};
    }
    total += sum(some);
  }
  return total;
}

// Returns the best k tokens in order, at least one.
inline std::vector<Token> first_of(const Logits& logits, int64_t k) {
  std::vector<Token> found;
  auto cut = [&] {
    if (int64_t(found.size()) <= k) return;
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end());
    found.resize(k);
  };
  float floor = kNever;
  size_t room = 2 * k + 64;
  for (int64_t i = 0; i < logits.num(); i += kLanes) {
    Vec x = logits.vec(i);
    if (!any(x > floor)) continue;
    for (int j = 0; j < kLanes; j++)
      if (x[j] > floor) found.push_back({x[j], i + j});
    if (found.size() >= room) cut(), floor = found[k - 1].score;
  }
  cut();
  if (found.empty()) found.push_back({0, logits.first()});  // all are NaN
  std::sort(found.begin(), found.end());
  return found;
}

inline double mass(const Token& token) { return std::exp(double(token.score)); }

inline double mass(const std::vector<Token>& first) {
  double total = 0;
  for (const Token& one : first) total += mass(one);
  return total;
}

// Returns the number of tokens in ``first``, the best ones in order, that top-p and min-p keep; at
// least 1. Top-p is a share of the mass ``total``.
inline int64_t num_kept(const std::vector<Token>& first, double total, const Filters& filters) {
  double above = 0;
  int64_t num = 0;
  for (; num < int64_t(first.size()); num++) {
    bool is_over = filters.top_p < 1 && above >= filters.top_p * total;
    if (num > 0 && (is_over || mass(first[num]) < filters.min_p)) break;
    above += mass(first[num]);
  }
  return num;
}

inline int64_t best_of(const std::vector<Token>& first, const Noise& noise, const Filters& filters) {
  Token found{kNever, first[0].id};
  for (int64_t i = 0, num = num_kept(first, mass(first), filters); i < num; i++) {
    Token other{first[i].score + Noise::of(noise.bits(uint32_t(first[i].id))), first[i].id};
    if (other < found) found = other;
  }
  return found.id;
}

inline int64_t drawn(const Logits& logits, const Noise& noise, const Filters& filters) {
  if (filters.top_k > 0 && filters.top_k < logits.num())
    return best_of(first_of(logits, filters.top_k), noise, filters);
  double total = 0;
  Token found = best(logits, noise, {kNever, 0}, filters.top_p < 1 ? &total : nullptr);
  while (found.id != logits.first()) {
    Token last{logits.at(found.id), found.id};
    bool is_left = filters.top_p >= 1 || mass_before(logits, last) < filters.top_p * total;
    if (is_left && mass(last) >= filters.min_p) break;
    found = best(logits, noise, last, nullptr);  // lower ranks are filtered out too
  }
  return found.id;
}

// Returns the lowest-ranking token that the filters keep.
inline Token last_kept(const Logits& logits, const Filters& filters) {
  bool has_k = filters.top_k > 0 && filters.top_k < logits.num();
  Token none{kNever, logits.num()};
  if (!has_k && filters.top_p >= 1 && filters.min_p <= 0) return none;
  double total = has_k ? 0 : mass_before(logits, none);
  for (int64_t k = has_k ? filters.top_k : 64;; k *= 8) {
    std::vector<Token> first = first_of(logits, std::min(k, logits.num()));
    int64_t num = num_kept(first, has_k ? mass(first) : total, filters);
    if (has_k || num < int64_t(first.size()) || int64_t(first.size()) < k) return first[num - 1];
  }
}

// Writes the log probabilities of the tokens that the filters keep, kNever for the others.
inline void filter(const Logits& logits, const Filters& filters, float* out) {
  Token last = last_kept(logits, filters);
  last.id++;  // include the last token itself
  float norm = std::log(mass_before(logits, last));
  Ints ids = ids_from(0);
  for (int64_t i = 0; i < logits.num(); i += kLanes, ids += kLanes) {
    Vec x = logits.vec(i);
    put(out + i, before(x, ids, last) ? x - norm : splat(kNever), logits.num() - i);
  }
}

// Returns the token ids [..] of the largest logits [.., V], the lowest of equals.
Tensor likeliest(const Tensor& logits) {
  int64_t num = logits.size(-1);
  Tensor rows = logits.reshape({-1, num}).contiguous();
  TORCH_CHECK(rows.scalar_type() == at::kFloat);
  auto shape = logits.sizes().slice(0, logits.dim() - 1);
  Tensor tokens = at::empty(shape, logits.options().dtype(at::kLong));
  in_pieces(rows.size(0), std::max<int64_t>(1, kWorthADraw / num), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      tokens.mutable_data_ptr<int64_t>()[i] =
          Logits(rows.const_data_ptr<float>() + i * num, num, 0).first();
  });
  return tokens;
}

// Returns, for each position of logits [.., V], whether the largest is finite and none is NaN.
Tensor are_finite(const Tensor& logits) {
  int64_t num = logits.size(-1);
  Tensor rows = logits.reshape({-1, num}).contiguous();
  TORCH_CHECK(rows.scalar_type() == at::kFloat);
  auto shape = logits.sizes().slice(0, logits.dim() - 1);
  Tensor flags = at::empty(shape, logits.options().dtype(at::kBool));
  auto is_finite = [num](const float* x) {
    Vec most = splat(kNever);
    Ints is_nan{};
    int64_t i = 0;
    for (; i + kLanes <= num; i += kLanes) {
      Vec v = load(x + i);
      most = v > most ? v : most;
      is_nan |= v != v;
    }
    float largest = kNever;
    EACH (j, kLanes) largest = std::max(largest, most[j]);
    bool has_nan = any(is_nan);
    for (; i < num; i++) largest = std::max(largest, x[i]), has_nan |= std::isnan(x[i]);
    return !has_nan && std::isfinite(largest);
  };
  in_pieces(rows.size(0), std::max<int64_t>(1, kWorthADraw / num), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      flags.mutable_data_ptr<bool>()[i] = is_finite(rows.const_data_ptr<float>() + i * num);
  });
  return flags;
}

// Logits [B, Q, V] and the sampling settings of B rows.
struct Rows {
  const Tensor &logits, &temperature, &top_k, &top_p, &min_p;

  // Calls f(place, row, logits, is sampled, filters) for each of B * Q places.
  template <class F>
  void each(F f) const {
    TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.stride(2) == 1);
    TORCH_CHECK(temperature.is_contiguous() && top_k.is_contiguous() && top_p.is_contiguous() &&
                min_p.is_contiguous());
    int64_t num_places = logits.size(1), num = logits.size(2);
    int64_t grain = std::max<int64_t>(1, kWorthADraw / num);
    in_pieces(logits.size(0) * num_places, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        int64_t b = i / num_places, at = b * logits.stride(0) + i % num_places * logits.stride(1);
        float by = temperature.const_data_ptr<float>()[b];
        Filters filters{top_k.const_data_ptr<int64_t>()[b], top_p.const_data_ptr<float>()[b],
                        min_p.const_data_ptr<float>()[b]};
        f(i, b, Logits(logits.const_data_ptr<float>() + at, num, by), by > 0, filters);
      }
    });
  }
};

// Samples token ids [B, Q].
Tensor draw(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
            const Tensor& top_p, const Tensor& min_p, const Tensor& seed, const Tensor& index) {
  TORCH_CHECK(seed.is_contiguous());
  Tensor places = index.contiguous(), tokens = at::empty(index.sizes(), index.options());
  Rows{logits, temperature, top_k, top_p, min_p}.each(
      [&](int64_t i, int64_t b, const Logits& row, bool is_sampled, const Filters& filters) {
        Noise noise(seed.const_data_ptr<int64_t>()[b], places.const_data_ptr<int64_t>()[i]);
        tokens.mutable_data_ptr<int64_t>()[i] = is_sampled ? drawn(row, noise, filters) : row.first();
      });
  return tokens;
}

// Returns log probabilities [B, Q, V] after temperature and filters.
Tensor filtered(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                const Tensor& top_p, const Tensor& min_p) {
  Tensor out = at::empty(logits.sizes(), logits.options());
  Rows{logits, temperature, top_k, top_p, min_p}.each(
      [&](int64_t i, int64_t, const Logits& row, bool, const Filters& filters) {
        filter(row, filters, out.mutable_data_ptr<float>() + i * row.num());
      });
  return out;
}

}  // namespace
