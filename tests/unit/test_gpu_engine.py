"""Whole answers with the GPU kernels, interpreted (TRITON_INTERPRET=1): they equal transformers'
tokens for any number of drafts, in batches where rows start and end."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.harness import tiny
from benchmarks.harness.blocks import quantise
from benchmarks.harness.engines import Bench, greedy, load
from tandem.model.checkpoint.files import dequantise
from tandem.model.kernels.base import BLOCK, Kernels
from tandem.model.kernels.replayable import Eager, Function, ReplayableFunction
from tandem.model.network.cache import MAIN
from tests.kernels import IS_INTERPRETED

if not IS_INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from tandem.model.kernels.gpu.kernels import TritonKernels

    class Here(TritonKernels):
        """GPU kernels without CUDA graphs."""

        exec_mode, owns_outputs = "eager", False

        def make_replayable(self, function: Function) -> ReplayableFunction:
            return Eager(function)

    def create(*asked: object, quantises: bool) -> Kernels:
        return Here(num_processors=2)

    monkeypatch.setattr("tandem.model.loaded.create_kernels", create)
    tiny.write_tiny(tmp_path, seed=31)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_answers_are_those_of_transformers(folder: Path, num_drafts: int) -> None:
    check(folder, folder, num_drafts)


@pytest.mark.slow
def test_answers_of_a_checkpoint_in_fp8_are_those_of_its_dequantised_copy(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain, stored = tmp_path_factory.mktemp("plain"), {}
    of_plain = load_file(folder / "model.safetensors")
    for name, tensor in list(of_plain.items()):
        stored[name] = tensor
        if "proj.weight" in name or "proj_with_mqa.weight" in name:
            values, scales = stored[name], stored[name + "_scale_inv"] = quantise(tensor, BLOCK)
            of_plain[name] = dequantise(values, scales, (BLOCK, BLOCK))
    save_file(stored, folder / "model.safetensors")
    shutil.copy(folder / "config.json", plain)
    save_file(of_plain, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    check(folder, plain, num_drafts=3)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_answers_that_meet_no_numbers_end_alone(
    folder: Path, num_drafts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """NaNs are in an embedding row that one prompt reads, and in a page of another row."""
    clean, asked = tmp_path_factory.mktemp("clean"), [[5, 9, 31], [7, 60, 61, 8], [4, 44]]
    shutil.copytree(folder, clean, dirs_exist_ok=True)
    wanted = [tiny.reference_greedy(clean, ids, 5) for ids in asked]
    tensors = load_file(folder / "model.safetensors")
    read = next(i for i in range(96) if i not in [*sum(wanted, []), *sum(asked, [])])
    tensors["model.embed_tokens.weight"][read] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    bench = Bench(load(folder), num_drafts=num_drafts, max_rows=4, page_size=4)
    requests = [greedy(f"r{i}", ids, 5, ignore_eos=True) for i, ids in enumerate(asked)]
    broken = greedy("broken", [3, read, 5], 5)
    answers = bench.generate(*requests, broken)
    assert answers == [*((tokens, "length") for tokens in wanted), ([], "NonFiniteLogits")]
    bench.frames.clear()
    bench.start_all(*requests)
    bench.caches[MAIN][1][bench.sequence("r1").pages[0], 1, 3] = float("nan")
    while bench.decode.has_work():
        bench.decode.step()
    ends = {one.identity.request_id: one for one in bench.updates()}
    assert ends["r1"].failure is not None and ends["r1"].failure.kind == "NonFiniteLogits"
    for name, tokens in (("r0", wanted[0]), ("r2", wanted[2])):
        own = [one.token_ids for one in bench.updates() if one.identity.request_id == name]
        assert [*sum(own, ())] == tokens[1:]
    bench.check_empty()


def check(folder: Path, reference: Path, num_drafts: int) -> None:
    """Check the answers in batches where rows start and end."""
    loaded = load(folder)
    assert loaded.kernels.name == "triton"
    bench = Bench(loaded, num_drafts=num_drafts, max_rows=3)
    prompts = [list(range(5, 5 + num)) for num in (9, 3, 14)]
    asked = [
        greedy(f"r{i}", ids, num, ignore_eos=True)
        for i, (ids, num) in enumerate(zip(prompts, (5, 9, 3), strict=True))
    ]
    for (tokens, _), request in zip(bench.generate(*asked), asked, strict=True):
        ids, num = list(request.prompt_ids), request.sampling.max_tokens
        assert tokens == tiny.reference_greedy(reference, ids, num)
    bench.check_empty()
