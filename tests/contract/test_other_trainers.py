"""Our plug-ins inside other trainers, each in an environment of its own: a CPU is enough.

ROCKTOKENS_VERL_PYTHON and ROCKTOKENS_SWIFT_PYTHON name interpreters with verl 0.9.1 and ms-swift 4.6 and the packages
of our base install; our wheel is installed there without dependencies. ROCKTOKENS_TRAINERS_RESULTS is a file for what
was found.
"""

from __future__ import annotations

import json
import os
import sys
import types
from datetime import date
from pathlib import Path

import distilling
import dumps
import numpy as np
import pytest
import torch
import wheels

from rocktokens.bypass import FORMAT, VERSION, fingerprint
from rocktokens.interop.export import export
from rocktokens.interop.import_ import import_dump

LISTED = [dumps.COSTLY, 9]
PYTHONS = {name: os.environ.get(f"ROCKTOKENS_{name.upper()}_PYTHON") for name in ("verl", "swift")}
FOUND: dict[str, object] = {}


def needs(name: str) -> pytest.MarkDecorator:
    """Skip without the interpreter."""
    reason = f"ROCKTOKENS_{name.upper()}_PYTHON names no interpreter with {name}; set it to run this"
    return pytest.mark.skipif(PYTHONS[name] is None, reason=reason)


@pytest.fixture(scope="module", autouse=True)
def results():
    """Write what the tests found, if a file is named for it."""
    yield
    if FOUND and "ROCKTOKENS_TRAINERS_RESULTS" in os.environ:
        commit = wheels.run("git", "describe", "--always", "--dirty", cwd=wheels.ROOT).strip()
        about = {"what": __doc__.splitlines()[0], "command": "pytest tests/contract/test_other_trainers.py"}
        about |= {"commit": commit, "date": str(date.today())}
        text = json.dumps(about | FOUND, indent=1, ensure_ascii=False)
        Path(os.environ["ROCKTOKENS_TRAINERS_RESULTS"]).write_text(text + "\n")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return wheels.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A list for the tiny tokenizer, that tokenizer and another one."""
    home = tmp_path_factory.mktemp("lists")
    distilling.tokenizer().save_pretrained(home / "tokenizer")
    distilling.tokenizer((4, 3, *range(5, 64))).save_pretrained(home / "other")
    about = {"format": FORMAT, "version": VERSION, "tokenizer": {"fingerprint": mark()}}
    for name, ids in (("bypass", LISTED), ("empty", [])):
        (home / f"{name}.json").write_text(json.dumps(about | {"ids": ids, "tokens": [f"w{own}" for own in ids]}))
        export(home / f"{name}.json", "ms-swift", home / f"{'list' if ids else name}.py")
    export(home / "bypass.json", "verl", home / "list.json")
    return home


def mark() -> str:
    return fingerprint(distilling.tokenizer().get_vocab())


def findings(name: str, wheel: Path, folder: Path) -> dict:
    """What the script of a trainer printed in its own environment, with our wheel installed there."""
    python = Path(str(PYTHONS[name]))
    how = ("--python", python, "install", "--no-deps", "--force-reinstall", "--no-index", wheel)
    wheels.run(*wheels.PIP, *how, cwd=folder)
    script = {"verl": "verl_losses.py", "swift": "swift_loss.py"}[name]
    said = wheels.run(python, Path(__file__).with_name(script), folder, cwd=folder).splitlines()[-1]
    return json.loads(said.replace(f"{folder}/", ""))  # results name no path of this machine


def true_everywhere(cases) -> None:
    """Every comparison of every case holds."""
    assert cases
    assert not [(case, what) for case in cases for what, holds in case.items() if holds is False]


@needs("verl")
def test_verl_registers_the_plugin_and_its_losses_are_verls_own_but_for_the_list(wheel, folder, tmp_path):
    found = findings("verl", wheel, folder)
    assert found["registered"] == ["rocktokens_forward_kl_topk", "rocktokens_k1"]
    assert len(found["cases"]) == 8  # two losses, padded and nested, policy gradient and supervised
    true_everywhere(found["cases"])
    said = found["refused"]
    assert "another tokenizer" in said["another tokenizer"]
    assert "damaged" in said["broken"]
    assert "no bypass list" in said["missing"]
    assert "ROCKTOKENS_TELEMETRY_EVERY" in said["every"]
    record = {}
    for name in found["registered"]:
        run = import_dump("verl", [folder / name], str(folder / "tokenizer"), tmp_path / name)
        counted = "from occurrences where not isnan(log_ratio) group by 1"  # a tool's output has no cost
        costs = run.occurrences(f"select token_id, avg(log_ratio) as cost {counted} order by 2 desc")
        assert costs["token_id"][0].as_py() == dumps.COSTLY
        costly = [row["token_id"] for row in run.types().to_pylist() if row["class"] == "costly"]
        assert costly == [dumps.COSTLY]
        assert len(list((folder / name).glob("call=*"))) == 2
        bounded = [note for note in run.facts("import")["notes"] if "lower bound" in note]
        assert bool(bounded) == (name != "rocktokens_k1")
        record[name] = {"rollouts": run.facts("import")["rollouts"], "costly": costly}
        assert record[name]["rollouts"] == 80
    FOUND["verl"] = found | {"telemetry into detect": record}


@needs("swift")
def test_the_exported_file_takes_the_ids_out_of_ms_swifts_loss(wheel, folder, tmp_path):
    found = findings("swift", wheel, folder)
    true_everywhere(found["cases"].values())
    assert "another tokenizer" in found["refused"]
    run = import_dump("jsonl", [folder / "record"], str(folder / "tokenizer"), tmp_path / "run")
    assert run.facts("import")["exact_kl"]
    costly = [row["token_id"] for row in run.types().to_pylist() if row["class"] == "costly"]
    assert costly == [dumps.COSTLY]
    FOUND["ms-swift"] = found | {"telemetry into detect": {"costly": costly}}


def test_the_exported_loss_hands_slime_masks_without_the_ids(folder, tmp_path, monkeypatch):
    """Against stand-ins of the two functions that it calls, with the arguments that slime's source gives them."""
    given = {}

    def reducer(total_lengths, response_lengths, masks, sums, per_token):
        return lambda x: sum((x_i * m).sum() / d for x_i, m, d in zip(x.split(response_lengths), masks, sums))

    def policy(args, batch, logits, reduce):
        given.update(batch)
        return reduce(logits), {}

    for name, member in (("cp_utils", reducer), ("loss", policy)):
        made = types.ModuleType(f"slime.backends.megatron_utils.{name}")
        vars(made)["get_sum_of_sample_mean" if name == "cp_utils" else "policy_loss_function"] = member
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    file = export(folder / "bypass.json", "slime", tmp_path / "list_slime.py")
    monkeypatch.syspath_prepend(tmp_path)
    import list_slime

    tokens = [torch.tensor([3, dumps.COSTLY, 4, dumps.COSTLY, 9]), torch.tensor([9, 5, 6])]
    masks = [torch.tensor([1, 1, 1]), torch.tensor([0, 1])]
    batch = {"unconcat_tokens": tokens, "loss_masks": masks, "total_lengths": [5, 3], "response_lengths": [3, 2]}
    batch["rollout_mask_sums"] = [torch.tensor(3), torch.tensor(1)]
    args = types.SimpleNamespace(hf_checkpoint=str(folder / "tokenizer"), calculate_per_token_loss=False)
    loss, _ = list_slime.frozen(args, batch, torch.ones(5), None)
    assert [mask.tolist() for mask in given["loss_masks"]] == [[1, 0, 0], [0, 1]]
    assert [mask.tolist() for mask in masks] == [[1, 1, 1], [0, 1]]  # slime's own stay as they are
    np.testing.assert_allclose(float(loss), 1 / 3 + 1)
    assert "slime" in file.read_text().splitlines()[0]
    args.hf_checkpoint = str(folder / "other")
    with pytest.raises(ValueError, match="another tokenizer"):
        list_slime.frozen(args, batch, torch.ones(5), None)
