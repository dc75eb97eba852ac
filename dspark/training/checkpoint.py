"""`checkpoint-<step>/`: all a run needs to go on, written so that a kill leaves none half done.

A checkpoint is written under another name, every file is synced, `COMPLETE` (the list of files
with their sizes) comes last, and only then the directory gets its name. What does not hold a
`COMPLETE` is never read. No random state is stored: every random number of a run is a function of
(seed, step, row).

    model.safetensors   the draft's own weights, fp32 masters, without the shared embedding and head
    ema.safetensors     their average over the steps, with `train.ema_decay`
    config.json         the draft's shape
    optimizer.pt        AdamW moments, by parameter name
    trainer_state.json  step, structure, best, half-filled metric window
    config.yaml         resolved settings
    provenance.json     versions, revision, command line
    check.json          validation prompts and their accept length, where validated: the export's
                        check decodes them again; check_ema.json: the same for the average
    COMPLETE            written last

Beside them stand the links `latest` and `best`.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dspark import config_io, provenance
from dspark.config import Config
from dspark.errors import CheckpointError, RunError
from dspark.export.check import AVERAGE_PROBE_NAME, Probe, save_probe
from dspark.export.tensors import AVERAGE_NAME
from dspark.target.fingerprint import difference

__all__ = [
    "Best",
    "Saved",
    "TrainState",
    "check_links",
    "check_structure",
    "clear_leftovers",
    "find_complete",
    "link",
    "mend_links",
    "newest_complete",
    "optimizer_by_name",
    "read",
    "restore_optimizer",
    "rotate",
    "save",
    "verify_complete",
]

log = logging.getLogger(__name__)

FORMAT = 2
_KNOWN = (1, 2)  # 1 knew no average of the weights
_COMPLETE = "COMPLETE"
_NAME = re.compile(r"checkpoint-\d+")
_ASIDE = ".checkpoint-"
_LEFT = re.compile(
    r"\.(checkpoint-\d+|(latest|best|metrics\.jsonl|config\.yaml|provenance\.json)\.\d+)\.tmp"
)


@dataclass(frozen=True)
class Best:
    """The checkpoint whose real decode accepted most."""

    step: int
    accept_length: float
    weights: Literal["raw", "ema"] = "raw"
    """Which of its weights did: those of the step, or their average over the steps."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What the trainer knows beside weights and moments; `trainer_state.json`."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: int
    """Optimizer steps done."""
    total_steps: int
    world_size: int
    structure: dict[str, Any]
    """Dotted names and values that must not differ when the run goes on."""
    window: list[list[float]] = field(default_factory=list)
    """Sums of the metric window since the last logged line, one list per process."""
    window_steps: int = 0
    best: Best | None = None
    ema_since: int | None = None
    """Steps that were done when the average of the weights began; None: there is none."""
    tracker_run: str | None = None
    """Run id at the tracker, to continue the same curve."""
    format: int = FORMAT


_STATE = TypeAdapter(TrainState)
_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint read back."""

    path: Path
    state: TrainState
    weights: dict[str, Tensor]
    moments: dict[str, Any]
    """As `optimizer_by_name` gave it."""
    config: Config
    average: dict[str, Tensor] | None = None
    """Of the weights over the steps."""


def save(
    output_dir: Path,
    state: TrainState,
    *,
    weights: Mapping[str, Tensor],
    draft_config: Mapping[str, Any],
    moments: Mapping[str, Any],
    config: Config,
    average: Mapping[str, Tensor] | None = None,
    probe: Probe | None = None,
    average_probe: Probe | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """Write `checkpoint-<state.step>` into ``output_dir`` and point `latest` at it.

    ``average`` belongs to ``state.ema_since``. ``data``: what the record says about the rows.

    Raises:
        RunError: the disk refuses (full, read-only).
    """
    try:
        return _save(
            output_dir,
            state,
            weights=weights,
            draft_config=draft_config,
            moments=moments,
            config=config,
            average=average,
            probe=probe,
            average_probe=average_probe,
            data=data,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch and safetensors have words of their own for a disk that refuses; the room tells
        reason, free = str(error).splitlines()[0], shutil.disk_usage(output_dir).free / 1e9
        raise RunError(
            f"cannot write a checkpoint into {output_dir} ({free:.1f} GB free there): {reason}"
        ) from error


def _save(
    output_dir: Path,
    state: TrainState,
    *,
    weights: Mapping[str, Tensor],
    draft_config: Mapping[str, Any],
    moments: Mapping[str, Any],
    config: Config,
    average: Mapping[str, Tensor] | None = None,
    probe: Probe | None = None,
    average_probe: Probe | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    final = output_dir / f"checkpoint-{state.step}"
    aside = output_dir / f"{_ASIDE}{state.step}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    provenance.save_tensors(_plain(weights), aside / "model.safetensors")
    if average is not None:
        provenance.save_tensors(_plain(average), aside / AVERAGE_NAME)
    torch.save(dict(moments), aside / "optimizer.pt")
    provenance.write_json(aside / "config.json", dict(draft_config))
    provenance.write_json(aside / "trainer_state.json", asdict(state))
    provenance.write_json(aside / "provenance.json", provenance.collect(step=state.step, data=data))
    config_io.save(config, aside / "config.yaml")
    if probe is not None:
        save_probe(aside, probe)
    if average_probe is not None:
        save_probe(aside, average_probe, AVERAGE_PROBE_NAME)
    sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    for name in sizes:
        _sync(aside / name)
    provenance.write_json(aside / _COMPLETE, {"format": FORMAT, "files": sizes})
    _sync(aside / _COMPLETE)
    _sync(aside)
    if final.exists():
        # a half-written one of the same step, or one that a resume from further back overtakes
        shutil.rmtree(final)
    os.replace(aside, final)
    _sync(output_dir)
    link(output_dir, "latest", state.step)
    return final


def read(path: Path) -> Saved:
    """Read a checkpoint directory back.

    Raises:
        CheckpointError: it is incomplete, damaged, or of a format that is not known here.
    """
    state = read_state(path)
    try:
        weights = load_file(path / "model.safetensors")
        average = None if state.ema_since is None else load_file(path / AVERAGE_NAME)
        moments = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    _check_tensors(path, weights, moments, average or {})
    return Saved(
        path=path,
        state=state,
        weights=weights,
        moments=moments,
        config=config_io.load(path / "config.yaml"),
        average=average,
    )


def read_state(path: Path) -> TrainState:
    """What a complete checkpoint says of itself, without its weights.

    Raises:
        CheckpointError: it is incomplete, damaged, or of a format that is not known here.
    """
    verify_complete(path)
    try:
        return _STATE.validate_json((path / "trainer_state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _check_tensors(
    path: Path, weights: Mapping[str, Tensor], moments: Any, average: Mapping[str, Tensor]
) -> None:
    """Refuse what a training could not go on from, or only to a loss that is not finite."""

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{path} {what}: move it away to go on from an older one")

    if not isinstance(moments, dict) or moments.keys() != weights.keys():
        raise refuse("holds moments of other tensors than its weights")
    for name, weight in weights.items():
        held = moments[name]
        # none at all: a tensor that no term of the loss has reached
        if not isinstance(held, dict) or (held and held.keys() != _MOMENTS):
            raise refuse(f"holds no AdamW moments of {name}")
        if any(value.shape != weight.shape for key, value in held.items() if key != "step"):
            raise refuse(f"holds moments of {name} in another shape than its weight")
        values = [weight, *held.values(), *([average[name]] if name in average else [])]
        if not all(bool(value.isfinite().all()) for value in values):
            raise refuse(f"holds NaN or Inf in {name}")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({type(error).__name__}): move it away to go on from an older one"
    )


def verify_complete(path: Path) -> None:
    """Check that every file `COMPLETE` lists is there in its full size.

    Raises:
        CheckpointError: `COMPLETE` is missing or of another format, or a file is missing or cut.
    """
    try:
        complete = json.loads((path / _COMPLETE).read_text(encoding="utf-8"))
        version, files = complete["format"], dict(complete["files"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} holds no {_COMPLETE}: it is not a training checkpoint, or a half-written one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _COMPLETE} cannot be read: {error}") from error
    if version not in _KNOWN:
        known = " and ".join(map(str, _KNOWN))
        raise CheckpointError(f"{path} has checkpoint format {version}; known here: {known}")
    for name, size in files.items():
        file = path / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(
                f"{file} {state}: move that checkpoint away to go on from an older one"
            )


def find_complete(output_dir: Path) -> list[Path]:
    """Complete checkpoints in ``output_dir``, oldest first; the log names the incomplete ones."""
    found = []
    for path in _find(output_dir):
        if (path / _COMPLETE).exists():
            found.append(path)
        else:
            log.warning("ignoring %s: it holds no %s (half-written)", path, _COMPLETE)
    return found


def newest_complete(output_dir: Path) -> Path | None:
    """The checkpoint a run in ``output_dir`` goes on from; None where there is none at all.

    Raises:
        CheckpointError: there are some, but no complete one. A killed run leaves none such, so
            going on from nothing would be no one's wish.
    """
    complete = find_complete(output_dir)
    if complete:
        return complete[-1]
    damaged = _find(output_dir)
    if damaged:
        raise CheckpointError(
            f"{damaged[-1]} holds no {_COMPLETE}, and no other checkpoint there is complete: "
            "move it away to start afresh, or choose another train.output_dir"
        )
    return None


def clear_leftovers(output_dir: Path) -> None:
    """Remove what a killed run left under temporary names."""
    for path in sorted(output_dir.iterdir()) if output_dir.is_dir() else ():
        if _LEFT.fullmatch(path.name):
            log.warning("removing %s, left by a run that was killed", path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def link(output_dir: Path, name: str, step: int) -> None:
    """Point the link ``name`` at `checkpoint-<step>`, in one move."""
    aside = output_dir / f".{name}.{os.getpid()}.tmp"
    aside.unlink(missing_ok=True)
    aside.symlink_to(f"checkpoint-{step}", target_is_directory=True)
    os.replace(aside, output_dir / name)


def mend_links(path: Path) -> None:
    """Point `latest`, and `best` if it is that one, at the newest checkpoint ``path``.

    A run that was killed behind its rename has not come to it, and may have no step left to do so.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    best = read_state(path).best
    link(path.parent, "latest", _step(path))
    if best is not None and (path.parent / f"checkpoint-{best.step}").is_dir():
        link(path.parent, "best", best.step)


def check_links(output_dir: Path) -> None:
    """Refuse directories in the place of the links: some ways to copy a run make such.

    Raises:
        CheckpointError: `latest` or `best` is one.
    """
    for name in ("latest", "best"):
        place = output_dir / name
        if place.is_dir() and not place.is_symlink():
            raise CheckpointError(
                f"{place} is a directory, where a link to a checkpoint belongs (copied without its "
                "links?): move it away"
            )


def rotate(output_dir: Path, *, keep: int, best: Best | None) -> None:
    """Remove all complete checkpoints but the newest ``keep`` and the best one."""
    for path in find_complete(output_dir)[:-keep]:
        if best is None or path.name != f"checkpoint-{best.step}":
            shutil.rmtree(path)


def check_structure(saved: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on when what makes a run the same run has changed.

    Raises:
        CheckpointError: names the first key that differs, with both values.
    """
    # settings first: they can be restored, and what differs behind them follows from them
    keys = dict.fromkeys([*saved, *current])
    for key in sorted(keys, key=lambda key: "." not in key):
        then, now = saved.get(key), current.get(key)
        # the saved side went through JSON, where tuples became lists
        if then != json.loads(json.dumps(now)):
            if key == "target" and then and now:
                raise CheckpointError(
                    f"the target's {difference(str(then), str(now))} are not those that {path} was "
                    "trained with: restore target.path and target.dtype, or start in another "
                    "train.output_dir"
                )
            raise CheckpointError(
                f"{key} is {now} but {path} was trained with {then}: "
                "restore it, or start in another train.output_dir"
            )


def optimizer_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Moments of every parameter under its name; ``names`` maps id(parameter) to it."""
    return {
        names[id(parameter)]: {key: value for key, value in optimizer.state[parameter].items()}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, moments: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """Put `optimizer_by_name`'s moments back, on each parameter's device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                key: value.to(parameter.device)
                for key, value in moments[names[id(parameter)]].items()
            }


def _find(output_dir: Path) -> list[Path]:
    """Everything that is named like a checkpoint, oldest first."""
    found = [
        path
        for path in (output_dir.iterdir() if output_dir.is_dir() else ())
        if _NAME.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def _sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
