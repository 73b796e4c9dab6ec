"""EAGLE heads in the format of their authors: outputs equal those of the authors' code. Drafts
equal those computed without a cache, and bad input is rejected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.config import TandemConfig
from tandem.core.config import load as load_config
from tandem.core.errors import LayoutMismatch
from tandem.core.info import DECODE, PREFILL
from tandem.core.membership import RankSpec
from tandem.kv_transfer.layout import check_compatible
from tandem.kv_transfer.pages import PagePool
from tandem.model.drafters.eagle import EAGLE, EagleDrafter
from tandem.model.loaded import LoadedModel, load_model
from tandem.model.network.batch import Batch, Segment, pack_segments, physical_slots
from tandem.runtime.engine_loop import EngineLoop
from tandem.runtime.parts import RankParts
from tests.eagle_tables import NUM_ROWS, NUM_STEPS
from tests.eagles import (
    LATENTS,
    SAID,
    head_rounding,
    head_tensors,
    over_latents,
    told,
    write_head,
)
from tests.numerics import assert_near, network_rounding
from tests.unit.test_drafts import Spy, fresh_rows, prompt

PAGE_SIZE = 4
NUM_LAYERS = 7
VOCAB = 96


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("main")
    tiny.write_tiny(folder, seed=23, num_hidden_layers=NUM_LAYERS)
    return folder


def load_with(main: Path, head: Path, kind: str, *sets: str) -> LoadedModel:
    name = {"eagle1": "eagle"}.get(kind, kind)
    asked = f"speculation.drafter={name}", f"speculation.draft_model_path={head}"
    return load(main, *asked, "model.kernels=native", *sets)


def rows(ids: Tensor, first: int) -> Batch:
    """Return decode rows of one sequence, from slot ``first`` on; positions are slots."""
    slots = torch.arange(first, first + len(ids)).unsqueeze(0)
    table = torch.tensor([[3, 1, 5, 2]])
    places = physical_slots(table, slots, None, PAGE_SIZE)
    return Batch(ids.unsqueeze(0), slots, places, slots + 1, table)


def check(got: Tensor, wanted: Tensor) -> None:
    assert_near(got, wanted, head_rounding(wanted))


def run(drafter: Any, batch: Batch, features: Tensor, caches: Any) -> Tensor:
    with torch.inference_mode():
        made: Tensor = drafter.forward(batch, features, caches)
    return made


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle_1_is_eagle_llm(main: Path, tmp_path: Path, file: str) -> None:
    loaded, wanted = load_with(main, write_head(tmp_path, "eagle1", file), "eagle1"), told("eagle1")
    assert loaded.drafter.taps == () and loaded.drafter.num_features == 48
    caches, [ids] = loaded.allocate_caches(6, PAGE_SIZE), wanted["ids"]
    got = run(loaded.drafter, rows(ids[1 : NUM_ROWS + 1], 0), wanted["features"][0], caches)
    check(got, wanted["first"][0])
    later = rows(ids[NUM_ROWS + 1 : NUM_ROWS + 2], NUM_ROWS)
    check(run(loaded.drafter, later, got[-1:], caches), wanted["later"][0])


def test_eagle_3_is_specforge(main: Path, tmp_path: Path) -> None:
    """Step 0 of the training-time test is pass 1, and step k is pass k + 1 after each row."""
    loaded, wanted = load_with(main, write_head(tmp_path, "eagle3"), "eagle3"), told("eagle3")
    drafter, [ids] = loaded.drafter, wanted["ids"]
    assert isinstance(drafter, EagleDrafter) and drafter.num_features == 3 * 48
    d2t = head_tensors("eagle3")["d2t"]
    known = d2t + torch.arange(len(d2t))
    for i in range(NUM_ROWS):
        caches = loaded.allocate_caches(6, PAGE_SIZE)
        first = rows(ids[1 : i + 2], 0)
        hidden = run(drafter, first, wanted["features"][0, : i + 1], caches)[-1:]
        for step in range(NUM_STEPS):
            if step:
                at = rows(ids[i + 1 + step : i + 2 + step], i + step)
                hidden = run(drafter, at, hidden, caches)
            check(hidden[0], wanted[f"hidden.{step}"][0, i])
            with torch.inference_mode():
                logits = drafter._logits(hidden)[0]
            check(logits[known], wanted[f"logits.{step}"][0, i])
            others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, known, False)
            assert (logits[others] == float("-inf")).all() and len(logits) == VOCAB


def test_speculators_say_the_same_in_other_words(main: Path, tmp_path: Path) -> None:
    """In speculators' format layers are numbered, and config.json nests the layer's settings."""
    plain = load_with(main, write_head(tmp_path / "plain", "eagle3"), "eagle3")
    tensors = head_tensors("eagle3")
    names = {name: name.replace("midlayer.", "layers.0.") for name in tensors}
    renamed = {names[name]: tensor for name, tensor in tensors.items()}
    gone = dict.fromkeys(set(tensors) - set(renamed))
    own = {name: SAID["eagle3"][name] for name in SAID["eagle3"] if name != "draft_vocab_size"}
    nested = dict.fromkeys(own) | {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": own,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    }
    head = write_head(tmp_path / "other", "eagle3", tensors=renamed | gone, **nested)
    other, wanted = load_with(main, head, "eagle3"), told("eagle3")
    made = []
    for loaded in (plain, other):
        [ids] = wanted["ids"]
        caches = loaded.allocate_caches(6, PAGE_SIZE)
        made.append(run(loaded.drafter, rows(ids[1:10], 0), wanted["features"][0], caches))
    assert torch.equal(*made)


def test_features_are_what_enters_the_layers_that_a_config_names(
    main: Path, tmp_path: Path
) -> None:
    """The default is layers 2, L // 2 and L - 3, numbered like transformers' hidden states."""
    ids = prompt(11)
    states = tiny.reference(main)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for said, taps in ((None, (2, 3, 4)), ([0, 5], (0, 5))):
        more = {"fc.weight": torch.randn(48, 48 * len(taps))}
        head = write_head(tmp_path, "eagle3", tensors=more, eagle_aux_hidden_state_layer_ids=said)
        loaded = load_with(main, head, "eagle3")
        assert loaded.drafter.taps == taps
        batch, num_pages = fresh_rows(ids, 8, 0)
        with torch.inference_mode():
            hidden, features = loaded.network.forward_with_taps(
                batch, loaded.allocate_caches(num_pages, 8), taps
            )
        wanted = torch.cat([states[tap][0] for tap in taps], -1)
        for got, exact in ((features[0], wanted), (hidden[0], states[-1][0])):
            bound = network_rounding(NUM_LAYERS, 48, float(exact.abs().max()), growth=6)
            assert_near(got, exact, bound)


OWN_HEAD_VD = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(1))
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {}),
    "eagle1 own embedding, no bias": ("eagle1", {"tensors": {"fc.bias": None}}),
    "eagle1 shared embedding": ("eagle1", {"tensors": {"embed_tokens.weight": None}}),
    "eagle1 own head": ("eagle1", {"tensors": {"lm_head.weight": OWN_HEAD_VD}}),
    "eagle1 over latents": ("eagle1", LATENTS | {"tensors": over_latents("eagle1")}),
    "eagle3": ("eagle3", {"tensors": {"embed_tokens.weight": None}}),
    "eagle3 whole vocabulary": (
        "eagle3",
        {
            "draft_vocab_size": VOCAB,
            "tensors": dict.fromkeys(("d2t", "t2d", "lm_head.weight")),
        },
    ),
    "eagle3 norms": ("eagle3", {"norm_before_residual": True, "norm_output": True}),
    "eagle3 over latents": ("eagle3", LATENTS | {"tensors": over_latents("eagle3")}),
}


def from_scratch(loaded: LoadedModel, tokens: list[int], num_drafts: int) -> list[int]:
    """Draft from the whole history without a cache."""
    drafter = loaded.drafter
    assert isinstance(drafter, EagleDrafter)
    batch, num_pages = fresh_rows(tokens[:-1], 8, 0)
    _, [features] = loaded.network.forward_with_taps(
        batch, loaded.allocate_caches(num_pages + 4, 8), drafter.taps
    )
    text, drafts = list(tokens), []
    caches = loaded.allocate_caches(40, PAGE_SIZE)
    slots = torch.arange(len(text) - 1).unsqueeze(0)
    table = torch.arange(1, 40).unsqueeze(0)
    for i in range(num_drafts):
        ids = torch.tensor([text[1:] if i == 0 else text[-1:]])
        at = slots if i == 0 else slots[:, -1:] + i
        places = physical_slots(table, at, None, PAGE_SIZE)
        output = drafter.forward(Batch(ids, at + 1, places, at + 1, table), features, caches)
        features = output[-1:]
        drafts.append(int(drafter._logits(features).argmax()))
        text.append(drafts[-1])
    return drafts


@pytest.mark.parametrize("name", HEADS)
def test_drafts_equal_those_from_scratch(main: Path, tmp_path: Path, name: str) -> None:
    kind, changed = HEADS[name]
    head = write_head(tmp_path, kind, **changed)
    loaded = load_with(main, head, kind)
    spy = Spy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=3, max_batch_tokens=5)
    plain = Bench(load(main, "model.kernels=native"), num_drafts=0)
    for num in (1, 13):
        ids = prompt(num, seed=num)
        first, _ = bench.start(greedy("r", ids, 24, ignore_eos=True))
        known, num_steps = [*ids, first], 0
        while bench.decode.has_work():
            bench.decode.step()
            with torch.inference_mode():
                assert spy.drafts[-1][0] == from_scratch(loaded, known, 3)
            known += bench.frames[-1].updates[0].token_ids
            num_steps += 1
        assert num_steps > 5
        [(answer, _)] = plain.generate(greedy("r", ids, 24, ignore_eos=True))
        assert known[num:] == answer
    bench.check_empty()


def test_what_is_drafted_is_what_its_head_knows(main: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, "eagle3")
    loaded = load_with(main, head, "eagle3")
    spy = Spy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=3)
    bench.generate(greedy("r", prompt(9), 20, ignore_eos=True))
    known = set(torch.nonzero(head_tensors("eagle3")["t2d"]).flatten().tolist())
    assert {token for step in spy.drafts for token in step[0]} <= known


def test_a_rank_that_prefills_reads_what_entries_need(main: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, "eagle3")
    whole, found = load_with(main, head, "eagle3"), []
    sets = (
        f"model.path={main}",
        "speculation.drafter=eagle3",
        f"speculation.draft_model_path={head}",
    )
    part = load_model(load_config(None, ["model.dtype=float32", *sets]), PREFILL)
    assert part.drafter.identity == whole.drafter.identity != ""
    assert part.drafter._head.lm_head is None  # type: ignore[attr-defined]
    for loaded in (whole, part):
        caches, batch = (
            loaded.allocate_caches(6, 8),
            pack_segments([Segment(prompt(13), 0, [1, 2])], 8, torch.device("cpu")),
        )
        with torch.inference_mode():
            _, features = loaded.network.forward_with_taps(batch, caches, loaded.drafter.taps)
            loaded.drafter.prefill(batch, torch.tensor([[7]]), features, caches)
        found.append(caches[EAGLE][0][1:3])
    assert torch.equal(*found) and (found[0].flatten(0, 1)[:13] != 0).all()


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "hidden size": ("eagle3", {"hidden_size": 64}, r"hidden_size = 64, but the model has 48; use"),
    "vocabulary": ("eagle1", {"vocab_size": 97}, r"vocab_size = 97, but the model has 96; use"),
    "taps": ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, r"layer_ids = \[2, 3, 7\]"),
    "one tap": (
        "eagle3",
        {"eagle_aux_hidden_state_layer_ids": [2]},
        r"two or more layers, from 0 to 6",
    ),
    "d2t": (
        "eagle3",
        {"tensors": {"d2t": head_tensors("eagle3")["d2t"].index_fill(0, torch.tensor([39]), 60)}},
        r"d2t\[39\] maps to token 99, but this model has 96 tokens",
    ),
    "no d2t": (
        "eagle3",
        {"tensors": {"d2t": None}},
        r"d2t has 0 entries, but draft_vocab_size = 40",
    ),
    "more than there are": (
        "eagle3",
        {
            "draft_vocab_size": 99,
            "tensors": {
                "lm_head.weight": torch.ones(99, 48),
                "d2t": torch.zeros(99, dtype=torch.int64),
                "t2d": None,
            },
        },
        r"d2t\[96\] maps to token 96, but",
    ),
    "t2d": (
        "eagle3",
        {"tensors": {"t2d": head_tensors("eagle3")["t2d"].roll(1)}},
        r"t2d and d2t contradict each other",
    ),
    "missing": ("eagle3", {"tensors": {"norm.weight": None}}, r"tensor norm.weight is missing"),
    "unknown": ("eagle1", {"tensors": {"more": torch.ones(3)}}, r"unknown tensors, such as more"),
    "shape": ("eagle1", {"tensors": {"fc.weight": torch.ones(48, 97)}}, r"fc.weight has shape"),
    "layers": ("eagle1", {"num_hidden_layers": 2}, r"num_hidden_layers = 2"),
    "heads": (
        "eagle3",
        {"num_key_value_heads": 3},
        r"num_key_value_heads = 3: must divide num_attention_heads = 4",
    ),
    "norm": ("eagle3", {"fc_norm": True}, r"fc_norm = True: is not implemented"),
    "deeper": ("eagle3", {"eagle_config": [3]}, r"eagle_config = \[3\]: must be an object"),
    "rope": ("eagle3", {"rope_scaling": {"type": "llama3", "factor": 8}}, r"rope_scaling"),
    "another activation": ("eagle3", {"hidden_act": "gelu"}, "hidden_act = 'gelu': is not imp"),
    "another architecture": ("eagle3", {"model_type": "gemma3_text"}, "model_type = 'gemma3_text'"),
    "another method": ("eagle3", {"speculators_model_type": "peagle"}, "model_type = 'peagle'"),
    "features": ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden"),
    "a window": ("eagle3", {"layer_types": ["sliding_attention"]}, "use a head with .'full_att"),
    "tied": ("eagle3", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    "target": (
        "eagle3",
        {"target_hidden_size": 64},
        "target_hidden_size = 64, but the model has 48",
    ),
    "key": ("eagle1", {"logit_scale": 2.0}, r"config\.json: logit_scale = 2\.0: Tandem does not"),
    "keys": (
        "eagle3",
        {"sliding_window": 64, "eagle_config": {"swiglu_limit": 7.0}, "use_cache": False},
        r"sliding_window = 64, swiglu_limit = 7\.0: .*keys=\[sliding_window, swiglu_limit\]",
    ),
    "precision": (
        "eagle3",
        {"quantization_config": {"quant_method": "fp8"}},
        r"quantization_config\.quant_method = 'fp8': Tandem does not know",
    ),
    "at one value": ("eagle3", {"partial_rotary_factor": 0.5}, r"\(partial_rotary_factor = 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_heads_are_refused(main: Path, tmp_path: Path, name: str) -> None:
    kind, changed, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        load_with(main, write_head(tmp_path, kind, **changed), kind)


OF_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2],
    "initializer_range": 0.02,
    "model_type": "llama",
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
}
"""Keys that all of these configs have, as transformers writes a LlamaConfig."""
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE": ("eagle1", {"bias": False}),
    "SpecForge": (
        "eagle3",
        {
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
                "use_aux_hidden_state": True,
            },
            "max_window_layers": 48,
            "model_type": "kimi_k2",
            "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
    "speculators": (
        "eagle3",
        {
            "embed_requires_grad": False,
            "enable_sp_ulysses": False,
            "has_no_defaults_at_init": False,
            "norm_before_residual": False,
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": []},
            "speculators_model_type": "eagle3",
            "speculators_version": "0.1.0",
            "target_hidden_size": 48,
            "transformer_layer_config": {"layer_types": ["full_attention"], "mlp_bias": False},
        },
    ),
    "over latents": (
        "eagle3",
        {
            **LATENTS,
            "tensors": over_latents("eagle3"),
            "model_type": "deepseek_v3",
            "num_key_value_heads": None,
            "head_dim": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": None,
            "moe_layer_freq": 1,
            "num_experts_per_tok": 8,
            "scoring_func": "sigmoid",
            "seq_aux": True,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_heads_are_known(main: Path, tmp_path: Path, name: str) -> None:
    """Use the published keys with values of a head of this size."""
    kind, changed = PUBLISHED[name]
    head = write_head(tmp_path, kind, **OF_LLAMA | changed)
    assert isinstance(load_with(main, head, kind).drafter, EagleDrafter)


def test_a_key_of_a_head_can_be_ignored_and_one_that_is_read_is_read(
    main: Path, tmp_path: Path
) -> None:
    head = write_head(tmp_path, "eagle3", logit_scale=2.0)
    ignored = "model.ignore_config_keys=[logit_scale, head_dim]"
    loaded = load_with(main, head, "eagle3", ignored)
    assert isinstance(loaded.drafter, EagleDrafter)
    assert loaded.drafter._head.config.raw_config.head_dim == 16


def test_a_folder_without_a_head_is_refused(main: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"speculation.draft_model_path: is null; name the folder of the eagle"
    ):
        load(main, "speculation.drafter=eagle")
    with pytest.raises(
        ValueError, match=r"config.json: no such file; set speculation.draft_model_path"
    ):
        load_with(main, tmp_path, "eagle3")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="hidden_size"):
        load_with(main, tmp_path, "eagle3")


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_trees(main: Path, tmp_path: Path, kind: str) -> None:
    """Answers equal those without drafts, and some drafts are accepted. A beam too wide for the bit
    masks is rejected."""
    loaded = load_with(
        main,
        write_head(tmp_path, kind),
        kind,
        "speculation.max_tree_nodes=12",
        "speculation.top_k=5",
    )
    bench, plain = (
        Bench(loaded, num_drafts=3),
        Bench(load(main, "model.kernels=native"), num_drafts=0),
    )
    asked = [greedy(f"r{i}", prompt(9 + i, seed=i), 20, ignore_eos=True) for i in range(4)]
    assert bench.generate(*asked) == plain.generate(*asked)
    assert sum(one.counts.num_accepted for one in bench.updates() if one.counts is not None) > 0
    with pytest.raises(ValueError, match="top_k=40: use at most 31"):
        load_with(main, tmp_path, kind, "speculation.max_tree_nodes=12", "speculation.top_k=40")


def facts(loaded: LoadedModel) -> tuple[str, ...]:
    """Return the facts about its caches that a rank reports."""
    spec, config, pool = RankSpec("p", PREFILL, 1), TandemConfig(), PagePool(4, PAGE_SIZE)
    parts = RankParts(
        spec, config, loaded, pool, loaded.allocate_caches(4, PAGE_SIZE), EngineLoop("none")
    )
    return parts.transfer_caches().layout.compatibility_facts()


def test_files_that_differ_between_prefill_and_decode_are_refused(
    main: Path, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "a", "eagle3")
    same = write_head(tmp_path / "b", "eagle3")
    norm = head_tensors("eagle3")["midlayer.hidden_norm.weight"]
    other = write_head(tmp_path / "c", "eagle3", tensors={"midlayer.hidden_norm.weight": norm + 1})
    turned = write_head(tmp_path / "d", "eagle3", rope_theta=500.0)
    mine, alike, *theirs = (
        facts(load_with(main, one, "eagle3")) for one in (head, same, other, turned)
    )
    check_compatible(mine, alike)
    for one in theirs:
        text = r"needs drafter: eagle3 \w{16}; the prefill rank has drafter: eagle3 \w"
        with pytest.raises(LayoutMismatch, match=text):
            check_compatible(mine, one)
    with pytest.raises(LayoutMismatch, match="needs eagle: 1 x .*, features: 144, drafter: eagle3"):
        check_compatible(facts(load(main)), mine)
    check_compatible(mine, facts(load(main, "speculation.drafter=none")))


def test_a_head_is_part_of_the_weights_that_a_cluster_compares(main: Path, tmp_path: Path) -> None:
    """The comparison precedes loading. A folder with the same files counts as the same head."""
    norm = head_tensors("eagle3")["midlayer.hidden_norm.weight"]
    heads = {
        "head": write_head(tmp_path / "a", "eagle3"),
        "copy": write_head(tmp_path / "b", "eagle3"),
        "other weights": write_head(
            tmp_path / "c", "eagle3", tensors={"midlayer.hidden_norm.weight": norm + 1}
        ),
        "other config": write_head(tmp_path / "d", "eagle3", rope_theta=500.0),
    }
    found: dict[str, str] = {}

    class Enough(Exception):
        """Ends the load before the weights are read."""

    for name, head in heads.items():

        def check(weights: str, name: str = name) -> None:
            found[name] = weights
            raise Enough

        sets = (
            f"model.path={main}",
            "speculation.drafter=eagle3",
            f"speculation.draft_model_path={head}",
        )
        for kind in (PREFILL, DECODE):
            with pytest.raises(Enough):
                load_model(load_config(None, list(sets)), kind, check_digest=check)
    assert found["head"] == found["copy"] and len(set(found.values())) == 3
    digest = load(main, "model.kernels=native").digest
    assert all(
        one.startswith(f"{digest} and speculation.draft_model_path ") for one in found.values()
    )
