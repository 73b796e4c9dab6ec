"""Each mistake in config.json is either rejected by name or gives transformers' logits."""

import json
import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.harness import tiny
from benchmarks.harness.engines import load
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.config_keys import HARMLESS, HARMLESS_AS, HARMLESS_AT
from tandem.model.network.batch import Segment, pack_segments
from tests.config_fuzz import PUBLIC, Case, draw

NUM_TOKENS = 24
MAY_BE_UNREADABLE = HARMLESS | {*HARMLESS_AS} | {*HARMLESS_AT} | {"attention_bias", "mlp_bias"}
Json = dict[str, Any]


class Judge:
    """Compares the logits of Tandem and transformers. Results are cached by parsed config, because
    most mistakes leave the model as it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._user_drafter = folder / "theirs"
        self._user_drafter.mkdir()
        self._ours_by_config: dict[str, Tensor] = {}
        self._theirs_by_config: dict[str, Tensor] = {}
        self.num_refused = 0

    def check(self, case: Case) -> None:
        """Raise AssertionError unless the case is rejected by name or gives the same logits."""
        (self._folder / "config.json").write_text(case.text)
        try:
            config = ModelConfig.from_dir(self._folder)
        except ValueError as error:
            assert any(name in str(error) for name in case.names), f"{case.told}: {error}"
            self.num_refused += 1
            return
        try:
            theirs = self._theirs_of(json.loads(case.text), config, case.names & MAY_BE_UNREADABLE)
        except Exception as error:
            raise AssertionError(f"{case.told}: transformers: {error!r}") from error
        ours = self._ours_of(config)
        bound = rounding(config, theirs)
        error = (ours - theirs).abs().max().item()
        assert error <= bound, f"{case.told}: logits differ by {error:.3g}, bound {bound:.3g}"

    def _ours_of(self, config: ModelConfig) -> Tensor:
        key = repr(config)
        if key not in self._ours_by_config:
            save_file(tensors(config), self._folder / "model.safetensors")
            loaded = load(self._folder, "speculation.drafter=none", "model.kernels=torch")
            batch = pack_segments(
                [Segment(prompt(config), 0, [2])], NUM_TOKENS, torch.device("cpu")
            )
            with torch.inference_mode():
                hidden = loaded.network(batch, loaded.allocate_caches(3, NUM_TOKENS))
                self._ours_by_config[key] = loaded.network.logits(hidden)[0]
        return self._ours_by_config[key]

    def _theirs_of(self, raw: Json, config: ModelConfig, harmless: set[str]) -> Tensor:
        """Return transformers' logits. If it rejects the file, retry without the ``harmless``
        keys."""
        try:
            read = self._read(as_transformers_reads(raw))
        except (StrictDataclassFieldValidationError, TypeError):
            assert harmless
            kept = {name: value for name, value in raw.items() if name not in harmless}
            read = self._read(as_transformers_reads(kept))
        assert str(read.dtype or torch.bfloat16) == f"torch.{config.dtype}", config.dtype
        key = read.to_json_string(use_diff=False) + repr(sorted(shapes(config)))
        if key not in self._theirs_by_config:
            save_file(tensors(config), self._user_drafter / "model.safetensors")
            model, report = AutoModelForCausalLM.from_pretrained(
                self._user_drafter,
                dtype=torch.float32,
                experts_implementation="eager",
                output_loading_info=True,
            )
            # A matrix without elements is not stored in the file.
            report["missing_keys"] = {n for n in report["missing_keys"] if has_values(model, n)}
            assert not any(report.values()), report
            with torch.no_grad():
                logits = model.eval()(torch.tensor([prompt(config)])).logits[0]
            self._theirs_by_config[key] = logits
        return self._theirs_by_config[key]

    def _read(self, raw: Json) -> PretrainedConfig:
        (self._user_drafter / "config.json").write_text(json.dumps(raw))
        return AutoConfig.from_pretrained(self._user_drafter)


def as_transformers_reads(raw: Json) -> Json:
    """Return ``raw`` without what transformers cannot read.

    Nulls and quantization_config are removed, kimi_k2 becomes deepseek_v3, and a q_lora_rank of 0
    becomes null, as in DeepSeek's code.
    """

    def known(section: Json) -> Json:
        inner = {n: known(v) if isinstance(v, dict) else v for n, v in section.items()}
        return {name: value for name, value in inner.items() if value not in (None, {})}

    kept = known(raw) | {"q_lora_rank": raw.get("q_lora_rank") or None}
    kept.pop("quantization_config", None)
    return kept | {"model_type": raw["model_type"].replace("kimi_k2", "deepseek_v3")}


def shapes(config: ModelConfig) -> list[str]:
    return [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors(config).items()]


def has_values(model: torch.nn.Module, name: str) -> bool:
    return model.get_parameter(name).numel() > 0


@cache
def tensors(config: ModelConfig) -> dict[str, Tensor]:
    return tiny.random_tensors(config, seed=4, num_mtp_layers=0)


def prompt(config: ModelConfig) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    num = min(NUM_TOKENS, config.max_position_embeddings)
    return torch.randint(0, config.vocab_size, (num,), generator=generator).tolist()


def rounding(config: ModelConfig, logits: Tensor) -> float:
    """Return the bound on the difference of a logit between two orders of its fp32 sums.

    Errors of half a unit in the last place add up as a random walk over the terms of consecutive
    sums. The factor 8 is three times the largest value seen in 7,000 cases.
    """
    c = config
    widest = (
        c.hidden_size,
        c.kv_lora_rank,
        c.num_attention_heads * c.v_head_dim,
        c.intermediate_size,
    )
    length = c.hidden_size + c.num_hidden_layers * sum(widest)
    return 8 * 2**-24 * length**0.5 * logits.abs().max().item()


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return Judge(tmp_path)


@pytest.mark.parametrize("model", PUBLIC)
def test_public_configs_give_transformers_logits(model: str, judge: Judge) -> None:
    judge.check(Case(json.dumps(PUBLIC[model]), frozenset(), model))
    assert not judge.num_refused


@pytest.mark.parametrize(
    "num_cases", [300, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_mistakes_are_refused_by_name_or_give_transformers_logits(
    num_cases: int, judge: Judge
) -> None:
    """Set ``FUZZ_SEED`` to repeat the cases of an earlier run."""
    seed = int(os.environ.get("FUZZ_SEED") or (1 if num_cases <= 300 else secrets.randbits(32)))
    print(f"FUZZ_SEED={seed}")
    for number in range(num_cases):
        judge.check(draw(seed, number))
    assert num_cases / 4 < judge.num_refused < num_cases * 3 / 4
