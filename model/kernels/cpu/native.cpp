// Registers the CPU kernels as torch operators. ../base.py documents what each of them computes.

#include <torch/library.h>

#include "adjust.h"
#include "copies.h"
#include "experts.h"
#include "lookup.h"
#include "prefill.h"
#include "sample.h"

TORCH_LIBRARY(tandem, m) {
  m.def("use_threads(int num) -> ()", use_threads);
  m.def("by_lanes(Tensor w) -> Tensor");
  m.def("pack(Tensor w) -> Tensor");
  m.def("linear(Tensor x, Tensor w, int num_out, bool in_fp32=False) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor more, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def(
      "write_mla_cache(Tensor kv, Tensor weight, float eps, Tensor cos, Tensor sin, bool interleaved, "
      "Tensor slots, Tensor(a!) cache) -> ()");
  m.def(
      "mla_attend(Tensor q, Tensor up_k, Tensor up_v, Tensor cos, Tensor sin, bool interleaved, "
      "Tensor cache, Tensor table, Tensor lens, float scale, Tensor? bits) -> Tensor");
  m.def(
      "write_gqa_cache(Tensor kv, Tensor cos, Tensor sin, bool interleaved, Tensor slots, "
      "Tensor(a!) cache) -> ()");
  m.def(
      "gqa_attend(Tensor q, Tensor cos, Tensor sin, bool interleaved, Tensor cache, Tensor table, "
      "Tensor lens, float scale, Tensor? bits) -> Tensor");
  m.def("move(Tensor(a!)[] caches, Tensor source, Tensor target) -> ()");
  m.def("copy_rows(Tensor(a!)[] layers, Tensor slots, Tensor(b!) rows, bool is_gather) -> ()");
  m.def("lookup(Tensor text, Tensor rows, Tensor known, int max_ngram_size, int num_drafts, bool oldest)"
        " -> (Tensor, Tensor)");
  m.def(
      "mla_prefill(Tensor q, Tensor kv_b, Tensor cos, Tensor sin, bool interleaved, Tensor cache, "
      "Tensor pages, int[] lengths, int[] contexts, int num_values, float scale) -> Tensor");
  m.def("experts(Tensor x, Tensor? tokens, Tensor? slots, Tensor gate_up, Tensor down,"
        " int num_ranks=1) -> Tensor");
  m.def(
      "route(Tensor x, Tensor w, Tensor? bias, int[] sizes, bool sigmoid, bool by_two, "
      "bool normalised, float filler, float factor) -> (Tensor, Tensor)");
  m.def("adjust(Tensor logits, Tensor[] rules, Tensor num_output, Tensor drafts, Tensor? seen=None)"
        " -> Tensor");
  m.def("likeliest(Tensor logits) -> Tensor");
  m.def("are_finite(Tensor logits) -> Tensor");
  m.def("draw(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed,"
        " Tensor index) -> Tensor");
  m.def("filtered(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p)"
        " -> Tensor");
  m.def("combine(Tensor out, Tensor weights, Tensor? more) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("by_lanes", by_lanes);
  m.impl("pack", pack);
  m.impl("linear", linear);
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("write_mla_cache", write_mla_cache);
  m.impl("mla_attend", mla_attend);
  m.impl("gqa_attend", gqa_attend);
  m.impl("write_gqa_cache", write_gqa_cache);
  m.impl("move", move);
  m.impl("copy_rows", copy_rows);
  m.impl("lookup", lookup);
  m.impl("mla_prefill", mla_prefill);
  m.impl("experts", experts);
  m.impl("route", route);
  m.impl("adjust", adjust);
  m.impl("likeliest", likeliest);
  m.impl("are_finite", are_finite);
  m.impl("draw", draw);
  m.impl("filtered", filtered);
  m.impl("combine", combine);
}
