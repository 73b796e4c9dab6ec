"""EAGLE-1, EAGLE-2 and EAGLE-3 as drafters of chains, or of trees if ``speculation.max_tree_nodes``
is set."""

import re
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from tandem.core.config import SpeculationConfig
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.eagle_config import CONFIG, RawEagleConfig, read_config
from tandem.model.drafters.eagle_layer import Eagle3Layer, EagleLayer
from tandem.model.drafters.files import files_digest, find_file, load_parameters, read_tensors
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.mtp_tree import MtpTreeDrafter
from tandem.model.network.batch import Batch
from tandem.model.network.cache import CacheGroup
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.layers import Rope

WEIGHTS = "model.safetensors", "pytorch_model.bin"
EAGLE = "eagle"
_LAYER = re.compile(r"^(model\.)?(layers\.0\.)?")
_OUTPUT_PREFIXES = "midlayer.mlp.", "lm_head."
"""Name prefixes of tensors that a rank does not need if it never drafts."""


class EagleDrafter(MtpDrafter):
    """An EAGLE head that runs in the passes of ``MtpDrafter`` and keeps the same state per row.
    Each row of a pass pairs a token with the features of the token before it."""

    group = name = EAGLE
    layer_class: type[EagleLayer] = EagleLayer

    def __init__(self, network: DeepseekV3, layer: EagleLayer, identity: str = "") -> None:
        super().__init__(network, layer)  # type: ignore[arg-type]
        config = layer.config
        self.uses_collectives = False
        self.identity = identity
        self._head = layer
        self.taps = config.taps
        self.num_features = max(1, len(config.taps)) * config.model.hidden_size
        self.cache_groups = (CacheGroup(EAGLE, 1, config.width, lag=1),)
        self._rope = Rope(config.model).to(network.rope.cos_TR.device)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> Self:
        """Load the head from ``speculation.draft_model_path``.

        Raises ValueError if that folder has no head for this model.
        """
        if spec_config.draft_model_path is None:
            raise ValueError(
                f"speculation.draft_model_path: is null; name the folder of the {cls.name} head"
            )
        config = read_config(
            spec_config.draft_model_path,
            checkpoint.files.path,
            has_taps=issubclass(cls.layer_class, Eagle3Layer),
            ignored=checkpoint.ignored_keys,
        )
        file = find_file(spec_config.draft_model_path, WEIGHTS)
        tensors = {_author_name(name): tensor for name, tensor in read_tensors(file).items()}
        d2t_U = tensors.pop("d2t", None)
        t2d_V = tensors.pop("t2d", None)
        with torch.device("meta"):
            layer = cls.layer_class(config, set(tensors))
        if not checkpoint.may_draft:
            layer.midlayer.mlp = None
            layer.lm_head = None
            tensors = {
                n: tensor for n, tensor in tensors.items() if not n.startswith(_OUTPUT_PREFIXES)
            }
        load_parameters(module=layer, file=file, tensors=tensors, checkpoint=checkpoint)
        if config.raw_config.num_outputs != config.raw_config.vocab_size:
            layer.column_V = logit_columns(
                file=file, d2t_U=d2t_U, t2d_V=t2d_V, raw_config=config.raw_config
            ).to(checkpoint.device)
        return cls(
            network,
            layer.eval(),
            f"{cls.name} {files_digest(spec_config.draft_model_path / CONFIG, file)}",
        )

    def _embedded(self, batch: Batch) -> Tensor:
        if self._head.embed_tokens is None:
            return super()._embedded(batch)
        embedding_XD: Tensor = self._head.embed_tokens(batch.token_ids_BQ.flatten())
        return embedding_XD

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._head.logits(hidden.flatten(0, -2), self._network.lm_head)
        return logits.unflatten(0, hidden.shape[:-1])


class Eagle3Drafter(EagleDrafter):
    """An EAGLE-3 head (arXiv 2503.01840) that drafts chains."""

    name = "eagle3"
    layer_class = Eagle3Layer


class EagleTreeDrafter(MtpTreeDrafter, EagleDrafter):
    """An EAGLE-1 head that drafts trees, which is EAGLE-2 (arXiv 2406.16858)."""


class Eagle3TreeDrafter(MtpTreeDrafter, Eagle3Drafter):
    """An EAGLE-3 head that drafts trees as EAGLE-2 does."""


def logit_columns(
    file: Path, d2t_U: Tensor | None, t2d_V: Tensor | None, raw_config: RawEagleConfig
) -> Tensor:
    """Return, for each token of the vocabulary, its index among the head's U outputs. The index is
    U for tokens that the head cannot predict.

    Output i predicts token ``i + d2t_U[i]``. ``t2d_V`` is True for tokens with an output. Raises
    ValueError if ``d2t_U`` has the wrong length, names a token outside the vocabulary or
    contradicts ``t2d_V``.
    """
    num = 0 if d2t_U is None else len(d2t_U)
    num_outputs = raw_config.num_outputs
    vocab_size = raw_config.vocab_size
    if d2t_U is None or num != num_outputs:
        raise ValueError(
            f"{file}: d2t has {num} entries, but draft_vocab_size = {num_outputs}; "
            "download it again"
        )
    ids_U = torch.arange(num) + d2t_U
    wrong = ((ids_U < 0) | (ids_U >= vocab_size)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"{file}: d2t[{wrong[0]}] maps to token {int(ids_U[wrong[0]])}, but this model "
            f"has {vocab_size} tokens; use a head that was trained for it"
        )
    if t2d_V is not None and not torch.equal(t2d_V.bool().nonzero().flatten(), ids_U):
        raise ValueError(f"{file}: t2d and d2t contradict each other; download it again")
    return torch.full((vocab_size,), num_outputs).index_copy(0, ids_U, torch.arange(num_outputs))


def _author_name(name: str) -> str:
    """Translate a tensor's name to the name that the authors of EAGLE-3 use."""
    name = _LAYER.sub(lambda match: "midlayer." if match[2] else "", name)
    return name.replace("fc.bias", "fc_bias")
