"""What is written beside an exported model: a model card, and on request a GGUF file or a copy on the hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from alignment import __version__, runs
from alignment.checkpoint import checkpoint_of
from alignment.comparison import last_metrics
from alignment.diagnosis_source import of_folder
from alignment.errors import UserError
from alignment.sources import one_line

CONVERTER = "convert_hf_to_gguf.py"
"""llama.cpp's own; it knows each architecture."""
_UNKNOWN = "not stated: it follows from that of the base model and of the data (`alignment export --license` states it)"


def write_card(checkpoint: str | Path, out: Path, licence: str | None = None) -> Path:
    """Write README.md into an exported folder, from the run that the checkpoint belongs to.

    Args:
        checkpoint: its folder, or its run's. out: the exported model.
        licence: an identifier of the hub, such as apache-2.0.
    """
    folder = checkpoint_of(checkpoint)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else None
    config = _config(run)
    card = out / "README.md"
    card.write_text(_text(out.name, folder, run, config, licence), encoding="utf-8")
    return card


def _config(run: Path | None) -> Mapping[str, Any]:
    if run is None:
        return {}
    try:
        found = yaml.safe_load((run / "config" / "fit.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(name: str, checkpoint: Path, run: Path | None, config: Mapping[str, Any], licence: str | None) -> str:
    model = config.get("model") or {}
    base = ((model.get("init_args") or {}).get("policy") or {}).get("name")
    module = str(model.get("class_path", "")).rpartition(".")[2]
    tags = ["lightning-alignment", *([module.lower()] if module else [])]
    head: dict[str, Any] = {"library_name": "transformers", "tags": tags}
    head |= {"license": licence} if licence else {}
    head |= {"base_model": base} if _on_hub(base) else {}
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {name}", ""]
    made = f"Trained with {module}" if module else "Trained"
    lines += [f"{made} from `{base}`" if base else made]
    lines += [f"by lightning-alignment {__version__}; {checkpoint.name}.", ""]
    lines += [f"Licence: {licence or _UNKNOWN}.", ""]
    lines += _run_lines(run)
    lines += _data_lines(config.get("data") or {})
    lines += _metric_lines(run)
    if config:
        text = yaml.safe_dump(dict(config), sort_keys=False).rstrip()
        lines += ["## Configuration", "", "`alignment fit -c` this file repeats the run.", ""]
        lines += ["```yaml", text, "```", ""]
    return "\n".join(lines)


def _on_hub(base: Any) -> bool:
    """Whether a name can only be a hub id; the hub refuses a card whose base model is a folder of somebody's."""
    return isinstance(base, str) and base.count("/") == 1 and not Path(base).exists()


def _run_lines(run: Path | None) -> list[str]:
    record = runs.read_record(run) if run is not None else None
    if run is None or record is None:
        return []
    called = f" '{record['run_name']}'" if record.get("run_name") else ""
    return [f"MLflow run {record.get('run_id') or run.name}{called} of experiment '{record.get('experiment')}'.", ""]


def _data_lines(data: Mapping[str, Any]) -> list[str]:
    settings = data.get("init_args") or {}
    wanted = ("path", "split", "config", "max_rows", "batch_size")
    rows = [f"| {key} | `{settings[key]}` |" for key in wanted if settings.get(key) is not None]
    return ["## Data", "", "| | |", "|---|---|", *rows, ""] if rows else []


def _metric_lines(run: Path | None) -> list[str]:
    if run is None or not (run / "metrics.jsonl").is_file():
        return []
    found = {n: v for n, v in last_metrics(of_folder(run)).items() if n.startswith(("val/", "test/"))}
    rows = [f"| {name} | {value:.4g} |" for name, value in sorted(found.items())]
    return ["## Metrics", "", "Last value of each.", "", "| metric | value |", "|---|---:|", *rows, ""] if rows else []


# ------------------------------------------------------------------------------------------------- GGUF and hub


def write_gguf(out: Path, kind: str, llama_cpp: Path | None = None) -> Path:
    """Convert an exported folder with llama.cpp's converter; the file lies inside it.

    Args:
        kind: what the converter calls the type, such as f16 or q8_0.
        llama_cpp: folder of llama.cpp. None: that of the environment variable LLAMA_CPP, or the converter on PATH.

    Raises UserError where there is no converter, and with its last line where it fails.
    """
    script = converter(llama_cpp)
    target = out / f"{out.name}-{kind}.gguf"
    done = subprocess.run(
        [sys.executable, str(script), str(out), "--outfile", str(target), "--outtype", kind],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0 or not target.is_file():
        target.unlink(missing_ok=True)
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(f"{script.name} could not convert '{out}' to {kind}: {said[-1] if said else 'it said nothing'}")
    return target


def converter(llama_cpp: Path | None) -> Path:
    """llama.cpp's script. Raises UserError where it is not."""
    folder = llama_cpp or (Path(os.environ["LLAMA_CPP"]) if os.environ.get("LLAMA_CPP") else None)
    found = shutil.which(CONVERTER) if folder is None else str(folder / CONVERTER)
    if found is None or not Path(found).is_file():
        place = "on PATH" if folder is None else f"in '{folder}'"
        raise UserError(f"a GGUF file needs llama.cpp's {CONVERTER}, and there is none {place}: clone "
                        "github.com/ggml-org/llama.cpp and give its folder as --llama_cpp")  # fmt: skip
    return Path(found)


def push(out: Path, repository: str, *, private: bool) -> str:
    """Copy an exported folder to the hub, as whoever `hf auth login` or HF_TOKEN says. Returns its address.

    Raises UserError where the hub cannot be reached or says no.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(out))
    except Exception as error:  # whatever its client raises for a network or a refusal: the export is done all the same
        why = one_line(error)
        raise UserError(f"'{out}' is exported, but the hub did not take it as '{repository}': {why}") from error
    return str(address)
