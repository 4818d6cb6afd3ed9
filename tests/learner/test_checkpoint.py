from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.errors import CheckpointError
from groupwise.learner import checkpoint as checkpoints
from groupwise.learner.checkpoint import (
    latest_checkpoint,
    load_optimizer,
    optimizer_tensors,
    prune,
    verify,
    write_checkpoint,
)


def writes(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(content)
        (folder / "optimizer.bin").write_text(content * 2)

    return write


def save(folder: Path, step: int, content: str = "weights") -> Path:
    return write_checkpoint(folder, step=step, write=writes(content), state={"cursor": 8 * step})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    assert path == tmp_path / "step-000010"
    assert verify(path) == {"step": 10, "cursor": 80}
    assert (path / "model" / "weights.bin").read_text() == "weights"
    assert names(tmp_path) == ["step-000010"]


def test_every_file_is_listed_with_size_and_checksum(tmp_path: Path) -> None:
    checksums = json.loads((save(tmp_path, 1, "abc") / "checksums.json").read_text())
    assert sorted(checksums) == ["model/weights.bin", "optimizer.bin", "state.json"]
    assert checksums["model/weights.bin"] == {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }


def test_weights_can_be_read_by_all_who_can_read_the_checkpoint(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")

    path = write_checkpoint(tmp_path, step=10, write=write, state={})
    assert (path / "model.safetensors").stat().st_mode & 0o666 == path.stat().st_mode & 0o666


def test_the_latest_is_the_highest_step_and_none_without_checkpoints(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nothing here") is None
    for step in (5, 20, 10):
        save(tmp_path, step)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000020"


def test_an_error_while_writing_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    def breaks(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("no such tensor")

    save(tmp_path, 10)
    with pytest.raises(RuntimeError, match="no such tensor"):
        write_checkpoint(tmp_path, step=20, write=breaks, state={})
    assert names(tmp_path) == ["step-000010"]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot write step-000020 in .*: No space left on device"):
        write_checkpoint(tmp_path, step=20, write=full, state={})


KILLED = """
import os, pathlib, signal, sys
from groupwise.learner import checkpoint
folder, moment = pathlib.Path(sys.argv[1]), sys.argv[2]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def write(target):
    (target / "weights.bin").write_text("new")
    if moment == "between files":
        die()
    (target / "optimizer.bin").write_text("new")

real_rename = pathlib.Path.rename
def rename(path, target):
    if moment == "before the old one moves" and not path.name.startswith("."):
        die()
    if moment == "before the new one gets its name" and ".tmp-" in path.name:
        die()
    return real_rename(path, target)

if moment == "before the checksums":
    checkpoint.seal = die
if moment == "before the old one is deleted":
    checkpoint.shutil.rmtree = die
pathlib.Path.rename = rename
checkpoint.write_checkpoint(folder, step=int(sys.argv[3]), write=write, state={})
"""

MOMENTS = {
    "between files": "old",
    "before the checksums": "old",
    "before the old one moves": "old",
    "before the new one gets its name": "old",
    "before the old one is deleted": "new",
}


def kill_while_writing(folder: Path, moment: str, step: int) -> None:
    outcome = subprocess.run([sys.executable, "-c", KILLED, str(folder), moment, str(step)], timeout=60)
    assert outcome.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("moment", "survivor"), MOMENTS.items())
def test_a_kill_while_replacing_a_step_always_leaves_a_good_one_of_it(
    tmp_path: Path, moment: str, survivor: str
) -> None:
    def write_old(folder: Path) -> None:
        (folder / "weights.bin").write_text("old")

    write_checkpoint(tmp_path, step=10, write=write_old, state={})
    kill_while_writing(tmp_path, moment, 10)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert verify(latest)["step"] == 10
    assert (latest / "weights.bin").read_text() == survivor
    assert (save(tmp_path, 10, "third") / "model" / "weights.bin").read_text() == "third"
    assert names(tmp_path) == ["step-000010"]


@pytest.mark.parametrize("moment", ["between files", "before the new one gets its name"])
def test_a_kill_while_writing_a_new_step_leaves_the_step_before(tmp_path: Path, moment: str) -> None:
    save(tmp_path, 10)
    kill_while_writing(tmp_path, moment, 20)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000010"
    save(tmp_path, 20)
    assert names(tmp_path) == ["step-000010", "step-000020"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("harm", "file", "complaint"),
    [
        (flip, "model/weights.bin", "model/weights.bin does not match its checksum"),
        (Path.unlink, "optimizer.bin", "optimizer.bin is missing"),
        (truncate, "state.json", "state.json has"),
        (Path.unlink, "checksums.json", "checksums.json is missing"),
        (truncate, "checksums.json", "checksums.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_names_the_file_and_the_one_to_use_instead(
    tmp_path: Path, harm: Callable[[Path], None], file: str, complaint: str
) -> None:
    save(tmp_path, 10)
    damaged = save(tmp_path, 20)
    harm(damaged / file)
    with pytest.raises(CheckpointError) as error:
        verify(damaged)
    assert complaint in str(error.value)
    assert "step-000010 is intact; move step-000020 away" in str(error.value)
    assert "\n" not in str(error.value)


def test_advice_never_names_another_damaged_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    flip(tmp_path / "step-000020" / "optimizer.bin")
    flip(tmp_path / "step-000030" / "optimizer.bin")
    with pytest.raises(CheckpointError, match="step-000010 is intact"):
        verify(tmp_path / "step-000030")
    shutil.rmtree(tmp_path / "step-000010")
    with pytest.raises(CheckpointError, match="no older checkpoint is intact"):
        verify(tmp_path / "step-000030")


def test_an_incomplete_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "optimizer.bin").unlink()
    with caplog.at_level(logging.WARNING, logger="groupwise"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-000010"
    assert "step-000020: optimizer.bin is missing" in caplog.text


def test_a_folder_moved_out_of_the_way_no_longer_counts(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20).rename(tmp_path / "step-000020.damaged")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000010"


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    prune(tmp_path, keep_last=2, best=20)
    assert names(tmp_path) == ["step-000020", "step-000040", "step-000050"]
    prune(tmp_path, keep_last=1, best=None)
    assert names(tmp_path) == ["step-000050"]


def test_leftovers_of_a_killed_process_are_removed_but_never_the_only_copy(tmp_path: Path) -> None:
    save(tmp_path, 10).rename(tmp_path / ".step-000010.replaced")
    (tmp_path / ".step-000020.tmp-1").mkdir()
    checkpoints.remove_leftovers(tmp_path)
    assert names(tmp_path) == [".step-000010.replaced"]
    assert latest_checkpoint(tmp_path) == tmp_path / ".step-000010.replaced"


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 4)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.tanh(self.first(inputs)))
        return outputs


def adamw(model: Line) -> torch.optim.AdamW:
    groups = [
        {"params": list(model.last.parameters()), "weight_decay": 0.1},
        {"params": list(model.first.parameters()), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def train(model: Line, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def test_an_optimizer_taken_through_safetensors_and_json_continues_bit_for_bit(tmp_path: Path) -> None:
    straight = Line()
    straight_optimizer = adamw(straight)
    train(straight, straight_optimizer, range(6))

    half = Line()
    half_optimizer = adamw(half)
    train(half, half_optimizer, range(3))
    tensors, settings = optimizer_tensors(half_optimizer, dict(half.named_parameters()))
    save_file(tensors, tmp_path / "optimizer.safetensors")
    text = json.dumps(settings)

    resumed = Line()
    resumed.load_state_dict(half.state_dict())
    optimizer = adamw(resumed)
    load_optimizer(
        optimizer,
        dict(resumed.named_parameters()),
        tensors=load_file(tmp_path / "optimizer.safetensors"),
        settings=json.loads(text),
    )
    train(resumed, optimizer, range(3, 6))

    for name, weight in straight.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name)), name
    expected, expected_settings = optimizer_tensors(straight_optimizer, dict(straight.named_parameters()))
    found, found_settings = optimizer_tensors(optimizer, dict(resumed.named_parameters()))
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["first.bias.step"].item() == 6
    assert json.dumps(found_settings) == json.dumps(expected_settings)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = Line()
    optimizer = adamw(model)
    parameters = dict(model.named_parameters())
    tensors, settings = optimizer_tensors(optimizer, parameters)
    renamed = {f"other.{name}": parameter for name, parameter in parameters.items()}
    with pytest.raises(CheckpointError, match="other parameters"):
        load_optimizer(optimizer, renamed, tensors=tensors, settings=settings)
