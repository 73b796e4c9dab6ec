"""The digest of a checkpoint: which changes alter it, and that it belongs to the loaded weights."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness import tiny
from tandem.core.config import TandemConfig
from tandem.core.config import load as load_config
from tandem.core.info import DECODE, PREFILL
from tandem.core.progress import LOADING, on_startup_progress
from tandem.model.checkpoint import digest as digests
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.digest import PAGE_BYTES
from tandem.model.checkpoint.files import INDEX, SINGLE, CheckpointFiles
from tandem.model.checkpoint.headers import MAX_HEADER_BYTES, Header
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.files import load_parameters, read_tensors
from tandem.model.loaded import load_model
from tests.small import write_small
from tests.unit.test_weights import quantised

NUM_FILES, FILE_BYTES = 163, 4_300_000_000
MAX_PARSES = 20
"""Maximum CPU time of a digest, in units of parsing each header once (8 when written, or 1.6 s)."""

SMALL_TENSOR = "model.layers.0.input_layernorm.weight"
LARGE_TENSOR = "model.embed_tokens.weight"
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny.write_tiny(tmp_path_factory.mktemp("config"), seed=3)


def write(folder: Path, files: dict[str, dict[str, Tensor]]) -> Path:
    """Write a folder of weights in these files, with an index."""
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def tensors() -> dict[str, Tensor]:
    """Return small tensors, a large one and routed experts."""
    made = {SMALL_TENSOR: torch.arange(48.0), LARGE_TENSOR: torch.arange(8192.0).view(64, 128)}
    return made | {EXPERT.format(i): torch.full((4, 4), float(i)) for i in range(16)}


def digest(folder: Path, config: ModelConfig) -> str:
    with CheckpointFiles(folder) as files:
        return files.digest(config)


def split(made: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    names = sorted(made)
    return {
        "a.safetensors": {name: made[name] for name in names[::2]},
        "b.safetensors": {name: made[name] for name in names[1::2]},
    }


def place(file: Path, tensor: str) -> tuple[int, int]:
    """Return the start and the end of a tensor's bytes in its file."""
    raw = file.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    lo, hi = json.loads(raw[8:length])[tensor]["data_offsets"]
    return length + lo, length + hi


def test_it_is_of_what_files_hold_and_not_of_their_names_or_order(
    tmp_path: Path, config: ModelConfig
) -> None:
    files = split(tensors())
    first = digest(write(tmp_path / "one", files), config)
    assert digest(write(tmp_path / "two", dict(reversed(files.items()))), config) == first
    renamed = dict(zip(("z.safetensors", "y.safetensors"), files.values(), strict=True))
    assert digest(write(tmp_path / "three", renamed), config) == first
    assert len(first) == 32 and int(first, 16)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_byte_of_a_small_tensor_changes_it(
    tmp_path_factory: pytest.TempPathFactory, config: ModelConfig, data: st.DataObject
) -> None:
    """Any changed byte of a small tensor, or of the middle page of a large one, changes the
    digest."""
    folder = write(tmp_path_factory.mktemp("byte") / "one", split(tensors()))
    before = digest(folder, config)
    name = data.draw(st.sampled_from((SMALL_TENSOR, LARGE_TENSOR)))
    file = next(f for f in sorted(folder.glob("*.safetensors")) if name.encode() in f.read_bytes())
    lo, hi = place(file, name)
    middle = max(lo, (lo + hi - PAGE_BYTES) // 2)
    at = data.draw(st.integers(middle, min(hi, middle + PAGE_BYTES) - 1))
    raw = bytearray(file.read_bytes())
    raw[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(raw)
    assert digest(folder, config) != before


def renamed(made: dict[str, Tensor]) -> None:
    made["model.layers.0.post_attention_layernorm.weight"] = made.pop(SMALL_TENSOR)


def reshaped(made: dict[str, Tensor]) -> None:
    made[SMALL_TENSOR] = made[SMALL_TENSOR].view(2, 24)


def retyped(made: dict[str, Tensor]) -> None:
    made[SMALL_TENSOR] = made[SMALL_TENSOR].view(torch.int32)


def longer(made: dict[str, Tensor]) -> None:
    made[SMALL_TENSOR] = torch.cat((made[SMALL_TENSOR], torch.zeros(1)))


def one_more(made: dict[str, Tensor]) -> None:
    made["model.norm.weight"] = torch.zeros(1)


def other_experts(made: dict[str, Tensor]) -> None:
    """Change every expert, because only some are sampled."""
    for i in range(16):
        made[EXPERT.format(i)] += 1


@pytest.mark.parametrize(
    "change",
    [renamed, reshaped, retyped, longer, one_more, other_experts],
    ids=lambda f: f.__name__,
)
def test_names_shapes_dtypes_sizes_and_experts_change_it(
    tmp_path: Path, config: ModelConfig, change: Callable[[dict[str, Tensor]], None]
) -> None:
    before = digest(write(tmp_path / "one", {"a.safetensors": tensors()}), config)
    made = tensors()
    change(made)
    assert digest(write(tmp_path / "two", {"a.safetensors": made}), config) != before


def test_another_choice_of_files_changes_it(tmp_path: Path, config: ModelConfig) -> None:
    """Two files may hold the same tensor; the index decides which of them is read."""
    other = tensors() | {SMALL_TENSOR: torch.ones(48)}
    both = {"a.safetensors": tensors(), "b.safetensors": other}
    folder = write(tmp_path / "one", both)
    second = digest(folder, config)
    weight_map = dict.fromkeys(tensors(), "b.safetensors") | {SMALL_TENSOR: "a.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    first = digest(folder, config)
    assert first != second


def test_the_config_changes_it_and_the_dtype_of_loading_does_not(tmp_path: Path) -> None:
    write_small(tmp_path)

    def of(kind: str, *sets: str) -> str:
        return load_model(load_config(None, [f"model.path={tmp_path}", *sets]), kind).digest

    first = of(DECODE, "model.dtype=float32")
    assert of(DECODE, "model.dtype=bfloat16") == of(PREFILL, "model.kernels=torch") == first
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"rope_theta": 9e3}))
    assert of(DECODE, "model.dtype=float32") != first


def test_blocks_that_are_kept_do_not_change_it(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    tiny.write_tiny(tmp_path, seed=5, quantization_config=fp8)
    quantised(tmp_path)
    kinds = "model.kernels=native", "model.kernels=torch"
    loaded = [load_model(load_config(None, [f"model.path={tmp_path}", k]), DECODE) for k in kinds]
    assert loaded[0].digest == loaded[1].digest


def sparse_checkpoint(folder: Path) -> int:
    """Write sparse files with the number, size and tensor count of DeepSeek-V3's. Return the number
    of tensors outside the routed experts."""
    weight_map = dict[str, str]()
    num_plain = 0
    for i in range(NUM_FILES):
        plain = [f"model.layers.{i}.self_attn.{j}.weight" for j in range(10)]
        experts = [
            f"model.layers.{i}.mlp.experts.{j}.up_proj.{kind}"
            for j in range(275)
            for kind in ("weight", "weight_scale_inv")
        ]
        names = plain if i == 0 else experts if i == 1 else [*plain, *experts]
        num_plain += len(set(plain) & set(names))
        step = FILE_BYTES // len(names)
        header = json.dumps(
            {
                name: {"dtype": "U8", "shape": [step], "data_offsets": [step * k, step * (k + 1)]}
                for k, name in enumerate(names)
            }
        ).encode()
        name = f"model-{i:05}-of-{NUM_FILES:05}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + step * len(names))
        weight_map |= dict.fromkeys(names, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return num_plain


def parse_headers(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            json.loads(file.read(int.from_bytes(file.read(8), "little")))


def test_a_digest_reads_a_page_of_each_file_whatever_its_size(
    tmp_path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor outside the experts is read too; 700 GB take two seconds of CPU."""
    num_plain = sparse_checkpoint(tmp_path)
    pages = list[int]()
    sampled = digests._pages

    def counted(header: Header) -> list[tuple[int, int]]:
        found = sampled(header)
        pages.append(sum(num_bytes == PAGE_BYTES for _, num_bytes in found))
        return found

    monkeypatch.setattr(digests, "_pages", counted)
    began = time.process_time()
    parse_headers(tmp_path)
    parsed = time.process_time()
    with CheckpointFiles(tmp_path) as files:
        files.digest(config)
    ended = time.process_time()
    assert len(pages) == NUM_FILES and min(pages) >= 1
    assert num_plain < sum(pages) < 3 * num_plain
    assert ended - parsed < MAX_PARSES * (parsed - began)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        b"",
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        (12).to_bytes(8, "little") + b'{"a": "b"}  ',
        (33).to_bytes(8, "little") + b'{"a": {"data_offsets": [4, 1, 2]}}',
    ],
)
def test_a_file_without_a_header_is_refused_by_name(
    tmp_path: Path, config: ModelConfig, content: bytes
) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with (
        pytest.raises(ValueError, match=r"x\.safetensors: is "),
        CheckpointFiles(tmp_path) as files,
    ):
        files.digest(config)


def loading(link: Path) -> TandemConfig:
    return load_config(None, [f"model.path={link}", "model.dtype=float32"])


def test_what_is_loaded_is_what_the_digest_is_of(tmp_path: Path) -> None:
    """The link moves and the file is replaced between the digest and the load."""
    old, new, link = (tmp_path / name for name in ("old", "new", "link"))
    for folder, seed in ((old, 1), (new, 2)):
        folder.mkdir()
        tiny.write_tiny(folder, seed=seed)
    link.symlink_to(old)
    wanted = load_file(old / SINGLE)[LARGE_TENSOR]
    seen: list[str] = []

    def move(digest: str) -> None:
        seen.append(digest)
        link.unlink()
        link.symlink_to(new)
        os.replace(new / SINGLE, old / SINGLE)

    loaded = load_model(loading(link), DECODE, check_digest=move)
    assert torch.equal(loaded.network.model.embed_tokens.weight, wanted)
    assert seen == [loaded.digest] and not torch.equal(
        load_file(old / SINGLE)[LARGE_TENSOR], wanted
    )


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    tiny.write_tiny(tmp_path / "other", seed=2)
    tiny.write_tiny(tmp_path, seed=1)

    def write_to_it(doing: str, progress: float) -> None:
        if doing == LOADING and progress > 0.5:
            with (tmp_path / SINGLE).open("r+b") as file:
                file.write((tmp_path / "other" / SINGLE).read_bytes())

    token = on_startup_progress.set(write_to_it)
    try:
        with pytest.raises(ValueError, match="changed while they were loaded"):
            load_model(loading(tmp_path), DECODE)
    finally:
        on_startup_progress.reset(token)


def test_heads_of_a_drafter_are_no_mapping_of_their_file(tmp_path: Path) -> None:
    """A mapped file could be changed by another process, which would change or end a running
    rank."""
    config = tiny.write_tiny(tmp_path, seed=1)
    names = dict(torch.nn.Linear(4, 4).named_parameters())
    save_file({name: one.data for name, one in names.items()}, tmp_path / "heads.safetensors")
    tensors = read_tensors(tmp_path / "heads.safetensors")
    wanted = {name: one.clone() for name, one in tensors.items()}
    with torch.device("meta"):
        module = torch.nn.Linear(4, 4)
    with CheckpointFiles(tmp_path) as files:
        checkpoint = Checkpoint(files, config, torch.float32, torch.device("cpu"))
        load_parameters(module, tmp_path / "heads.safetensors", tensors, checkpoint)
    size = (tmp_path / "heads.safetensors").stat().st_size
    with (tmp_path / "heads.safetensors").open("r+b") as file:
        file.write(bytes(size))
    for name, one in module.named_parameters():
        assert torch.equal(one, wanted[name])
