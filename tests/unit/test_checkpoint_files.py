"""Weight files are found whatever their names, and incomplete ones are named in the error."""

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.blocks import quantise
from benchmarks.harness.engines import Bench, greedy, load
from tandem.cluster.control.launch import launch
from tandem.core.config import TINY_MODEL
from tandem.core.config import load as load_config
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.files import CheckpointFiles, read_headers
from tandem.model.checkpoint.headers import read_header
from tandem.model.checkpoint.weights import Checkpoint, load_network
from tandem.model.kernels.base import TORCH_KERNELS
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.layers import process_weights_after_loading

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
IDS = [5, 17, 33, 80]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_tiny(tmp_path, seed=5)
    return tmp_path


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WHOLE)


def network(folder: Path, *, keep_fp8: bool = False) -> DeepseekV3:
    with CheckpointFiles(folder) as files:
        config, device = ModelConfig.from_dir(folder), torch.device("cpu")
        checkpoint = Checkpoint(files, config, torch.float32, device, keep_fp8)
        return load_network(checkpoint, Dispatch(config.n_routed_experts))


def shard(folder: Path, pieces: dict[str, dict[str, Tensor]], index: dict[str, str]) -> None:
    """Replace the single weight file by ``pieces`` and an index."""
    (folder / WHOLE).unlink()
    for name, piece in pieces.items():
        save_file(piece, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def halves(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Return all tensors in two files, with the norm in the first one."""
    stored = tensors(folder)
    names = sorted(stored, key=lambda name: (name != NORM, name))
    pieces = {
        f"part-{i}.safetensors": {name: stored[name] for name in names[i::2]} for i in range(2)
    }
    return pieces, {name: file for file, piece in pieces.items() for name in piece}


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "weights.safetensors"])
def test_a_single_file_loads_under_any_name(folder: Path, name: str) -> None:
    expected = tensors(folder)[NORM]
    (folder / WHOLE).rename(folder / name)
    assert torch.equal(network(folder).model.norm.weight, expected)
    shutil.copy(folder / name, folder / "another.safetensors")
    with pytest.raises(
        ValueError, match=rf"or one \.safetensors file, has another\.safetensors, {name}"
    ):
        network(folder)


@pytest.mark.parametrize("chosen", [0, 1])
def test_the_index_decides_which_file_a_tensor_is_from(folder: Path, chosen: int) -> None:
    """Other tensors of that name, and a whole file next to the index, are ignored
    (vllm-project/vllm#54230)."""
    pieces, index = halves(folder)
    right, stale = pieces["part-0.safetensors"][NORM], torch.full((48,), 9.0)
    pieces[f"part-{1 - chosen}.safetensors"][NORM] = stale
    pieces[f"part-{chosen}.safetensors"][NORM] = right
    stray = tensors(folder) | {NORM: stale}
    shard(folder, pieces, index | {NORM: f"part-{chosen}.safetensors"})
    save_file(stray, folder / WHOLE)
    assert torch.equal(network(folder).model.norm.weight, right)


def broken(folder: Path, how: str) -> None:
    pieces, index = halves(folder)
    if how == "no map":
        shard(folder, pieces, {})
    elif how == "absent file":
        shard(folder, pieces, index | {NORM: "part-7.safetensors"})
    elif how == "absent tensor":
        shard(folder, pieces, index | {NORM: "part-1.safetensors"})
    else:
        shard(folder, pieces, index)
        part = folder / "part-1.safetensors"
        data = part.read_bytes()
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\n"
        size = len(data)
        part.write_bytes(
            {
                "pointer": pointer + b"size 4302350848\n",
                "short": data[:-100],
                "long": data + b"1",
                "in the header": data[:50],
                "page": b"<!DOCTYPE html><html>Not found</html>",
                "empty": b"",
                "header of another": size.to_bytes(8, "little") + data[8:],
                "list": (2).to_bytes(8, "little") + b"[]",
                "no places": (11).to_bytes(8, "little") + b'{"a": "bc"}',
            }[how]
        )


BROKEN = {
    "no map": r"index\.json: has no weight_map",
    "absent file": r"index\.json: lists missing files: part-7",
    "absent tensor": rf"part-1\.safetensors: lacks {NORM}, which .*index\.json lists",
    "pointer": r"part-1\.safetensors: .*Git LFS pointer: run git lfs pull",
    "short": r"part-1\.safetensors: has [\d,]+ bytes, but its header requires [\d,]+; download",
    "long": r"part-1\.safetensors: has [\d,]+ bytes, but its header requires",
    "in the header": r"part-1\.safetensors: is not a readable safetensors file",
    "page": r"part-1\.safetensors: is not a readable safetensors file",
    "empty": r"part-1\.safetensors: is not a readable safetensors file",
    "header of another": r"part-1\.safetensors: is not a readable safetensors file",
    "list": r"part-1\.safetensors: is not a readable safetensors file",
    "no places": r"part-1\.safetensors: is not a readable safetensors file",
}


@pytest.mark.parametrize("how", BROKEN)
def test_files_that_are_not_whole_are_named(folder: Path, how: str) -> None:
    broken(folder, how)
    with pytest.raises(ValueError, match=BROKEN[how]):
        read_headers(folder)


def test_headers_are_those_that_safetensors_reads(folder: Path) -> None:
    stored, header = tensors(folder), read_header(folder / WHOLE)
    assert {name: tuple(one["shape"]) for name, one in header.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert {one["dtype"] for one in header.values()} == {"F32"}


async def refused_before_ray(*sets: str) -> str:
    """Return the error of a server start that fails before Ray is started."""
    told: list[str] = []
    with pytest.raises(ValueError) as refused:
        async with launch(load_config(None, [*sets]), on_progress=told.append):
            pass
    assert told == []
    return str(refused.value)


@pytest.mark.parametrize("how", ["pointer", "short", "absent tensor"])
def test_files_are_looked_at_before_ray_starts(folder: Path, how: str) -> None:
    shutil.copy(TINY_MODEL / "tokenizer.json", folder)
    broken(folder, how)
    told = asyncio.run(refused_before_ray(f"model.path={folder}"))
    assert "part-1.safetensors" in told
    if how != "absent tensor":
        sets = ["speculation.drafter=draft_model", f"speculation.draft_model_path={folder}"]
        assert told == asyncio.run(refused_before_ray(*sets))


def test_the_config_is_looked_at_before_ray_starts(folder: Path) -> None:
    shutil.copy(TINY_MODEL / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps(tiny.BASE | {"swiglu_limit": 7.0}))
    assert "swiglu_limit = 7.0" in asyncio.run(refused_before_ray(f"model.path={folder}"))


def test_scales_that_are_not_used_are_skipped_and_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scales of an FP8 cache or of FP8 activations are skipped, also in MTP heads
    (vllm-project/vllm#27227)."""
    expected = tiny.reference_greedy(folder, IDS, 8)
    stored = tensors(folder)
    for name in (
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.self_attn.attn.v_scale",
        "model.layers.0.self_attn.o_proj.input_scale",
        "model.layers.3.eh_proj.input_scale",
        "model.layers.3.shared_head.head.input_scale",
    ):
        stored[name] = torch.tensor(0.5)
    stored["model.layers.3.shared_head.head.weight"] = torch.ones(96, 48)
    for name in ("shared_head.head", "embed_tokens"):
        stored[f"model.layers.3.{name}.weight_scale_inv"] = torch.ones(1, 1)
    save_file(stored, folder / WHOLE)
    caplog.set_level(logging.INFO, "tandem.model.checkpoint")
    loaded = load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        "5 scale tensors are not used, such as model.layers.0.self_attn.o_proj.input_scale"
    ]
    assert loaded.drafter.name == "mtp"
    [(tokens, _)] = Bench(loaded).generate(greedy("r", IDS, 8, ignore_eos=True))
    assert tokens == expected


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.extra.weight_scale_inv", "model.layers.3.extra.weight"]
)
def test_other_scales_are_not_let_through(folder: Path, name: str) -> None:
    save_file(tensors(folder) | {name: torch.ones(1, 1)}, folder / WHOLE)
    with pytest.raises(ValueError, match=f"unknown tensor {name}"):
        load(folder)


@pytest.mark.parametrize("left", ["nothing", "scales"])
def test_a_copy_in_bf16_that_kept_its_quantization_config_loads(tmp_path: Path, left: str) -> None:
    """Matrices stay bf16, also with ``keep_fp8``. Remaining scales are not read."""
    tiny.write_tiny(tmp_path, seed=5, quantization_config=FP8)
    stored = tensors(tmp_path)
    if left == "scales":
        scales = {name: quantise(stored[name], 128)[1] for name in stored if "proj.weight" in name}
        stored |= {f"{name}_scale_inv": scale for name, scale in scales.items()}
    save_file(stored, tmp_path / WHOLE)
    model = network(tmp_path, keep_fp8=True)
    experts = model.model.layers[1].mlp.experts
    gate_up = [stored[EXPERT.replace("up_proj", f"{part}_proj")] for part in ("gate", "up")]
    assert torch.equal(experts.gate_up.weight[2], torch.cat(gate_up))
    process_weights_after_loading(model, TORCH_KERNELS)
    assert experts._packed[0].dtype == torch.float32


def rewritten(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_mtp_layers_are_counted_by_either_name(folder: Path) -> None:
    rewritten(folder, num_nextn_predict_layers=None, num_mtp_layers=1)
    assert load(folder).drafter.name == "mtp"
    rewritten(folder, num_mtp_layers=0)
    assert load(folder).drafter.name == "none"
    rewritten(folder, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match="num_nextn_predict_layers = 1 and num_mtp_layers = 0"):
        load(folder)
