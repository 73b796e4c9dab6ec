"""The config tree: defaults, YAML, overrides, and errors that name valid values."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tandem.cluster.control.launch import with_absolute_paths
from tandem.core.config import TINY_MODEL, TandemConfig, describe_keys, iter_keys, load
from tandem.core.config_shared import parse_shared_config


def test_defaults_are_the_documented_ones() -> None:
    config = load()
    assert config == TandemConfig()
    assert config.mode == "disaggregated"
    assert config.model.path == TINY_MODEL
    assert config.speculation.max_depth == 3
    assert (config.prefill.max_num_batched_tokens, config.decode.max_num_seqs) == (2048, 16)
    assert (config.kv.page_size, config.kv.num_pages) == (64, None)
    assert config.kv_transfer.staging_bytes == 256 << 20
    assert config.server.address == "127.0.0.1:50051"


def test_overrides_win_over_the_file_in_order(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("mode: colocated\ndecode: {max_num_seqs: 4}\nmodel:\n  path: /models/v3\n")
    config = load(file, ["decode.max_num_seqs=8", "kv.num_pages=100", "decode.max_num_seqs=9"])
    assert config.mode == "colocated"
    assert config.model.path == Path("/models/v3")
    assert (config.decode.max_num_seqs, config.kv.num_pages) == (9, 100)
    assert load(None, ["kv.num_pages=null", "kv_transfer.lease_s=5"]).kv_transfer.lease_s == 5.0


def test_a_section_can_be_set_as_a_whole_or_left_empty(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("decode:\n")
    assert load(file, ["decode.max_num_seqs=3"]).decode.max_num_seqs == 3
    assert load(None, ["decode={max_num_seqs: 2, num_threads: 2}"]).decode.num_threads == 2
    file.write_text("")
    assert load(file) == TandemConfig()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            "decode.max_num_seq=3",
            "unknown key 'decode.max_num_seq'; did you mean 'decode.max_num_seqs'?",
        ),
        ("max_num_seqs=3", "did you mean 'decode.max_num_seqs'?"),
        ("decod.max_num_seqs=3", "unknown key 'decod'; did you mean 'decode'?"),
        ("zzzz=3", "sections are"),
        ("decode.max_num_seqs=x", "decode.max_num_seqs='x': input should be a valid integer"),
        ("decode.max_num_seqs=true", "decode.max_num_seqs=True: input should be a valid integer"),
        ("decode.max_num_seqs=0", "greater than or equal to 1"),
        ("speculation.max_depth=9", "speculation.max_depth=9: input should be less than"),
        ("mode=both", "mode='both': input should be 'disaggregated' or 'colocated'"),
        ("decode=3", "decode=3: a section of keys is expected"),
        ("mode.x=3", "mode={'x': 3}"),
        ("decode.max_num_seqs", "write it as key=value"),
        (".a=1", "write it as key=value"),
        ("decode.max_num_seqs=[", "the value is not YAML"),
        ("decode.dp_size=0", "decode.dp_size=0"),
        ("prefill.num_redundant_experts=4", "needs several ranks, got prefill.dp_size=1; set"),
        ("server.address=here", "server.address='here': write HOST:PORT"),
        ("server.address=h:65536", "write HOST:PORT"),
        ("server.address=''", "server.address='': write HOST:PORT"),
        ("server.http_address=''", "server.http_address='': write HOST:PORT"),
        ("kv_transfer.backend=nccl", "kv_transfer.backend='nccl' needs prefill.device"),
        ("kv_transfer.lease_s=0", "kv_transfer.lease_s=0: input should be greater than 0"),
        ("kv.num_pages=1", "kv.num_pages=1"),
        ("model.think_tokens=x", "model.think_tokens='x': give the two texts"),
        ("model.think_tokens=[a]", "model.think_tokens=['a']: give the two texts"),
        ("model.think_tokens=[a, 3]", "model.think_tokens=['a', 3]: give the two texts"),
        ("model.think_tokens=[a, a]", "model.think_tokens=['a', 'a']: use two different texts"),
    ],
)
def test_a_wrong_override_is_refused_with_the_remedy(item: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        load(None, [item])
    assert message in str(error.value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ValueError) as error:
        load(None, ["decode.max_num_seq=3", "kv.page_size=big"])
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "must hold a mapping"),
        ("1: 2\n", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("decode: {max_num_seqs: 1, max_num_seqs: 2}\n", "'max_num_seqs' occurs twice"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="c.yaml") as error:
        load(file)
    assert message in str(error.value)


def test_a_colocated_node_is_one_rank() -> None:
    with pytest.raises(ValueError, match=r"mode='colocated' has one rank per node.*dp_size=2; set"):
        load(None, ["mode=colocated", "decode.dp_size=2"])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")


def test_sections_are_frozen_and_survive_json() -> None:
    config = load(None, ["decode.max_num_seqs=5", "model.think_tokens=[<a>, </a>]"])
    assert config.model.think_tokens == ("<a>", "</a>")
    with pytest.raises(ValidationError):
        config.decode.max_num_seqs = 6
    assert TandemConfig.model_validate_json(config.model_dump_json()) == config


def test_what_another_release_sends_is_refused_by_name() -> None:
    config = load(None, ["model.think_tokens=[<a>, </a>]", "model.path=/x"])
    assert parse_shared_config(config.model_dump_json()) == config
    sent = config.model_dump_json().replace('"stop_timeout_s"', '"parting_s"')
    with pytest.raises(ValueError, match=r"another release .*'control\.parting_s'.*`tandem stop`"):
        parse_shared_config(sent)


def test_help_names_every_key_with_a_meaning() -> None:
    assert all(field.description for _, field in iter_keys())
    assert [line.split()[0] for line in describe_keys().splitlines()] == [
        name for name, _ in iter_keys()
    ]


def test_the_description_is_in_words_of_yaml() -> None:
    """Each default is valid YAML for its key, and no type is a name of Python."""
    words = {"int", "float", "bool", "str", "path", "null"}
    for name, field in iter_keys():
        line = next(line for line in describe_keys().splitlines() if line.split()[0] == name)
        default, _, told = line.removeprefix(name).strip().partition(" (")
        if not isinstance(field.default, Path):
            value = list(field.default) if isinstance(field.default, tuple) else field.default
            assert yaml.safe_load(default) == value, line
        assert not re.search("True|False|None", default), line
        choices = set(re.findall(r"\w+", told.partition(")")[0]))
        assert choices <= words or field.default in choices, line


@pytest.mark.parametrize(
    "module", ["tandem.core.config", "tandem.cluster.client.client", "tandem.cluster.cli"]
)
def test_the_edge_imports_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'ray', 'numpy'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_paths_mean_the_same_wherever_ranks_run() -> None:
    config = load(
        None, ["speculation.draft_model_path=heads", "speculation.medusa_choices=/a/b.json"]
    )
    told = with_absolute_paths(config)
    asked = told.speculation
    assert (asked.draft_model_path, asked.medusa_choices) == (
        Path("heads").absolute(),
        Path("/a/b.json"),
    )
    assert asked.max_depth == config.speculation.max_depth and told.model == config.model
    assert (told.mode, told.decode) == (config.mode, config.decode)
