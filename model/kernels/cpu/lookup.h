// Prompt-lookup drafting: finds an earlier occurrence of a text's last n-gram, and returns the
// tokens after it (model/drafters/ngram.py).
#pragma once

#include "vectors.h"

namespace {

// Returns num_drafts tokens after the best occurrence, and how many of them are known, for ``rows``
// of ``text`` [R, T] with ``known`` tokens each. The longest n-gram wins, up to max_ngram_size
// tokens. Of equally long ones, with ``oldest`` the earliest wins. Otherwise, those with num_drafts
// known tokens after them come first, and then the latest wins.
std::tuple<Tensor, Tensor> lookup(const Tensor& text, const Tensor& rows, const Tensor& known,
                                  int64_t max_ngram_size, int64_t num_drafts, bool oldest) {
  TORCH_CHECK(text.is_contiguous() && rows.is_contiguous() && known.is_contiguous());
  int64_t num_rows = rows.size(0), length = text.size(1);
  Tensor drafts = at::zeros({num_rows, num_drafts}, text.options());
  Tensor nums = at::zeros({num_rows}, text.options());
  const int64_t *all = text.const_data_ptr<int64_t>(), *row = rows.const_data_ptr<int64_t>(),
                *count = known.const_data_ptr<int64_t>();
  int64_t *out = drafts.mutable_data_ptr<int64_t>(), *num = nums.mutable_data_ptr<int64_t>();
  in_pieces(num_rows, std::max<int64_t>(1, kWorthATask / length), [&](int64_t begin,
                                                                               int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      const int64_t *t = all + row[b] * length, n = count[b];
      int64_t size = 0, best = 0;
      bool is_whole = false;
      for (int64_t place = 1; place < n; place++) {
        int64_t same = 0;
        while (same < max_ngram_size && same < place && t[place - 1 - same] == t[n - 1 - same]) same++;
        if (same == 0 || same < size) continue;
        bool whole = place + num_drafts <= n;
        if (same > size || (!oldest && whole >= is_whole))
          size = same, best = place, is_whole = whole;
      }
      if (size == 0) continue;
      num[b] = std::min(num_drafts, n - best);
      for (int64_t i = 0; i < num[b]; i++) out[b * num_drafts + i] = t[best + i];
    }
  });
  return {drafts, nums};
}

}  // namespace
