"""Whole answers with the kernels for GPUs, interpreted (TRITON_INTERPRET=1): the tokens of
transformers, whatever the number of drafts, and in batches with ends and beginnings."""

from pathlib import Path

import pytest
import torch

from benchmarks.driven import tiny
from benchmarks.driven.engines import Bench, greedy, load
from model.kernels.base import Eager, Function, Kernels, Repeated
from tests.kernels import IS_INTERPRETED

if not IS_INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from model.kernels.gpu.kernels import Triton

    class Here(Triton):
        """Without graphs."""

        makes_ahead = False

        def repeated(self, function: Function) -> Repeated:
            return Eager(function)

    def create(name: str, config: object, device: torch.device) -> Kernels:
        return Here(num_processors=2)

    monkeypatch.setattr("model.loaded.create_kernels", create)
    tiny.write_tiny(tmp_path, seed=31)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_answers_are_those_of_transformers(folder: Path, num_drafts: int) -> None:
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
        assert tokens == tiny.reference_greedy(folder, ids, num)
    bench.check_empty()
