"""The loader: every layout that a checkpoint may have, and every way in which one may be broken."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.blocks import quantise
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.config import load as load_config
from tandem.core.info import DECODE, PREFILL
from tandem.core.progress import LOADING, on_startup_progress
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.files import CheckpointFiles, dequantise
from tandem.model.checkpoint.weights import Checkpoint, load_network
from tandem.model.drafters.mtp import MtpDrafter, MtpLayer
from tandem.model.kernels.base import TORCH_KERNELS, Fp8BlockWeight
from tandem.model.loaded import LoadedModel, load_model
from tandem.model.network.batch import Segment, pack_segments
from tandem.model.network.cache import MTP
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.layers import process_weights_after_loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_tiny(tmp_path, seed=5)
    return tmp_path


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def network(folder: Path, dtype: torch.dtype = torch.float32) -> DeepseekV3:
    with CheckpointFiles(folder) as files:
        config, device = ModelConfig.from_dir(folder), torch.device("cpu")
        dispatch = Dispatch(config.n_routed_experts)
        return load_network(Checkpoint(files, config, dtype, device), dispatch)


def mtp_layer(folder: Path) -> MtpLayer:
    """Return the MTP layer of the drafter that the factory creates."""
    drafter = load(folder, "speculation.drafter=mtp").drafter
    assert isinstance(drafter, MtpDrafter)
    return drafter._layer


def parameters(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of the network and the MTP layer, by their names in the checkpoint."""
    own = {f"model.layers.3.{n}": p for n, p in mtp_layer(folder).named_parameters()}
    return dict(network(folder).named_parameters()) | own


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights as they were read."""
    monkeypatch.setattr("tandem.model.loaded.process_weights_after_loading", lambda *_: None)
    monkeypatch.setattr(MtpDrafter, "process_weights_after_loading", lambda *_: None)


def shard(folder: Path, pieces: list[dict[str, Tensor]]) -> None:
    """Rewrite the checkpoint as an index and files of arbitrary names."""
    weight_map = {}
    for i, piece in enumerate(pieces):
        name = f"part-{i:05}-of-{len(pieces):06}.safetensors"
        save_file(piece, folder / name)
        weight_map |= dict.fromkeys(piece, name)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_every_tensor_arrives(folder: Path) -> None:
    built, stored = network(folder), tensors(folder)
    assert torch.equal(built.lm_head.weight, stored["lm_head.weight"])
    experts = built.model.layers[1].mlp.experts
    for e in (0, 7):
        prefix = f"model.layers.1.mlp.experts.{e}."
        gate_up = torch.cat([stored[prefix + f"{p}_proj.weight"] for p in ("gate", "up")])
        assert torch.equal(experts.gate_up.weight[e], gate_up)
        assert torch.equal(experts.down.weight[e], stored[prefix + "down_proj.weight"])
    assert not any(p.is_meta for p in [*built.parameters(), *built.buffers()] if p.dim())


def test_shards_split_anywhere(folder: Path) -> None:
    whole, stored = parameters(folder), tensors(folder)
    names = sorted(stored)
    shard(folder, [{n: stored[n] for n in names[i::3]} for i in range(3)])
    sharded = parameters(folder)
    assert whole.keys() == sharded.keys()
    for name, parameter in whole.items():
        assert torch.equal(parameter, sharded[name]), name


def test_bf16_keeps_the_routing_bias_in_fp32(folder: Path) -> None:
    built = network(folder, torch.bfloat16)
    gate = built.model.layers[1].mlp.gate
    assert gate.weight.dtype == torch.bfloat16
    assert gate.e_score_correction_bias.dtype == torch.float32


def quantised(folder: Path) -> dict[str, Tensor]:
    """Return the folder's checkpoint with FP8 matrices where DeepSeek-V3 has them."""
    stored = {}
    for name, tensor in tensors(folder).items():
        if "proj.weight" in name or "proj_with_mqa.weight" in name:
            stored[name], stored[name + "_scale_inv"] = quantise(tensor, 128)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")
    return stored


@pytest.mark.parametrize("q_lora_rank", [20, 128])
def test_matrices_stay_in_blocks_where_kernels_read_them(tmp_path: Path, q_lora_rank: int) -> None:
    """Values and scales are those of the file, gate rows first. A matrix is dequantised if it is
    absorbed, or joined to one that does not end at a block boundary."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    told = {"quantization_config": fp8, "moe_intermediate_size": 136, "q_lora_rank": q_lora_rank}
    config = tiny.write_tiny(tmp_path, seed=5, **told)
    stored = quantised(tmp_path)
    dispatch = Dispatch(config.n_routed_experts)
    with CheckpointFiles(tmp_path) as files:
        kind = torch.float32, torch.device("cpu")
        model = load_network(Checkpoint(files, config, *kind, keep_fp8=True), dispatch)
    process_weights_after_loading(model, TORCH_KERNELS)
    gate_up, down = model.model.layers[1].mlp.experts._packed
    prefix = "model.layers.1.mlp.experts."
    for e in range(config.n_routed_experts):
        for part, suffix in ((0, "proj.weight"), (1, "proj.weight_scale_inv")):
            both = [stored[f"{prefix}{e}.{one}_{suffix}"] for one in ("gate", "up")]
            assert torch.equal(gate_up[part][e].float(), torch.cat(both).float())
            wanted = stored[f"{prefix}{e}.down_{suffix}"]
            assert torch.equal(down[part][e].float(), wanted.float())
    assert gate_up.values.dtype == torch.float8_e4m3fn and gate_up.scales.shape == (8, 4, 1)
    shared, attention = model.model.layers[1].mlp.shared_experts, model.model.layers[1].self_attn
    assert shared.packed[0].values.shape == (1, 272, 48) and shared.packed[0].scales.shape[1] == 4
    for part, suffix in ((0, "weight"), (1, "weight_scale_inv")):
        o_proj = stored[f"model.layers.1.self_attn.o_proj.{suffix}"]
        assert torch.equal(attention.o_proj.packed[part].float(), o_proj.float())
        if q_lora_rank == 128:
            names = (
                f"model.layers.1.self_attn.{n}.{suffix}" for n in ("q_a_proj", "kv_a_proj_with_mqa")
            )
            both = torch.cat([stored[name].float() for name in names])
            assert torch.equal(attention._down[part].float(), both)
    plain = [
        attention._up_k,
        attention._kv_b,
        model.lm_head.packed,
        *[attention._down][q_lora_rank // 128 :],
    ]
    assert all(weights.dtype == torch.float32 for weights in plain)
    name = f"{prefix}2.up_proj.weight"
    save_file(stored | {name: stored[name].bfloat16()}, tmp_path / "model.safetensors")
    with (
        CheckpointFiles(tmp_path) as files,
        pytest.raises(
            ValueError,
            match=r"experts\.2\.up_proj\.weight is torch\.bfloat16, but other experts are FP8",
        ),
    ):
        load_network(Checkpoint(files, config, *kind, keep_fp8=True), dispatch)


def test_matrices_that_are_read_together_are_blocks_together_or_none(tmp_path: Path) -> None:
    """The checkpoint quantises only some of these matrices."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = tiny.write_tiny(tmp_path, seed=5, quantization_config=fp8, q_lora_rank=128)
    plain, stored = tensors(tmp_path), quantised(tmp_path)
    prefix = "model.layers.1."
    for name in ("self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.down_proj"):
        stored[f"{prefix}{name}.weight"] = plain[f"{prefix}{name}.weight"]
        del stored[f"{prefix}{name}.weight_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors")
    with CheckpointFiles(tmp_path) as files:
        checkpoint = Checkpoint(files, config, torch.float32, torch.device("cpu"), keep_fp8=True)
        model = load_network(checkpoint, Dispatch(config.n_routed_experts))
    process_weights_after_loading(model, TORCH_KERNELS)

    def wanted(name: str) -> Tensor:
        weight = stored[f"{prefix}{name}.weight"]
        scale = stored.get(f"{prefix}{name}.weight_scale_inv")
        return weight if scale is None else dequantise(weight, scale, (128, 128))

    layer = model.model.layers[1]
    down = [wanted(f"self_attn.{name}") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert torch.equal(layer.self_attn._down, torch.cat(down))
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, back = (wanted(f"mlp.shared_experts.{name}") for name in names)
    assert torch.equal(layer.mlp.shared_experts.packed[0][0], torch.cat((gate, up)))
    assert torch.equal(layer.mlp.shared_experts.packed[1][0], back)
    assert isinstance(layer.self_attn.q_b_proj.packed, Fp8BlockWeight)


@pytest.mark.usefixtures("unpacked")
def test_fp8_blocks_with_scales_in_another_shard(tmp_path: Path) -> None:
    """Edges are ragged, too: no size here is a multiple of the block."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    tiny.write_tiny(tmp_path, seed=5, quantization_config=fp8 | {"activation_scheme": "dynamic"})
    weights, scales, expected = {}, {}, {}
    for name, tensor in tensors(tmp_path).items():
        if "self_attn" in name and tensor.dim() == 2:
            weights[name], scales[name + "_scale_inv"] = quantise(tensor, 16)
            blocks = scales[name + "_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
            cut = blocks[: tensor.shape[0], : tensor.shape[1]]
            expected[name] = weights[name].float() * cut
        else:
            weights[name] = tensor
    shard(tmp_path, [weights, scales])
    built = parameters(tmp_path)
    assert expected
    for name, tensor in expected.items():
        assert torch.equal(built[name], tensor), name
    ragged = torch.ones(20, 17, dtype=torch.float8_e4m3fn)
    dense = dequantise(ragged, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (16, 16))
    assert dense[15, 15] == 1 and dense[15, 16] == 2 and dense[16, 0] == 3 and dense[19, 16] == 4
    del scales["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    (tmp_path / "model.safetensors").touch()
    shard(tmp_path, [weights, scales])
    with pytest.raises(
        ValueError, match=r"o_proj\.weight is torch\.float8.*_scale_inv or .* is missing"
    ):
        network(tmp_path)


def test_a_rank_that_prefills_writes_the_entries_of_the_mtp_layer_without_its_experts(
    folder: Path,
) -> None:
    config, written = load_config(None, [f"model.path={folder}", "model.dtype=float32"]), {}
    for kind in (PREFILL, DECODE):
        loaded = load_model(config, kind)
        assert isinstance(loaded.drafter, MtpDrafter)
        assert hasattr(loaded.drafter._layer, "mlp") == (kind == DECODE)
        caches = loaded.allocate_caches(3, 16)
        batch = pack_segments([Segment(list(range(5, 25)), 0, [2, 1])], 16, torch.device("cpu"))
        with torch.inference_mode():
            hidden_1TD = loaded.network(batch, caches)
            loaded.drafter.prefill(batch, torch.tensor([[7]]), hidden_1TD, caches)
        written[kind] = caches[MTP][0]
    assert torch.equal(written[PREFILL], written[DECODE])
    assert written[DECODE][2].any(-1).all() and written[DECODE][1, :4].any(-1).all()


def test_copies_of_embedding_and_head_in_the_mtp_layer_are_tolerated(folder: Path) -> None:
    stored = tensors(folder)
    stored["model.layers.3.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.3.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(stored, folder / "model.safetensors")
    assert load(folder).drafter.name == "mtp"


@pytest.mark.usefixtures("unpacked")
def test_the_drafter_has_the_weights_of_its_layer(folder: Path) -> None:
    layer, stored = mtp_layer(folder), tensors(folder)
    prefix = "model.layers.3."
    assert torch.equal(layer.eh_proj.weight, stored[prefix + "eh_proj.weight"])
    assert torch.equal(layer.shared_head["norm"].weight, stored[prefix + "shared_head.norm.weight"])
    down = stored[prefix + "mlp.experts.5.down_proj.weight"]
    assert torch.equal(layer.mlp.experts.down.weight[5], down)
    assert not any(p.is_meta for p in [*layer.parameters(), *layer.buffers()])


@pytest.mark.parametrize("broken", ["shape", "missing"])
def test_without_a_drafter_its_weights_are_not_read(
    folder: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a drafter its weights are not read: broken ones do no harm. They are named when they
    are needed."""
    stored = tensors(folder)
    name = "model.layers.3.hnorm.weight"
    if broken == "shape":
        stored[name] = torch.ones(5)
    else:
        del stored[name]
    save_file(stored, folder / "model.safetensors")
    read, names = CheckpointFiles.read, []

    def watched(self: CheckpointFiles, name: str) -> Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(CheckpointFiles, "read", watched)
    loaded = load(folder, "speculation.drafter=none")
    assert names and not [name for name in names if name.startswith("model.layers.3.")]
    assert loaded.has_mtp and loaded.drafter.name == "none"
    [(tokens, _)] = Bench(loaded).generate(greedy("r", [5, 6, 7], 6, ignore_eos=True))
    assert tokens == tiny.reference_greedy(folder, [5, 6, 7], 6)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.hnorm\.weight"):
        load(folder)


@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_loading_tells_how_far_it_is(folder: Path, drafter: str) -> None:
    shares: list[float] = []
    config = load_config(None, [f"model.path={folder}", f"speculation.drafter={drafter}"])
    on_startup_progress.set(lambda doing, share: shares.append(share) if doing == LOADING else None)
    load_model(config, DECODE)
    assert shares == sorted(shares) and 0 < shares[0] < 0.1 and shares[-1] == 1
    stored = tensors(folder)
    of_layer = sum(t.nbytes for n, t in stored.items() if n.startswith("model.layers.3."))
    share = 1 - (of_layer if drafter == "none" else 0) / sum(t.nbytes for t in stored.values())
    assert shares[-2] == pytest.approx(share, abs=0.1)


def test_tied_embeddings(tmp_path: Path) -> None:
    tiny.write_tiny(tmp_path, seed=5, tie_word_embeddings=True)
    stored = tensors(tmp_path)
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    built = network(tmp_path)
    assert torch.equal(built.lm_head.weight, stored["model.embed_tokens.weight"])
    del stored["model.embed_tokens.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing.*model\.embed_tokens\.weight"):
        network(tmp_path)


def edited(folder: Path, edit: str) -> None:
    stored = tensors(folder)
    name = "model.layers.1.self_attn.o_proj.weight"
    if edit == "missing":
        del stored[name]
    elif edit == "missing expert":
        del stored["model.layers.1.mlp.experts.3.up_proj.weight"]
    elif edit == "unknown":
        stored["model.layers.1.self_attn.extra.weight"] = torch.ones(2)
    elif edit == "surplus expert":
        stored["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.ones(24, 48)
    elif edit == "shape":
        stored[name] = torch.ones(3, 4)
    elif edit == "integer":
        stored[name] = stored[name].to(torch.int8)
        stored[name + "_scale_inv"] = torch.ones(3, 3)
    elif edit == "fp8 norm":
        stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.float8_e4m3fn)
        stored["model.norm.weight_scale_inv"] = torch.ones(3)
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ("missing", r"missing.*layers\.1\.self_attn\.o_proj"),
        ("missing expert", r"missing.*layers\.1\.mlp\.experts\.3\.up_proj"),
        ("unknown", r"unknown tensor model\.layers\.1\.self_attn\.extra"),
        ("surplus expert", r"unknown tensor model\.layers\.1\.mlp\.experts\.8"),
        ("integer", r"model\.safetensors: .*o_proj\.weight is 2-d torch\.int8"),
        ("fp8 norm", r"model\.safetensors: model\.norm\.weight is 1-d torch\.float8_e4m3fn"),
        ("shape", r"o_proj\.weight has shape \(3, 4\).*\(48, 64\)"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, edit: str, expected: str) -> None:
    edited(folder, edit)
    with pytest.raises(ValueError, match=expected):
        network(folder)


def test_truncated_and_missing_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    stored = tensors(folder)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(
        ValueError, match=r"model\.safetensors: has [\d,]+ bytes, but its header requires"
    ):
        network(folder)
    file.write_bytes(data)
    names = sorted(stored)
    shard(folder, [{n: stored[n] for n in names[i::2]} for i in range(2)])
    part = folder / "part-00001-of-000002.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"part-00001.*has [\d,]+ bytes, but its header requires"):
        network(folder)
    part.unlink()
    with pytest.raises(ValueError, match=r"missing files: part-00001"):
        network(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"\d+ tensors are missing"):
        network(folder)
    (folder / "part-00000-of-000002.safetensors").unlink()
    with pytest.raises(ValueError, match="or one .safetensors file, has no .safetensors file"):
        network(folder)


def test_one_tensor_is_in_memory_beside_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one tensor is in memory besides the weights: when one is read, those before it are
    freed."""
    read, alive = CheckpointFiles.read, []

    def watched(self: CheckpointFiles, name: str) -> Tensor:
        assert not [ref for ref in alive if ref() is not None], f"tensors pile up before {name}"
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(CheckpointFiles, "read", watched)
    load(folder)
    assert len(alive) == len(tensors(folder))


def expert_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    drafter = loaded.drafter
    assert isinstance(drafter, MtpDrafter)
    modules = {"main": loaded.network, "mtp": drafter._layer}
    return {
        f"{where}.{name}": parameter
        for where, module in modules.items()
        for name, parameter in module.named_parameters()
        if ".experts." in name
    }


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("num_redundant", [0, 4])
def test_a_rank_of_a_gang_holds_its_own_experts_and_reads_no_others(
    folder: Path, num_redundant: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four ranks holds a quarter of the routed experts, also in the MTP layer."""
    names: list[str] = []
    read = CheckpointFiles.read
    monkeypatch.setattr(
        CheckpointFiles, "read", lambda files, name: names.append(name) or read(files, name)
    )
    whole = expert_tensors(load(folder))
    sizes = "decode.dp_size=4", f"decode.num_redundant_experts={num_redundant}"
    config = load_config(None, [f"model.path={folder}", "model.dtype=float32", *sizes])
    for rank in range(4):
        names.clear()
        loaded = load_model(config, DECODE, rank=rank)
        slots = range(rank * (8 + num_redundant) // 4, (rank + 1) * (8 + num_redundant) // 4)
        held = [slot % 8 for slot in slots]
        for name, parameter in expert_tensors(loaded).items():
            assert torch.equal(parameter, whole[name][held]), name
        assert len(names) == len(set(names)), "no tensor is read twice"
        tile_for_experts = (name.split(".experts.")[1] for name in names if ".experts." in name)
        experts = {int(name.partition(".")[0]) for name in tile_for_experts}
        assert experts == set(held)
        num_bytes = sum(p.nbytes for p in expert_tensors(loaded).values())
        expected = sum(p.nbytes for p in whole.values()) * len(held) // 8
        assert num_bytes == expected


def test_experts_that_ranks_cannot_share_evenly_are_refused(folder: Path) -> None:
    config = load_config(None, [f"model.path={folder}", "decode.dp_size=3"])
    with pytest.raises(ValueError, match=r"dp_size=3: must divide .* = 8 \+ 0; set num_redundant"):
        load_model(config, DECODE)


@pytest.mark.parametrize(
    ("told", "asked", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", torch.bfloat16),
        ({"torch_dtype": "float32"}, "auto", torch.float32),
        ({"torch_dtype": None, "dtype": "float32"}, "auto", torch.float32),
        ({"torch_dtype": None}, "auto", torch.bfloat16),
        ({"torch_dtype": "bfloat16"}, "float32", torch.float32),
    ],
)
def test_auto_is_the_checkpoints_own_dtype(
    told: dict[str, str | None], asked: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny.write_tiny(tmp_path, seed=3, **told)
    config = load_config(None, [f"model.path={tmp_path}", f"model.dtype={asked}"])
    loaded = load_model(config, DECODE)
    assert loaded.dtype == dtype == loaded.allocate_caches(2, 8)["main"][0].dtype
    assert loaded.network.model.embed_tokens.weight.dtype == dtype
