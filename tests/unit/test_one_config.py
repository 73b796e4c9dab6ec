"""A cluster has one config and one tokenizer. A process with another one is rejected."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.control.controller import Controller
from tandem.cluster.control.launch import check_tokenizer
from tandem.cluster.control.members import RayMembers
from tandem.cluster.control.restart_policy import RestartHistory
from tandem.core.config import TINY_MODEL, TandemConfig, load
from tandem.core.config_shared import shared_digest
from tandem.core.info import DECODE
from tandem.core.membership import DOWN, Gang, Membership
from tandem.core.schema import encode_failure, pack
from tandem.text.tokenizer import Tokenizer, tokenizer_digest
from tests.unit.test_membership import INFO

MINE = load(None, [])
OTHER = load(None, ["decode.max_num_seqs=3", "model.max_model_len=64"])
DEAD = Gang("decode-0", DECODE, 4, DOWN, is_given_up=True, num_deaths=3)


class FakeController:
    """Responds like the actor: with the snapshot of ``config``, and only to its own gateways."""

    def __init__(self, config: TandemConfig, *gangs: Gang) -> None:
        self.data = pack(Membership((1, 7), gangs, shared_digest(config)))
        self.membership = SimpleNamespace(remote=self._membership)
        self.attach = SimpleNamespace(remote=self._attach)

    async def _membership(self, *_: Any) -> bytes:
        return self.data

    async def _attach(self, config_json: str) -> bytes:
        return encode_failure(ValueError("config: decode.max_num_seqs is 16, but 3 in the cluster"))


def test_settings_of_a_gateway_alone_are_no_part_of_the_digest() -> None:
    assert shared_digest(load(None, ["server.max_queued=7"])) == shared_digest(MINE)
    assert shared_digest(load(None, ["decode.max_num_seqs=3"])) != shared_digest(MINE)
    assert shared_digest(load(None, ["model.path=/elsewhere"])) != shared_digest(MINE)


async def test_a_gateway_stops_following_a_cluster_of_another_config(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller = FakeController(OTHER, DEAD)
    members = RayMembers(MINE, controller, Membership((1, 6), (DEAD,), shared_digest(MINE)))
    now = await members.wait_for_change((1, 6))
    assert now.version == (1, 7) and now.gangs == ()
    assert "decode.max_num_seqs is 16, but 3 in the cluster" in caplog.text


async def test_a_gateway_follows_a_cluster_of_its_own_config() -> None:
    controller = FakeController(MINE, DEAD)
    members = RayMembers(MINE, controller, Membership((1, 6), (), shared_digest(MINE)))
    assert (await members.wait_for_change((1, 6))).gangs == (DEAD,)


async def test_another_config_is_refused_although_every_gang_is_down() -> None:
    """Another config is refused even if every gang is down. A gateway of the first config may still
    run, and would serve the other model's tokens."""
    controller = Controller()
    controller._config = MINE
    controller._snapshot = Membership((1, 1), (DEAD,))
    controller._gangs = {"decode-0": SimpleNamespace(history=RestartHistory(has_served=True))}  # type: ignore[dict-item]
    with pytest.raises(
        ValueError, match=r"decode\.max_num_seqs is 3, but 16 in the cluster.*tandem stop"
    ):
        await controller._attach(OTHER)
    assert controller._config is MINE


def test_a_controller_whose_first_call_fails_is_there_all_the_same() -> None:
    """The call cannot be made outside of Ray. Ray does not restart an actor whose creation
    failed."""
    assert Controller()._epochs.seen == (0, 0)


def tokenizer_folder(folder: Path, **config: object) -> Path:
    shutil.copy(TINY_MODEL / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_server_of_another_tokenizer_than_the_ranks_is_refused(tmp_path: Path) -> None:
    """A link to the checkpoint moved before this server started, while the ranks kept the old
    one."""
    now = tokenizer_folder(tmp_path, bos_token="<think>", add_bos_token=True)
    before = Tokenizer(TINY_MODEL)
    rank = replace(INFO, tokenizer=before.digest)
    assert tokenizer_digest(TINY_MODEL) == before.digest
    check_tokenizer(before, [rank, replace(INFO, tokenizer="")])
    both = rf"{Tokenizer(now).digest}.*{before.digest}.*tandem stop"
    with pytest.raises(ValueError, match=both):
        check_tokenizer(Tokenizer(now), [rank])


def test_a_folder_without_a_tokenizer_has_no_digest_of_one(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == ""
