"""A drafter that is a smaller model of the same family (Leviathan et al., arXiv 2211.17192).

It has its own cache and needs nothing of the main model except its tokens.

Shape legend: B rows, A pending tokens that pass 1 catches up with, X rows of a pass, D hidden.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tandem.core.config import SpeculationConfig
from tandem.core.draft_shapes import DraftShape, DraftShapes
from tandem.core.json_file import read_json
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.files import CheckpointFiles
from tandem.model.checkpoint.weights import Checkpoint, load_network
from tandem.model.drafters.base import DraftContext
from tandem.model.drafters.files import files_digest
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.mtp_rows import MtpRows, first_pass_batch
from tandem.model.drafters.mtp_tree import MtpTreeDrafter
from tandem.model.kernels import check_widths
from tandem.model.kernels.base import Kernels, RopeCosSin
from tandem.model.network.batch import Batch
from tandem.model.network.cache import MAIN, CacheGroup, Caches
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.layers import process_weights_after_loading

NAME = "draft_model"
TOKENIZER = "tokenizer.json"
_IGNORED_SECTIONS = "truncation", "padding"


class ModelDrafter(MtpDrafter):
    """A draft model that runs in the passes of ``MtpDrafter`` and keeps the same state per row.

    Unlike in MTP, a cache entry depends on no later token, and pass 1 runs all layers. Every rank
    holds all experts of the draft model, so drafting needs no collectives.
    """

    group = name = NAME
    lag = 0

    def __init__(self, model: DeepseekV3, identity: str) -> None:
        config = model.config
        self._network = model
        self._rope = model.rope
        self.identity = identity
        self.cache_groups = (CacheGroup(NAME, config.num_hidden_layers, config.latent_dim),)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> Self:
        """Load the model from ``speculation.draft_model_path``.

        Raises ValueError if that folder has no model of this family with the main model's
        tokenizer.
        """
        if (path := spec_config.draft_model_path) is None:
            raise ValueError(
                "speculation.draft_model_path: is null; name the folder of the draft model"
            )
        try:
            config = ModelConfig.from_dir(path, checkpoint.ignored_keys)
        except ValueError as error:
            raise ValueError(f"speculation.draft_model_path={str(path)!r}: {error}") from None
        _check_tokens(path, config, checkpoint)
        with CheckpointFiles(path) as files:
            kind = checkpoint.dtype, checkpoint.device
            model = load_network(
                Checkpoint(files, config, *kind), Dispatch(config.n_routed_experts)
            )
            weights = sorted({files.path_of(name) for name in files.names()})
        return cls(model, f"{NAME} {files_digest(path / 'config.json', *weights)}")

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        """Prepare the weights for ``kernels``. Raises ValueError if these do not support the
        model."""
        try:
            check_widths(self._network.config, kernels.dim_multiple)
        except ValueError as error:
            raise ValueError(
                f"speculation.draft_model_path: does not fit the {kernels.name} kernels: {error}; "
                "use another draft model, or model.kernels=torch"
            ) from None
        process_weights_after_loading(self._network, kernels)

    def init_state(
        self, text: Sequence[int], features_F: Tensor, has_features: bool, max_depth: int
    ) -> MtpRows:
        """Create the state of one row. Features are ignored: the draft model's cache entries do not
        depend on them, so every prompt token already has its entry."""
        return super().init_state(
            text=text, features_F=features_F, has_features=True, max_depth=max_depth
        )

    def prefill(self, batch: Batch, next_GK: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        self.forward(batch, features_1TF, caches)

    def forward(
        self, batch: Batch, hidden_XD: Tensor, caches: Caches, angles: RopeCosSin | None = None
    ) -> Tensor:
        """Return the hidden states [X, D] that the output matrix reads. ``hidden_XD`` is
        ignored."""
        hidden_BQD: Tensor = self._network(batch, {MAIN: caches[NAME]})
        return hidden_BQD.flatten(0, 1)

    def _first_pass(
        self,
        state: MtpRows,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Tensor | None:
        if catch_up_width == 0:
            return None
        batch = first_pass_batch(
            state=state,
            context=context,
            width=catch_up_width,
            page_size=caches[NAME][0].shape[1],
            lag=self.lag,
        )
        hidden_XD = self.forward(batch, state.hidden_BMD, caches)
        at_B = torch.arange(len(state.tokens_BM), device=hidden_XD.device) * catch_up_width
        return hidden_XD[at_B + (state.num_pending_B - 1)] if draft_shape.depth else None


class ModelTreeDrafter(MtpTreeDrafter, ModelDrafter):
    """A draft model that drafts trees, by beam search over its predictions."""

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        """Return the shapes of ``MtpTreeDrafter`` with one more draft slot, because a token's entry
        lies one slot later than in MTP."""
        found = super().draft_shapes(max_depth)
        return tuple(replace(shape, num_draft_slots=shape.num_draft_slots + 1) for shape in found)


def _check_tokens(path: Path, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ValueError unless both models have the same tokenizer, so that token ids mean the same
    text."""
    if config.vocab_size != checkpoint.config.vocab_size:
        raise ValueError(
            f"speculation.draft_model_path={str(path)!r}: its vocabulary has {config.vocab_size} "
            f"tokens, the main model's {checkpoint.config.vocab_size}; use a draft model with "
            "the same tokenizer"
        )
    own, other = (_tokenizer(folder) for folder in (path, checkpoint.files.path))
    differ = [key for key in sorted({*own, *other}) if own.get(key) != other.get(key)]
    if differ:
        raise ValueError(
            f"speculation.draft_model_path={str(path)!r}: {TOKENIZER} differs from the model's in "
            f"{', '.join(differ)}; use a draft model with the same tokenizer"
        )


def _tokenizer(folder: Path) -> dict[str, Any]:
    tokenizer = read_json(folder / TOKENIZER)
    return {key: value for key, value in tokenizer.items() if key not in _IGNORED_SECTIONS}
