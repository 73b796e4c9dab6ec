"""The worked MTP example (tests/data/mtp_tables.json): every row that a pass reads or writes.

The real engine code runs over a network that only records its calls. Hidden states are one-hot tags
that name their token, so each row can be compared with the table by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.core.config import PrefillConfig, TandemConfig
from tandem.core.draft_shapes import chain_shapes
from tandem.core.identity import Identity
from tandem.core.info import PREFILL
from tandem.core.membership import RankSpec
from tandem.core.request import Request, SamplingParams
from tandem.decode_node.planning.states import RequestLimits, RequestSize, RunningSequence
from tandem.decode_node.planning.step_plan import StepKey
from tandem.decode_node.program.rows import Rows
from tandem.decode_node.program.step import StepShape, decode_step, verify_slots
from tandem.kv_transfer.pages import PagePool
from tandem.model.drafters.base import DraftContext
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.mtp_rows import MtpRows, first_pass_batch, later_slots
from tandem.model.kernels.base import TORCH_KERNELS
from tandem.model.network.batch import Batch
from tandem.model.network.cache import MAIN, MTP
from tandem.model.network.dispatch.base import Dispatch
from tandem.prefill_node.engine import ChunkResult, PrefillEngine
from tandem.runtime.engine_loop import EngineLoop
from tandem.runtime.parts import RankParts

TABLES = json.loads((Path(__file__).parents[1] / "data" / "mtp_tables.json").read_text())
CASES = {f"{c['name']}-{c.get('mode', '')[:14].strip(' ,')}": c for c in TABLES["cases"]}
PAGE_SIZE, NUM_WIDTH, NUM_VOCAB = 4, 128, 64
PAGES = [7, 3, 5]


def token_id(name: str) -> int:
    return 0 if name == "0" else ord(name.lower()) - 96 + (32 if name.islower() else 0)


def token_name(number: int) -> str:
    return "0" if number == 0 else chr(number + 64) if number < 32 else chr(number - 32 + 96)


def tag(name: str) -> torch.Tensor:
    """Return the one-hot tag of a hidden state: 'D', 'mtp(E)' or '0'."""
    vector = torch.zeros(NUM_WIDTH)
    if name != "0":
        mtp = name.startswith("mtp(")
        vector[token_id(name[4:-1] if mtp else name) + (NUM_VOCAB if mtp else 0)] = 1
    return vector


def tag_name(vector: torch.Tensor) -> str:
    if not vector.any():
        return "0"
    index = int(vector.argmax())
    mtp = index >= NUM_VOCAB
    return f"mtp({token_name(index - NUM_VOCAB)})" if mtp else token_name(index)


def physical(slot: int | str) -> int | str:
    return "dummy" if slot == "dummy" else PAGES[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE


@dataclass
class Pass:
    """Token names and hidden states [Q, D] that went through the MTP layer or into its cache."""

    batch: Batch
    names: list[str]
    hidden: torch.Tensor


class Recorder:
    """Replaces the network and the MTP layer. Records every pass and returns scripted tokens."""

    config = SimpleNamespace(latent_dim=4, eos_token_ids=(), hidden_size=NUM_WIDTH)
    dispatch = Dispatch(1)
    model = SimpleNamespace(embed_tokens=lambda ids: ids)
    rope = SimpleNamespace(at=lambda positions: (positions, positions))

    def __init__(self, draft_tokens: list[str], target_tokens: list[str]) -> None:
        self.written: list[Pass] = []
        self.predicted: list[Pass] = []
        self.main_passes: list[Batch] = []
        self._draft_tokens = iter(draft_tokens)
        self._target_tokens = target_tokens

    def __call__(self, batch: Batch, caches: object) -> torch.Tensor:
        self.main_passes.append(batch)
        return torch.stack([tag(token_name(int(t))) for t in batch.token_ids_BQ[0]]).unsqueeze(0)

    def forward_with_taps(
        self, batch: Batch, caches: object, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self(batch, caches)
        return hidden, hidden

    def project_inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Concatenate like the MTP layer; the embedding of a token is its id."""
        return torch.cat((hidden, tokens.unsqueeze(1).float()), 1)

    def write_cache(self, z_XD: torch.Tensor, batch: Batch, cache: object, angles: object) -> None:
        self.written.append(self._pass(z_XD, batch))
        tokens = [token_name(int(t)) for t in batch.token_ids_BQ.flatten()]
        assert self.written[-1].names == tokens

    def predict(
        self, z_XD: torch.Tensor, batch: Batch, cache: object, angles: object
    ) -> torch.Tensor:
        self.predicted.append(self._pass(z_XD, batch))
        return torch.stack([tag(f"mtp({name})") for name in self.predicted[-1].names])

    def _pass(self, z: torch.Tensor, batch: Batch) -> Pass:
        return Pass(batch, [token_name(int(t)) for t in z[:, -1]], z[:, :-1])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return torch.zeros(0, NUM_VOCAB)
        if hidden.dim() == 2 and tag_name(hidden[0]).startswith("mtp("):
            return one_hot([next(self._draft_tokens)])
        if hidden.dim() == 2:
            return one_hot(self._target_tokens[-1:])
        return one_hot(self._target_tokens).unsqueeze(0)


def one_hot(names: list[str]) -> torch.Tensor:
    rows = torch.zeros(len(names), NUM_VOCAB)
    rows[torch.arange(len(names)), torch.tensor([token_id(n) for n in names])] = 1
    return rows


def caches() -> dict[str, list[torch.Tensor]]:
    return {MAIN: [torch.zeros(9, PAGE_SIZE, 4)], MTP: [torch.zeros(9, PAGE_SIZE, 4)]}


def write_slots(batch: Batch) -> list[int | str]:
    return ["dummy" if s < PAGE_SIZE else s for s in batch.write_slots_BQ[0].tolist()]


def run_case(case: dict, first: bool = False) -> tuple[Recorder, object]:
    """Run one decode step from the state that the case describes."""
    drafts = [d if len(d) == 1 else "z" for d in (p["output_token"] for p in case["mtp"])]
    network = Recorder(drafts, case["target"].get("output_token", ["x"] * 3))
    loaded = SimpleNamespace(
        kernels=TORCH_KERNELS,
        config=SimpleNamespace(hidden_size=NUM_WIDTH, vocab_size=NUM_VOCAB),
        dtype=torch.float32,
        device=torch.device("cpu"),
        think_ids=None,
        max_model_len=64,
        network=network,
        drafter=MtpDrafter(network, network),
    )
    rows = Rows(loaded, 1, 2, PagePool(1 + max(PAGES), PAGE_SIZE), len(PAGES))
    emitted = case.get("previous_emitted", ["E"])
    hidden = case.get("previous_saved_hidden", ["0"] if first else ["D"])
    request = Request("r", (0,) * (case["L"] - 1), sampling=SamplingParams(seed=0))
    limits = RequestLimits(RequestSize(case["L"] - 1, 0, 9), len(PAGES), 9)
    running = RunningSequence(Identity("r"), 0, PAGES, limits, 1, request, frozenset(), 2, 2)
    rows.add_row(running, token_id(emitted[-1]), None)
    chosen = rows.select(torch.tensor([0]), len(PAGES))
    own = chosen.state.drafter
    for i, (token, name) in enumerate(zip(emitted, hidden, strict=True)):
        own.tokens_BM[0, i] = token_id(token)
        own.hidden_BMD[0, i] = tag(name)
    own.num_pending_B[0] = len(emitted)
    own.is_first_unknown_B[0] = first
    key, shape = StepKey(1, 2, 3), StepShape(chain_shapes(2)[2], None)
    return network, decode_step(loaded, caches(), chosen, key, shape)


def check_row(found: Pass, i: int, row: dict) -> None:
    assert found.names[i] == (row["token"] if len(row["token"]) == 1 else "z")
    if len(row["hidden"]) < 7:
        assert tag_name(found.hidden[i]) == row["hidden"]
    assert int(found.batch.positions_BQ[0, i]) == row["position"]
    assert int(found.batch.context_lens_BQ[0, i]) == row["slot"] + 1


def check_first(written: Pass, head: Pass, expected: dict) -> None:
    """Check the first pass, in which all rows are written and one goes through the layer."""
    assert len(written.names) == 3 and len(head.names) == 1
    at = expected["head_index"]
    rows = expected.get("rows")
    for i, row in enumerate(rows or [expected["head"]], start=0 if rows else at):
        check_row(written, i, row)
    check_row(head, 0, rows[at] if rows else expected["head"])
    wanted = [physical(s) for s in expected["write_slots"]]
    assert write_slots(written.batch) == wanted
    assert write_slots(head.batch) == wanted[at : at + 1]


def check_later(found: Pass, expected: dict) -> None:
    [row] = expected.get("rows") or [expected["head"]]
    check_row(found, 0, row)
    wanted = [physical(s) for s in expected["write_slots"] if s != "dummy"]
    assert write_slots(found.batch) == wanted and len(found.names) == 1


@pytest.mark.parametrize("name", [name for name in CASES if "decode" in name])
def test_decode_rows(name: str) -> None:
    case = CASES[name]
    network, output = run_case(case, first="zero_hidden" in case.get("mode", "")[15:])
    [written], [head, later], [first_told, later_told] = (
        network.written,
        network.predicted,
        case["mtp"],
    )
    check_first(written, head, first_told)
    check_later(later, later_told)
    target, [batch] = case["target"], network.main_passes
    drafts = [d if len(d) == 1 else "z" for d in target["input_ids"]]
    assert [token_name(t) for t in batch.token_ids_BQ[0].tolist()] == drafts
    assert batch.positions_BQ[0].tolist() == target["positions"]
    assert write_slots(batch) == [physical(s) for s in target["slots"]]
    assert int(batch.context_lens_BQ[0, -1]) == target["context_length"]
    assert batch.context_lens_BQ[0].tolist() == [slot + 1 for slot in target["slots"]]
    if "emitted" in case:
        check_commit(case, output)


def check_commit(case: dict, output: object) -> None:
    rows, num_emitted = output.state.drafter, len(case["emitted"])
    assert int(rows.num_pending_B[0]) == num_emitted
    assert int(output.state.num_known_B[0]) == case["L"] + num_emitted
    emitted = [token_name(t) for t in rows.tokens_BM[0, :num_emitted].tolist()]
    assert emitted == case["emitted"]
    saved = [tag_name(h) for h in rows.hidden_BMD[0, :num_emitted]]
    assert saved == case["saved_hidden"]
    assert not rows.is_first_unknown_B.any()


def test_there_are_both_first_steps() -> None:
    modes = [c["mode"] for c in TABLES["cases"] if c["name"] == "first_decode"]
    assert len(modes) == 2 and "zero_hidden" in modes[1]


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 64])
def test_prefill_rows(max_batch_tokens: int) -> None:
    [case] = [c for c in TABLES["cases"] if c["name"] == "prefill"]
    network = Recorder([], case["target"]["output_token"])
    progress: list[ChunkResult] = []
    loaded = SimpleNamespace(
        kernels=TORCH_KERNELS,
        network=network,
        drafter=MtpDrafter(network, network),
        dispatch=Dispatch(1),
        lag=1,
        device=torch.device("cpu"),
    )
    pool = PagePool(9, PAGE_SIZE)
    config = TandemConfig(prefill=PrefillConfig(max_num_batched_tokens=max_batch_tokens))
    spec, loop = RankSpec("p", PREFILL, 1), EngineLoop("never started")
    parts = RankParts(spec, config, loaded, pool, caches(), loop)
    engine = PrefillEngine(parts, progress.append, lambda *failed: None)
    prompt = tuple(token_id(t) for t in TABLES["prompt"])
    request = Request("r", prompt, sampling=SamplingParams(seed=0))
    sequence = engine.scheduler.admit(Identity(request.request_id), request)
    page = sequence.pages[0]
    while engine.has_work():
        engine.step()
    target, [mtp] = case["target"], case["mtp"]
    base = page * PAGE_SIZE
    assert joined(network.main_passes, "token_ids_BQ") == [token_id(t) for t in prompt_names()]
    assert joined(network.main_passes, "positions_BQ") == target["positions"]
    assert joined(network.main_passes, "write_slots_BQ") == [base + s for s in target["slots"]]
    assert not network.predicted, "nobody reads what the layer would make of a prompt"
    draft_batches = [one.batch for one in network.written]
    assert joined(draft_batches, "token_ids_BQ") == [token_id(t) for t in mtp["input_ids"]]
    assert joined(draft_batches, "positions_BQ") == mtp["positions"]
    assert joined(draft_batches, "write_slots_BQ") == [base + s for s in mtp["write_slots"]]
    assert joined(draft_batches, "context_lens_BQ") == [s + 1 for s in mtp["slots"]]
    hidden = [tag_name(h) for one in network.written for h in one.hidden]
    assert hidden == mtp["hidden"]
    assert token_name(progress[-1].first_token) == case["emitted"][0]
    assert [tag_name(progress[-1].features_F)] == case["saved_hidden"]
    engine.scheduler.drop(sequence.identity)
    engine.scheduler.check_integrity()
    assert pool.num_available == 8


def prompt_names() -> list[str]:
    return list(TABLES["prompt"])


def joined(batches: list[Batch], name: str) -> list[int]:
    return [value for batch in batches for value in getattr(batch, name)[0].tolist()]


def test_index_functions_mix_first_and_later_rows() -> None:
    """In a batch with different L and m, each row obeys the invariant of the tables."""
    num_known = torch.tensor([5, 6, 9])
    num_emitted = torch.tensor([1, 1, 3])
    first = torch.tensor([True, False, False])
    own = MtpRows(torch.zeros(3, 16), torch.zeros(3, 16, 1), num_emitted, first)
    pages, real = torch.tensor([PAGES] * 3), torch.tensor([True] * 3)
    where = torch.zeros(3, 1), num_known, pages, real, num_known, None
    context = DraftContext(
        *where, sample_draft=lambda *_: (torch.zeros(3), None), top_candidates=None
    )
    rows = first_pass_batch(own, context, 3, PAGE_SIZE)
    assert rows.positions_BQ.tolist() == [[4, 5, 6], [5, 6, 7], [6, 7, 8]]
    kept = rows.write_slots_BQ >= PAGE_SIZE
    assert kept.tolist() == [[False] * 3, [True, False, False], [True] * 3]
    assert rows.write_slots_BQ[kept].tolist() == [physical(slot) for slot in (4, 5, 6, 7)]
    assert rows.real_BQ is not None
    assert rows.real_BQ.tolist() == [[True, False, False]] * 2 + [[True] * 3]
    heads = rows.positions_BQ.gather(1, (num_emitted - 1).unsqueeze(1))
    assert heads.flatten().tolist() == [x - 1 for x in num_known.tolist()]
    for n, slots_B in enumerate(later_slots(num_known, 2), 2):
        assert slots_B.tolist() == [x - 3 + n for x in num_known.tolist()]
    assert verify_slots(num_known, 2).tolist() == [[4, 5, 6], [5, 6, 7], [8, 9, 10]]
