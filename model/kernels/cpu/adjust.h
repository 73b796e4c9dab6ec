// Adjusts logits by the rules of their requests (penalties, biases), like model/sampling/adjust.py.
#pragma once

#include "vectors.h"

namespace {

// Logit rules of one row. The first four fields are arrays by token id.
struct Rules {
  const bool *in_prompt, *ends;
  const int32_t* count;
  const float* bias;
  float repetition, presence, frequency;
  bool is_too_early;
};

// Contraction to FMA is off, so that each product is rounded like torch's.
[[gnu::optimize("fp-contract=off")]] inline float ruled(float x, int64_t v, int32_t count,
                                                        const Rules& by) {
  bool is_used = count > 0;
  float logit = x + by.bias[v], factor = is_used | by.in_prompt[v] ? by.repetition : 1.0f;
  float less = logit / factor, more = logit * factor;
  float often = by.frequency * float(count), once = by.presence * float(is_used);
  logit = (logit > 0 ? less : more) - often;
  logit = logit - once;
  return by.ends[v] & by.is_too_early ? kNever : logit;
}

[[gnu::optimize("fp-contract=off")]] inline void ruled_row(const float* x, int64_t num, Rules by,
                                                           float* y) {
  for (int64_t v = 0; v < num; v++) y[v] = ruled(x[v], v, by.count[v], by);
}

// Adjusts logits [B, V]. ``rules`` are the fields of AdjustRows in order. Drafts [B, N] count as
// output tokens: all of them, or those for which ``seen`` [B, N] is true.
Tensor adjust(const Tensor& logits, at::TensorList rules, const Tensor& num_output,
              const Tensor& drafts, const std::optional<Tensor>& seen) {
  int64_t num = logits.size(1), num_drafts = drafts.size(1);
  TORCH_CHECK(rules.size() == 8 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1);
  for (const Tensor& rule : rules) TORCH_CHECK(rule.is_contiguous());
  Tensor out = at::empty(logits.sizes(), logits.options()), told = drafts.contiguous();
  Tensor before = num_output.contiguous();
  Tensor known = seen ? seen->to(at::kBool).contiguous() : Tensor();
  in_pieces(logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      int64_t at = b * num;
      int64_t num_told = before.const_data_ptr<int64_t>()[b] + (seen ? 0 : num_drafts);
      bool is_too_early = num_told < rules[7].const_data_ptr<int64_t>()[b];
      Rules by{rules[0].const_data_ptr<bool>() + at,    rules[1].const_data_ptr<bool>() + at,
               rules[2].const_data_ptr<int32_t>() + at, rules[3].const_data_ptr<float>() + at,
               rules[4].const_data_ptr<float>()[b],     rules[5].const_data_ptr<float>()[b],
               rules[6].const_data_ptr<float>()[b],     is_too_early};
      const float* x = logits.const_data_ptr<float>() + b * logits.stride(0);
      float* y = out.mutable_data_ptr<float>() + at;
      ruled_row(x, num, by, y);
      const int64_t* draft = told.const_data_ptr<int64_t>() + b * num_drafts;
      auto counts = [&](int64_t i) {
        return !seen || known.const_data_ptr<bool>()[b * num_drafts + i];
      };
      for (int64_t i = 0; i < num_drafts; i++) {
        int32_t count = by.count[draft[i]];
        for (int64_t j = 0; j < num_drafts; j++) count += draft[j] == draft[i] && counts(j);
        y[draft[i]] = ruled(x[draft[i]], draft[i], count, by);
      }
    }
  });
  return out;
}

}  // namespace
